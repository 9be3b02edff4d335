"""The CUDA adapters without a GPU: their segments, the arguments they pass, and their arithmetic.

A stand-in computes what variable-length flash attention promises, in fp64, writing lse = +inf for a
query without keys as flash-attn 2 does, or -inf as FlashAttention 3. It binds its arguments to the
real signatures, and refuses what flash-attn 2 refuses.
"""

import sys
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_striped import KernelUnavailableError
from hf_striped.kernels import cuda, flash_attn
from hf_striped.kernels.base import ScoreRule
from hf_striped.kernels.reference import ReferenceKernel
from hf_striped.kernels.varlen import segment_lengths
from hf_striped.packing import Span, block_spans
from tests.test_kernels import block, summed, whole
from tests.test_packing import packed_rows
from tests.tolerances import assert_gradients_equal, assert_outputs_equal

REFERENCE = ReferenceKernel()
GPU = torch.device("cuda")


@given(packed_rows(), st.data())
def test_segments_hold_every_span_and_cover_the_row(row, data):
    cp_size, bounds = row
    query_rank, key_rank = (data.draw(st.integers(0, cp_size - 1)) for _ in range(2))
    spans = block_spans(bounds, cp_size, query_rank, key_rank)
    tokens = bounds[-1] // cp_size
    query = key = 0
    found = []
    for queries, keys in segment_lengths(spans, tokens):
        assert queries == keys or 0 in (queries, keys)
        if queries == keys:
            found.append((query, key, queries))
        query, key = query + queries, key + keys
    assert tuple(found) == spans
    assert query == key == tokens


def rows_of(query_bounds, key_bounds):
    """Each segment as a span; those without queries or keys are left out."""
    spans = []
    for index in range(len(query_bounds) - 1):
        (a, b), (c, d) = query_bounds[index : index + 2], key_bounds[index : index + 2]
        if b > a and d > c:
            spans.append(Span(int(a), int(c), int(b - a)))
    return spans


def refuse_folded_heads(q, k, bounds, longest_query, rule):
    """Grouped heads of rows that are all one query are folded, as if no segment were empty."""
    folds = longest_query == 1 and q.shape[1] > k.shape[1] and rule.window_left is None
    assert not folds or len(q) == len(bounds) - 1, "shape is invalid for input"


def stand_in_forward(q, k, v, query_bounds, key_bounds, rule, no_key=torch.inf):
    out, lse = torch.zeros_like(q[..., : v.shape[-1]]), torch.full(q.shape[:2], no_key).double()
    for piece in REFERENCE.forward(q, k, v, rows_of(query_bounds, key_bounds), rule):
        out[piece.queries], lse[piece.queries] = piece.out, piece.lse
    return out, lse.T.contiguous()


def stand_in_backward(dout, q, k, v, out, lse, query_bounds, key_bounds, rule):
    pieces = REFERENCE.backward(dout, q, k, v, out, lse.T, rows_of(query_bounds, key_bounds), rule)
    return summed(pieces, q, k, v)


def bound(op, *args, **kwargs):
    """The arguments by name, as the operator's schema binds them; defaults where none is given."""
    schema = op.default._schema
    names = [argument.name for argument in schema.arguments]
    values = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    values |= dict(zip(names, args, strict=False)) | kwargs
    assert set(values) == set(names) and set(kwargs) <= set(names)
    return values


def rule_of(a):
    left = a["window_size_left"]
    assert a["is_causal"] is True and a["dropout_p"] == 0.0
    assert left is None or a["window_size_right"] == 0
    return ScoreRule(a["scale"], None, left)


def aten_forward(*args, **kwargs):
    a = bound(torch.ops.aten._flash_attention_forward, *args, **kwargs)
    bounds = a["cum_seq_q"], a["cum_seq_k"]
    assert a["max_q"] >= bounds[0].diff().max() and a["max_k"] >= bounds[1].diff().max()
    refuse_folded_heads(a["query"], a["key"], bounds[0], a["max_q"], rule_of(a))
    return (
        *stand_in_forward(a["query"], a["key"], a["value"], *bounds, rule_of(a)),
        None,
        None,
        None,
    )


def aten_backward(*args, **kwargs):
    a = bound(torch.ops.aten._flash_attention_backward, *args, **kwargs)
    tensors = (a[name] for name in ("grad_out", "query", "key", "value", "out", "logsumexp"))
    return stand_in_backward(*tensors, a["cum_seq_q"], a["cum_seq_k"], rule_of(a))


