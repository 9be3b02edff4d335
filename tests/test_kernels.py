"""Block kernels against the reference, and the reference against autograd, forward and backward."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_striped import KernelUnavailableError
from hf_striped.kernels import KERNELS, choose_kernel
from hf_striped.packing import block_spans
from tests.tolerances import assert_gradients_equal, assert_outputs_equal

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
    """The pieces of a forward pass in one tensor each, zero and -inf where nothing was computed."""
    out = torch.zeros(*like.shape[:2], 0)
    lse = torch.full(like.shape[:2], -torch.inf, dtype=torch.float64)
    for piece in pieces:
        if out.shape[-1] == 0:
            out = torch.zeros(*like.shape[:2], piece.out.shape[-1], dtype=torch.float64)
        out[piece.queries], lse[piece.queries] = piece.out.double(), piece.lse.double()
    return out, lse


def summed(pieces, *like):
    totals = [torch.zeros_like(tensor, dtype=torch.float64) for tensor in like]
    for piece in pieces:
        totals[0][piece.queries] += piece.dquery
        totals[1][piece.keys] += piece.dkey
        totals[2][piece.keys] += piece.dvalue
    return totals


def plain_attention(query, key, value, spans, scale):
    """Attention over the allowed pairs of the spans by one masked softmax, for autograd."""
    allowed = torch.zeros(len(query), len(key), dtype=torch.bool)
    for span in spans:
        allowed[span.queries, span.keys] = torch.ones(span.length, span.length).tril().bool()
    groups = query.shape[1] // key.shape[1]
    scores = torch.einsum("qhd,khd->qhk", query, key.repeat_interleave(groups, 1)) * scale
    scores = scores.masked_fill(~allowed[:, None], -torch.inf)
    weights = scores.softmax(-1).nan_to_num()
    return torch.einsum("qhk,khd->qhd", weights, value.repeat_interleave(groups, 1))


@pytest.mark.parametrize("name", SETTINGS)
def test_the_reference_equals_autograd_through_a_masked_softmax(name):
    bounds, cp_size, query_rank, key_rank = SETTINGS[name]
    spans = block_spans(bounds, cp_size, query_rank, key_rank)
    query, key, value = (t.requires_grad_() for t in block(bounds, cp_size))
    expected = plain_attention(query, key, value, spans, 0.3)
    dout = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, (query, key, value), dout, allow_unused=True)
    kernel = KERNELS["reference"]
    out, lse = whole(kernel.forward(query, key, value, spans, 0.3), query)
    if spans:
        assert_outputs_equal(out, expected.detach())
    found = summed(
        kernel.backward(dout, query, key, value, out, lse, spans, 0.3), query, key, value
    )
    for actual, wanted in zip(found, gradients, strict=True):
        assert_gradients_equal(actual.detach(), wanted)


@pytest.mark.parametrize("value_head_dim", [8, 4, 16])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_cpu_kernel_equals_the_reference(name, key_heads, value_head_dim):
    bounds, cp_size, query_rank, key_rank = SETTINGS[name]
    spans = block_spans(bounds, cp_size, query_rank, key_rank)
    query, key, value = block(bounds, cp_size, key_heads=key_heads, value_head_dim=value_head_dim)
    found = {}
    for kernel in (KERNELS["reference"], KERNELS["cpu"]):
        out, lse = whole(kernel.forward(query, key, value, spans, 0.3), query)
        # the global lse is at least the block's: half as much weight on every pair
        dout = torch.ones_like(out) if not found else found["reference"][2]
        pieces = kernel.backward(dout, query, key, value, out, lse + 0.7, spans, 0.3)
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
)
def test_the_cpu_kernel_equals_the_reference_for_any_documents(cuts, ranks, head_dim):
    bounds = [0, *sorted(cuts), 60]
    spans = block_spans(bounds, 4, *ranks)
    query, key, value = block(bounds, 4, head_dim=head_dim, value_head_dim=head_dim)
    results = [
        whole(KERNELS[name].forward(query, key, value, spans, 0.2), query)
        for name in ("cpu", "reference")
    ]
    if spans:
        assert_outputs_equal(results[0][0], results[1][0])
    assert_outputs_equal(results[0][1], results[1][1])


def test_the_automatic_choice_on_a_cpu_is_the_cpu_kernel():
    assert choose_kernel("auto", CPU, torch.float32).name == "cpu"


def test_an_unknown_kernel_is_refused_with_the_valid_names():
    with pytest.raises(KernelUnavailableError, match=r"'cpu'.*received 'flesh'"):
        choose_kernel("flesh", CPU, torch.float32)


def test_a_kernel_that_cannot_run_is_refused_with_the_reason():
    with pytest.raises(KernelUnavailableError, match=r"it takes .*and these are torch\.int8"):
        choose_kernel("cpu", CPU, torch.int8)
    with pytest.raises(KernelUnavailableError, match="cpu: it runs on cpu tensors"):
        choose_kernel("auto", torch.device("meta"), torch.float32)
