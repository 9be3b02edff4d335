"""Striped ring attention as one differentiable operator: ring, kernels and merge composed.

    query: [batch, query_heads, local_seq, head_dim]         public
    query: [batch * local_seq, query_heads, head_dim]        inside ("row" layout)

The ring is two opaque torch custom ops (forward and backward), so that autograd, checkpointing and
torch.compile see one node a layer. The steps of the backward are numbered in docs/explanation/striping.md.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hf_striped.context import ContextParallel
from hf_striped.errors import BatchError, UnsupportedFeatureError
from hf_striped.kernels import AUTO, choose_kernel
from hf_striped.lse import merge_partial_
from hf_striped.packing import block_spans, check_cu_seqlens, dense_cu_seqlens
from hf_striped.ring import pack_pair, rotate_key_value, start_shift, unpack_pair


def striped_ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: ProcessGroup | None,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    kernel: str = AUTO,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact causal attention over a sequence striped across the ranks of `group`.

    Args:
        query: `[batch, query_heads, local_seq, head_dim]`, this rank's stripe: local index i is token
            `i * P + rank` of its row. fp64, fp32, bf16 or fp16, as the kernel allows.
        key: `[batch, key_heads, local_seq, head_dim]`; `query_heads` is a multiple of `key_heads`.
        value: `[batch, key_heads, local_seq, value_head_dim]`.
        group: the context-parallel process group; None for a single rank.
        scale: factor of the scores; default `head_dim ** -0.5`.
        cu_seqlens: int32 `[documents + 1]`, the documents' bounds in the *global* flattened row of
            `batch * local_seq * P` tokens. Default: each row of the batch is one document.
        sliding_window: not supported yet, refused.
        softcap: not supported yet, refused.
        sinks: not supported yet, refused.
        return_lse: also return the log-sum-exp of each query's scores.
        kernel: a name in `hf_striped.kernels.KERNELS`, or "auto".

    Returns:
        `[batch, query_heads, local_seq, value_head_dim]` in the type of `query`; with `return_lse`
        also `[batch, query_heads, local_seq]`, natural log, fp32 (fp64 for fp64 inputs), which
        carries no gradient.

    Raises:
        BatchError: shapes, types or `cu_seqlens` that do not fit together.
        UnsupportedFeatureError: a feature named above as refused.
        KernelUnavailableError: the kernel cannot run here.
        ConfigurationError: this process is not a member of `group`.

    Source: Striped Attention, arXiv 2311.09431; Ring Attention, arXiv 2310.01889.
    """
    for name, asked in (
        ("sliding_window", sliding_window),
        ("softcap", softcap),
        ("sinks", sinks),
    ):
        if asked is not None:
            raise UnsupportedFeatureError(
                f"striped_ring_attention does not support {name} yet; received {name}={asked}. "
                f"Pass {name}=None, or use a model without it."
            )
    _check_shapes(query, key, value)
    cp = ContextParallel.from_group(group)
    batch, _, local_seq, head_dim = query.shape
    if cu_seqlens is None:
        cu_seqlens = dense_cu_seqlens(batch, local_seq * cp.size)
    check_cu_seqlens(cu_seqlens.tolist(), batch * local_seq * cp.size)
    out, lse = ring_attention(
        *(_to_row(tensor) for tensor in (query, key, value)),
        cu_seqlens,
        cp.group_name,
        choose_kernel(kernel, query.device, query.dtype).name,
        head_dim**-0.5 if scale is None else scale,
    )
    out = out.unflatten(0, (batch, local_seq)).transpose(1, 2)
    if not return_lse:
        return out
    return out, lse.detach().unflatten(0, (batch, local_seq)).transpose(1, 2)


@torch.library.custom_op("hf_striped::ring_attention", mutates_args=())
def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    group_name: str,
    kernel: str,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The forward ring over rows: `out` in the type of `query`, and `lse` `[tokens, heads]`."""
    cp = ContextParallel.from_group_name(group_name)
    block_kernel = choose_kernel(kernel, query.device, query.dtype)
    bounds = cu_seqlens.tolist()
    out, lse = _empty_result(query, value)
    lse.fill_(-torch.inf)
    out.zero_()
    for step, k, v in rotate_key_value(cp, key, value):
        spans = block_spans(bounds, cp.size, cp.rank, step.key_rank)
        for block in block_kernel.forward(query, k, v, spans, scale):
            merge_partial_(out[block.queries], lse[block.queries], block.out, block.lse)
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
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward ring: dq stays, dk and dv travel with their keys until they are home."""
    cp = ContextParallel.from_group_name(group_name)
    block_kernel = choose_kernel(kernel, query.device, query.dtype)
    bounds = cu_seqlens.tolist()
    wide = lse.dtype
    dquery = torch.zeros_like(query, dtype=wide)
    home = pack_pair(key, value, wide).zero_()  # dk and dv of this rank's own keys
    incoming = None
    for step, k, v in rotate_key_value(cp, key, value):
        block_dkv = home if step.index == 0 else torch.zeros_like(home)
        dkey, dvalue = unpack_pair(block_dkv, key, value)
        spans = block_spans(bounds, cp.size, cp.rank, step.key_rank)
        for block in block_kernel.backward(dout, query, k, v, out, lse, spans, scale):
            dquery[block.queries] += block.dquery
            dkey[block.keys] += block.dkey
            dvalue[block.keys] += block.dvalue
        if step.index > 0:
            if incoming is not None:
                block_dkv += incoming.wait()
            incoming = start_shift(cp, block_dkv)
    if incoming is not None:
        home += incoming.wait()
    dkey, dvalue = unpack_pair(home, key, value)
    return dquery.to(query.dtype), dkey.to(key.dtype, copy=True), dvalue.to(value.dtype, copy=True)


def _empty_result(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    shape = query.shape[:2]
    return query.new_empty((*shape, value.shape[-1]), dtype=wide), query.new_empty(
        shape, dtype=wide
    )


@ring_attention.register_fake
def _(query, key, value, cu_seqlens, group_name, kernel, scale):
    out, lse = _empty_result(query, value)
    return out.to(query.dtype), lse


@ring_attention_backward.register_fake
def _(dout, query, key, value, out, lse, cu_seqlens, group_name, kernel, scale):
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _save_for_backward(ctx, inputs, output):
    query, key, value, cu_seqlens, *ctx.settings = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(query, key, value, out, lse, cu_seqlens)


def _backward(ctx, dout, _):
    gradients = ring_attention_backward(dout.contiguous(), *ctx.saved_tensors, *ctx.settings)
    return *gradients, None, None, None, None


ring_attention.register_autograd(_backward, setup_context=_save_for_backward)


def _to_row(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2).flatten(0, 1).contiguous()


def _check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    types = {(tensor.dtype, tensor.device) for tensor in (query, key, value)}
    if len(types) != 1:
        raise BatchError(
            f"query, key and value must share one type and device; received {sorted(map(str, types))}. "
            "Cast them to one type first."
        )
    if not query.ndim == key.ndim == value.ndim == 4:
        raise BatchError(
            f"query, key and value must be [batch, heads, local_seq, head_dim]; received {shapes}."
        )
    if query.shape[::2] != key.shape[::2] or key.shape[:3] != value.shape[:3]:
        raise BatchError(
            "query, key and value must have the same batch and local_seq, and key and value the same "
            f"heads; received {shapes}. Stripe all three alike; cached keys do not enter the ring."
        )
    if query.shape[3] != key.shape[3] or query.shape[1] % key.shape[1]:
        raise BatchError(
            "query and key must have the same head_dim, and query_heads must be a multiple of key_heads; "
            f"received {shapes}."
        )