def package_rule(softmax_scale, window_size_left, window_size_right, softcap):
    assert (window_size_left == -1) == (window_size_right == -1)
    left = None if window_size_left == -1 else window_size_left
    return ScoreRule(softmax_scale, softcap or None, left)


def version_2():
    package = ModuleType("flash_attn.flash_attn_interface")

    def forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
                softmax_scale, causal, window_size_left=-1, window_size_right=-1, softcap=0.0,
                alibi_slopes=None, return_softmax=False, block_table=None):  # fmt: skip
        assert causal and dropout_p == 0.0
        rule = package_rule(softmax_scale, window_size_left, window_size_right, softcap)
        refuse_folded_heads(q, k, cu_seqlens_q, max_seqlen_q, rule)
        return *stand_in_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, rule), None, None

    def backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k,
                 max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
                 window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
                 rng_state=None):  # fmt: skip
        assert causal and dropout_p == 0.0 and alibi_slopes is None
        assert deterministic is torch.are_deterministic_algorithms_enabled()
        rule = package_rule(softmax_scale, window_size_left, window_size_right, softcap)
        bounds = cu_seqlens_q, cu_seqlens_k
        found = stand_in_backward(dout, q, k, v, out, softmax_lse, *bounds, rule)
        for target, value in zip((dq, dk, dv), found, strict=True):
            target.copy_(value)

    package._flash_attn_varlen_forward = forward
    package._flash_attn_varlen_backward = backward
    return package


def version_3():
    package = ModuleType("flash_attn_interface")

    def forward(q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
                max_seqlen_k=None, softmax_scale=None, causal=False, window_size_left=-1,
                window_size_right=-1, softcap=0.0):  # fmt: skip
        assert causal
        rule = package_rule(softmax_scale, window_size_left, window_size_right, softcap)
        bounds = cu_seqlens_q, cu_seqlens_k
        return *stand_in_forward(q, k, v, *bounds, rule, no_key=-torch.inf), None, None

    def backward(dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None,
                 max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None,
                 softmax_scale=None, is_causal=False, window_size_left=-1, window_size_right=-1,
                 softcap=0.0, deterministic=False):  # fmt: skip
        assert is_causal and deterministic is torch.are_deterministic_algorithms_enabled()
        rule = package_rule(softmax_scale, window_size_left, window_size_right, softcap)
        bounds = cu_seqlens_q, cu_seqlens_k
        found = stand_in_backward(dout, q, k, v, out, softmax_lse, *bounds, rule)
        for target, value in zip((dq, dk, dv), found, strict=True):
            target.copy_(value)

    package._flash_attn_forward = forward
    package._flash_attn_backward = backward
    return package


@pytest.fixture(params=["cuda", "flash-attn 2", "flash-attn 3"])
def kernel(request, monkeypatch):
    flash_attn._package.cache_clear()
    if request.param == "cuda":
        monkeypatch.setattr(cuda, "aten_forward", aten_forward)
        monkeypatch.setattr(cuda, "aten_backward", aten_backward)
        yield cuda.CudaKernel()
    else:
        package = version_2() if request.param == "flash-attn 2" else version_3()
        monkeypatch.setitem(sys.modules, package.__name__.split(".")[0], ModuleType("flash_attn"))
        monkeypatch.setitem(sys.modules, package.__name__, package)
        yield flash_attn.FlashAttnKernel()
    flash_attn._package.cache_clear()


@pytest.mark.parametrize("rule", [ScoreRule(0.3), ScoreRule(0.3, None, 2), ScoreRule(0.3, 0.5, 3)])
@pytest.mark.parametrize("bounds", [[0, 24], [0, 1, 2, 9, 9, 13, 24], [0, 4]])
@pytest.mark.parametrize("ranks", [(1, 0), (0, 1), (1, 1)])
def test_the_adapters_equal_the_reference(kernel, ranks, bounds, rule, monkeypatch):
    if rule.softcap is not None and kernel.name == "cuda":
        monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
        reason = kernel.why_unavailable(GPU, torch.bfloat16, rule.softcap)
        assert reason == "PyTorch's flash attention has no softcap"
        return
    spans = block_spans(bounds, 2, *ranks)
    query, key, value = block(bounds, 2, head_dim=6, value_head_dim=4)
    results = []
    for implementation in (REFERENCE, kernel):
        out, lse = whole(implementation.forward(query, key, value, spans, rule), query)
        dout = torch.ones_like(out)
        later = torch.logaddexp(lse, torch.tensor(0.5).double())  # the lse of the whole ring
        pieces = implementation.backward(dout, query, key, value, out, later, spans, rule)
        results.append((out, lse, *summed(pieces, query, key, value)))
    for expected, actual in zip(results[0][:2], results[1][:2], strict=True):
        assert_outputs_equal(actual, expected)
    for expected, actual in zip(results[0][2:], results[1][2:], strict=True):
        assert_gradients_equal(actual, expected)


