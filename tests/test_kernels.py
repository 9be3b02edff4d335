"""Block kernels against the reference, and the reference against autograd, forward and backward."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_striped import KernelUnavailableError
from hf_striped.kernels import KERNELS, choose_kernel
from hf_striped.kernels import cpu as cpu_module
from hf_striped.kernels import reference as reference_module
from hf_striped.kernels.base import ScoreRule
from hf_striped.kernels.cuts import causal_cuts
from hf_striped.lse import merge_partial_
from hf_striped.packing import Span, block_spans
from tests.tolerances import assert_gradients_equal, assert_outputs_equal

RULE = ScoreRule(0.3)
RULES = {
    "plain": RULE,
    "own key only": ScoreRule(0.3, window_left=0),
    "window": ScoreRule(0.3, window_left=3),
    "window beyond the sequence": ScoreRule(0.3, window_left=100),
    "softcap": ScoreRule(0.3, softcap=0.5),
    "softcap in a window": ScoreRule(0.3, softcap=0.5, window_left=2),
}
CPU = torch.device("cpu")
SETTINGS = {
    "dense": ([0, 24], 2, 1, 0),
    "dense, diagonal excluded": ([0, 24], 2, 0, 1),
    "packed": ([0, 1, 2, 9, 9, 13, 24], 2, 0, 1),
    "one token": ([0, 3], 3, 1, 1),
    "no pair": ([0, 3], 3, 0, 1),
}


def block(bounds, cp_size, heads=4, key_heads=2, head_dim=8, value_head_dim=8, dtype=torch.float64):
    local = bounds[-1] // cp_size
    query = torch.randn(local, heads, head_dim, dtype=dtype)
    key = torch.randn(local, key_heads, head_dim, dtype=dtype)
    return query, key, torch.randn(local, key_heads, value_head_dim, dtype=dtype)


def whole(pieces, like):
    """The pieces of a forward pass merged, zero and -inf where nothing was computed."""
    out = torch.zeros(*like.shape[:2], 0)
    lse = torch.full(like.shape[:2], -torch.inf, dtype=torch.float64)
    for piece in pieces:
        if out.shape[-1] == 0:
            out = torch.zeros(*like.shape[:2], piece.out.shape[-1], dtype=torch.float64)
        sofar = out[piece.queries], lse[piece.queries]
        merge_partial_(*sofar, piece.out.detach().double(), piece.lse.detach().double())
    return out, lse


def summed(pieces, *like):
    totals = [torch.zeros_like(tensor, dtype=torch.float64) for tensor in like]
    for piece in pieces:
        totals[0][piece.queries] += piece.dquery
        totals[1][piece.keys] += piece.dkey
        totals[2][piece.keys] += piece.dvalue
    return totals


def plain_attention(query, key, value, spans, rule):
    """Attention over the allowed pairs of the spans by one masked softmax, for autograd."""
    allowed = torch.zeros(len(query), len(key), dtype=torch.bool)
    for span in spans:
        ones = torch.ones(span.length, span.length).tril()
        left = span.length if rule.window_left is None else rule.window_left
        allowed[span.queries, span.keys] = ones.triu(-left).bool()
    groups = query.shape[1] // key.shape[1]
    scores = torch.einsum("qhd,khd->qhk", query, key.repeat_interleave(groups, 1)) * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * (scores / rule.softcap).tanh()
    scores = scores.masked_fill(~allowed[:, None], -torch.inf)
    weights = scores.softmax(-1).nan_to_num()
    return torch.einsum("qhk,khd->qhd", weights, value.repeat_interleave(groups, 1))


@pytest.fixture(params=[1, 2, 256], ids=["tiles of 1", "tiles of 2", "one tile"])
def tile_size(request, monkeypatch):
    """Tests run on sequences of a few tokens: cut them as long ones are cut."""
    monkeypatch.setattr(reference_module, "TILE", request.param)
    monkeypatch.setattr(cpu_module, "TILE", request.param)
    monkeypatch.setattr(cpu_module, "TRIANGLE", request.param)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("name", SETTINGS)
def test_the_reference_equals_autograd_through_a_masked_softmax(name, rule, tile_size):
    bounds, cp_size, query_rank, key_rank = SETTINGS[name]
    spans = block_spans(bounds, cp_size, query_rank, key_rank)
    query, key, value = (t.requires_grad_() for t in block(bounds, cp_size))
    expected = plain_attention(query, key, value, spans, rule)
    dout = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, (query, key, value), dout, allow_unused=True)
    kernel = KERNELS["reference"]
    out, lse = whole(kernel.forward(query, key, value, spans, rule), query)
    if spans:
        assert_outputs_equal(out, expected.detach())
    pieces = kernel.backward(dout, query, key, value, out, lse, spans, rule)
    for actual, wanted in zip(summed(pieces, query, key, value), gradients, strict=True):
        assert_gradients_equal(actual.detach(), wanted)


@pytest.mark.parametrize("smallest", [1, 2, 3, 100])
@pytest.mark.parametrize("length", [1, 2, 5, 16, 33])
def test_cuts_hold_each_pair_once(length, smallest):
    """Every pair of a causal span, counted by brute force."""
    span = Span(3, 2, length)
    counted = torch.zeros(length + 3, length + 2, dtype=torch.int)
    for queries, keys, causal in causal_cuts(span, smallest):
        seen = torch.ones(queries.stop - queries.start, keys.stop - keys.start, dtype=torch.int)
        counted[queries, keys] += seen.tril() if causal else seen
    expected = torch.ones(length, length, dtype=torch.int).tril()
    assert torch.equal(counted[span.queries, span.keys], expected)
    assert counted.sum() == expected.sum()


@pytest.mark.parametrize("rule", [r for r in RULES.values() if r.softcap is None])
@pytest.mark.parametrize("value_head_dim", [8, 4, 16])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_cpu_kernel_equals_the_reference(name, key_heads, value_head_dim, rule, tile_size):
    bounds, cp_size, query_rank, key_rank = SETTINGS[name]
    spans = block_spans(bounds, cp_size, query_rank, key_rank)
    query, key, value = block(bounds, cp_size, key_heads=key_heads, value_head_dim=value_head_dim)
    found = {}
    for kernel in (KERNELS["reference"], KERNELS["cpu"]):
        out, lse = whole(kernel.forward(query, key, value, spans, rule), query)
        # the global lse is at least the block's: half as much weight on every pair
        dout = torch.ones_like(out) if not found else found["reference"][2]
        pieces = kernel.backward(dout, query, key, value, out, lse + 0.7, spans, rule)
        found[kernel.name] = out, lse, dout, summed(pieces, query, key, value)
    assert_outputs_equal(found["cpu"][0], found["reference"][0])
    assert_outputs_equal(found["cpu"][1], found["reference"][1])
    for actual, expected in zip(found["cpu"][3], found["reference"][3], strict=True):
        assert_gradients_equal(actual, expected)


@settings(max_examples=25, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 60), max_size=6),
    ranks=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    head_dim=st.sampled_from([1, 3, 64]),
    window_left=st.one_of(st.none(), st.integers(0, 20)),
)
def test_the_cpu_kernel_equals_the_reference_for_any_documents(cuts, ranks, head_dim, window_left):
    rule = ScoreRule(0.2, window_left=window_left)
    bounds = [0, *sorted(cuts), 60]
    spans = block_spans(bounds, 4, *ranks)
    query, key, value = block(bounds, 4, head_dim=head_dim, value_head_dim=head_dim)
    results = [
        whole(KERNELS[name].forward(query, key, value, spans, rule), query)
        for name in ("cpu", "reference")
    ]
    if spans:
        assert_outputs_equal(results[0][0], results[1][0])
    assert_outputs_equal(results[0][1], results[1][1])


def test_the_automatic_choice_on_a_cpu_is_the_cpu_kernel():
    assert choose_kernel("auto", CPU, torch.float32).name == "cpu"


def test_a_softcap_on_a_cpu_is_computed_by_the_reference():
    assert choose_kernel("auto", CPU, torch.float32, softcap=30.0).name == "reference"
    with pytest.raises(KernelUnavailableError, match="has no softcap"):
        choose_kernel("cpu", CPU, torch.float32, softcap=30.0)


def test_an_unknown_kernel_is_refused_with_the_valid_names():
    with pytest.raises(KernelUnavailableError, match=r"'cpu'.*received 'flesh'"):
        choose_kernel("flesh", CPU, torch.float32)


def test_a_kernel_that_cannot_run_is_refused_with_the_reason():
    with pytest.raises(KernelUnavailableError, match=r"it takes .*and these are torch\.int8"):
        choose_kernel("cpu", CPU, torch.int8)
    with pytest.raises(KernelUnavailableError, match="cpu: it runs on cpu tensors"):
        choose_kernel("auto", torch.device("meta"), torch.float32)
