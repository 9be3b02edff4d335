"""The ring as two opaque torch custom ops, forward and backward, composed of ring, kernels and merge.

    query: [tokens, query_heads, head_dim]      "row" layout: batch and local sequence flattened
    key:   [tokens, key_heads, head_dim]
    value: [tokens, key_heads, value_head_dim]
    lse:   [tokens, query_heads]                natural log, fp32 (fp64 for fp64 inputs)

Autograd, checkpointing and torch.compile see one node a layer. The steps of the backward are numbered
in docs/explanation/ring-backward.md.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from hf_striped.context import ContextParallel
from hf_striped.exchange import make_exchange
from hf_striped.kernels import choose_kernel
from hf_striped.kernels.base import ScoreRule
from hf_striped.lse import merge_partial_
from hf_striped.meter import ATTENTION, measured
from hf_striped.packing import Span, block_spans, block_window, check_cu_seqlens, chunk_bounds
from hf_striped.ring import RingStep


@torch.library.custom_op("hf_striped::ring_attention", mutates_args=())
def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    cu_seqlens: Tensor,
    group_name: str,
    kernel: str,
    exchange: str,
    scale: float,
    sliding_window: int | None,
    chunk_size: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """The forward ring over rows: `out` in the type of `query`, and `lse` `[tokens, heads]`."""
    cp = ContextParallel.from_group_name(group_name)
    block_kernel = choose_kernel(kernel, query.device, query.dtype, softcap)
    bounds = cu_seqlens.tolist()
    check_cu_seqlens(bounds, len(query) * cp.size)
    block_plan = _plan(cp, bounds, scale, sliding_window, chunk_size, softcap)
    with measured("ring attention forward", query.device, ATTENTION):
        out, lse = _empty_result(query, value)
        lse.fill_(-torch.inf)
        out.zero_()
        blocks = make_exchange(exchange, cp, key, value, _steps(cp, sliding_window)).blocks()
        for step, k, v in blocks:
            with measured(_name(step, cp), query.device):
                for block in block_kernel.forward(query, k, v, *block_plan(step)):
                    merge_partial_(out[block.queries], lse[block.queries], block.out, block.lse)
        if sinks is not None:
            out *= torch.sigmoid(lse - sinks).unsqueeze(-1)
            lse = torch.logaddexp(lse, sinks.to(lse.dtype))
        return out.to(query.dtype), lse


@torch.library.custom_op("hf_striped::ring_attention_backward", mutates_args=())
def ring_attention_backward(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    group_name: str,
    kernel: str,
    exchange: str,
    scale: float,
    sliding_window: int | None,
    chunk_size: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward ring: dq stays, dk and dv travel with their keys until they are home."""
    cp = ContextParallel.from_group_name(group_name)
    block_kernel = choose_kernel(kernel, query.device, query.dtype, softcap)
    block_plan = _plan(cp, cu_seqlens.tolist(), scale, sliding_window, chunk_size, softcap)
    with measured("ring attention backward", query.device, ATTENTION):
        dquery = torch.zeros_like(query, dtype=lse.dtype)
        blocks = make_exchange(exchange, cp, key, value, _steps(cp, sliding_window))
        blocks.start_gradients(lse.dtype)
        for step, k, v in blocks.blocks():
            dkey, dvalue = blocks.gradients_of(step)
            with measured(_name(step, cp), query.device):
                for block in block_kernel.backward(dout, query, k, v, out, lse, *block_plan(step)):
                    dquery[block.queries] += block.dquery
                    dkey[block.keys] += block.dkey
                    dvalue[block.keys] += block.dvalue
            blocks.send_gradients(step)
        dkey, dvalue = blocks.collect_gradients()
        home = dkey.to(key.dtype, copy=True), dvalue.to(value.dtype, copy=True)
        return dquery.to(query.dtype), *home


def _name(step: RingStep, cp: ContextParallel) -> str:
    """How a profile calls a step."""
    return f"ring step {step.index + 1} of {cp.size}: keys of rank {step.key_rank}"


def _steps(cp: ContextParallel, sliding_window: int | None) -> int:
    """Ring steps that hold a pair: a window shorter than the ring never reaches its last ranks."""
    return cp.size if sliding_window is None else min(cp.size, sliding_window)


def _plan(
    cp: ContextParallel,
    bounds: list[int],
    scale: float,
    sliding_window: int | None,
    chunk_size: int | None,
    softcap: float | None,
) -> Callable[[RingStep], tuple[tuple[Span, ...], ScoreRule]]:
    """What a block kernel computes at each step of the ring."""
    if chunk_size is not None:
        bounds = chunk_bounds(bounds, chunk_size)

    def block(step: RingStep) -> tuple[tuple[Span, ...], ScoreRule]:
        window_left = None
        if sliding_window is not None:
            window_left = block_window(sliding_window, cp.size, cp.rank, step.key_rank)
        spans = block_spans(bounds, cp.size, cp.rank, step.key_rank)
        return spans, ScoreRule(scale, softcap, window_left)

    return block


def _empty_result(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    shape = query.shape[:2]
    return query.new_empty((*shape, value.shape[-1]), dtype=wide), query.new_empty(
        shape, dtype=wide
    )


@ring_attention.register_fake
def _(query, key, value, sinks, cu_seqlens, *settings):
    out, lse = _empty_result(query, value)
    return out.to(query.dtype), lse


@ring_attention_backward.register_fake
def _(dout, query, key, value, *settings):
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _save_for_backward(ctx, inputs, output):
    query, key, value, sinks, cu_seqlens, *ctx.settings = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(query, key, value, sinks, out, lse, cu_seqlens)


def _backward(ctx, dout, _):
    query, key, value, sinks, out, lse, cu_seqlens = ctx.saved_tensors
    dout = dout.contiguous()
    gradients = ring_attention_backward(
        dout, query, key, value, out, lse, cu_seqlens, *ctx.settings
    )
    dsinks = None
    if sinks is not None:
        delta = (dout.to(lse.dtype) * out).sum(-1)
        dsinks = -((sinks - lse).exp() * delta).sum(0).to(sinks.dtype)
    return *gradients, dsinks, None, *(None for _ in ctx.settings)


ring_attention.register_autograd(_backward, setup_context=_save_for_backward)