def test_a_query_that_never_saw_a_key_has_no_gradient_and_no_nan(kernel):
    spans, rule = block_spans([0, 24], 2, 1, 0), ScoreRule(0.3)
    query, key, value = block([0, 24], 2)
    out, lse = whole(kernel.forward(query, key, value, spans, rule), query)
    lse[3] = -torch.inf
    (piece,) = kernel.backward(torch.ones_like(out), query, key, value, out, lse, spans, rule)
    assert not piece.dquery[3].any()
    assert all(tensor.isfinite().all() for tensor in (piece.dquery, piece.dkey, piece.dvalue))


def test_the_package_is_told_to_be_deterministic(kernel):
    spans, rule = block_spans([0, 24], 2, 1, 0), ScoreRule(0.3)
    query, key, value = block([0, 24], 2)
    torch.use_deterministic_algorithms(True)
    try:
        out, lse = whole(kernel.forward(query, key, value, spans, rule), query)
        assert len(list(kernel.backward(out, query, key, value, out, lse, spans, rule))) == 1
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_head_dim_that_flash_attention_does_not_take_is_refused(kernel):
    spans, rule = block_spans([0, 4], 2, 0, 0), ScoreRule(0.3)
    row = torch.zeros(2, 1, 257, dtype=torch.bfloat16)
    with pytest.raises(KernelUnavailableError, match="at most 256; received 257"):
        next(kernel.forward(row, row, row, spans, rule))


@pytest.mark.parametrize("wrapped", [False, True], ids=["a function", "a torch custom op"])
def test_a_package_of_another_signature_is_refused_before_the_first_step(monkeypatch, wrapped):
    def earlier(q: torch.Tensor, causal: bool, window_size: int) -> torch.Tensor:
        return q.clone()

    if wrapped:
        earlier = torch.library.custom_op("hf_striped_test::earlier", earlier, mutates_args=())
    package = ModuleType("flash_attn_interface")
    package._flash_attn_forward = package._flash_attn_backward = earlier
    monkeypatch.setitem(sys.modules, package.__name__, package)
    flash_attn._package.cache_clear()
    reason = flash_attn.FlashAttnKernel().why_unavailable(GPU, torch.bfloat16, None)
    flash_attn._package.cache_clear()
    assert "its _flash_attn_forward takes no cu_seqlens_q, window_size_left" in reason
    assert "FlashAttention 4 (flash_attn.cute) is not supported" in reason


def test_the_operators_know_the_shapes_of_a_variable_length_call():
    query = torch.empty(12, 4, 64, dtype=torch.bfloat16, device="meta")
    key = torch.empty(12, 2, 64, dtype=torch.bfloat16, device="meta")
    kernel, rule = cuda.CudaKernel(), ScoreRule(0.125, None, 3)
    spans = block_spans([0, 9, 24], 2, 0, 1)
    (piece,) = kernel.forward(query, key, key, spans, rule)
    assert piece.out.shape == query.shape and piece.out.dtype == torch.bfloat16
    assert piece.lse.shape == (12, 4) and piece.lse.dtype == torch.float32
    (gradients,) = kernel.backward(piece.out, query, key, key, piece.out, piece.lse, spans, rule)
    assert gradients.dquery.shape == query.shape and gradients.dkey.shape == key.shape


def test_why_a_cuda_kernel_cannot_run_is_said():
    for kernel in (cuda.CudaKernel(), flash_attn.FlashAttnKernel()):
        cpu = kernel.why_unavailable(torch.device("cpu"), torch.bfloat16, None)
        assert cpu == "it runs on cuda tensors, and these are on cpu"
        assert "these are torch.float32" in kernel.why_unavailable(GPU, torch.float32, None)


def test_a_pytorch_without_flash_attention_is_the_reason_given(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    reason = cuda.CudaKernel().why_unavailable(GPU, torch.bfloat16, None)
    assert reason == "this build of PyTorch has no flash attention"


def test_an_import_that_fails_is_the_reason_given():
    flash_attn._package.cache_clear()
    if flash_attn._package()[0] is not None:
        pytest.skip("a flash-attn package is installed here")
    reason = flash_attn.FlashAttnKernel().why_unavailable(GPU, torch.bfloat16, None)
    assert "importing flash_attn_interface" in reason
    assert "importing flash_attn.flash_attn_interface" in reason
