"""Striped ring attention as a function of this rank's stripe: what is checked, and the one operator.

query: [batch, query_heads, local_seq, head_dim]
"""

from torch import Tensor
from torch.distributed import ProcessGroup

from hf_striped.context import ContextParallel
from hf_striped.errors import BatchError, ConfigurationError
from hf_striped.exchange import EXCHANGES, RING
from hf_striped.heads import (
    heads_to_tokens,
    repeat_key_heads,
    tokens_to_heads,
    why_heads_cannot_split,
)
from hf_striped.kernels import AUTO, choose_kernel
from hf_striped.packing import dense_cu_seqlens
from hf_striped.ring_op import ring_attention


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
    chunk_size: int | None = None,
    kernel: str = AUTO,
    exchange: str = RING,
    heads_group: ProcessGroup | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact causal attention over a sequence striped across the ranks of `group`.

    Args:
        query: `[batch, query_heads, local_seq, head_dim]`, this rank's stripe: of P ranks, local index i is
            token `i * P + rank` of its row. fp64, fp32, bf16 or fp16, as the kernel allows.
        key: `[batch, key_heads, local_seq, head_dim]`, in the type and on the device of `query`;
            `query_heads` is a multiple of `key_heads`.
        value: `[batch, key_heads, local_seq, value_head_dim]`, likewise.
        group: the context-parallel process group; None for a single rank.
        scale: factor of the scores; default `head_dim ** -0.5`.
        cu_seqlens: int32 `[documents + 1]`, the documents' bounds in the *global* flattened row of
            `batch * local_seq * P` tokens. Default: each row of the batch is one document.
        sliding_window: keys a query sees, its own included, at least 1; default all. Counted in tokens of
            its document, on whatever rank they are.
        softcap: scores become `softcap * tanh(scores / softcap)` (Gemma 2), above 0; default none.
        sinks: `[query_heads]`, one learned score a head that takes part in the softmax with no value
            (gpt-oss); default none. Its gradient is this rank's share: the ranks' shares add up.
        return_lse: also return the log-sum-exp of each query's scores, its sink included.
        chunk_size: attention does not cross the ends of chunks of so many tokens, at least 1, counted from
            each document's start (Llama 4); default no chunks.
        kernel: a name in `hf_striped.kernels.KERNELS`, or `"auto"`, the first fast one that can run.
        exchange: how keys and values reach the other ranks: `"ring"`, or `"gather"` (all at once, in the
            memory of all blocks; the benchmarks compare them).
        heads_group: the U ranks that share the heads of a stripe (heads x ring): then `group` is the ring of
            R ranks alone, tokens are striped over P = U * R ranks, and rank u * R + i of them is rank u of
            its `heads_group` and rank i of its `group`. Query heads are a multiple of U, and one of
            `key_heads` and U is a multiple of the other. Default: one group, which is the ring.

    Returns:
        `[batch, query_heads, local_seq, value_head_dim]` in the type of `query`; with `return_lse`
        also `[batch, query_heads, local_seq]`, natural log, fp32 (fp64 for fp64 inputs), which
        carries no gradient.

    Raises:
        BatchError: shapes, types or devices that do not fit together; `cu_seqlens` that do not rise from 0
            to the length of the row; a `sliding_window` or `chunk_size` below 1, a `softcap` that is not
            positive, `sinks` of another shape.
        ConfigurationError: this process is not a member of `group` or `heads_group`, the ranks of
            `heads_group` cannot share these heads, or there is no such `exchange`.
        KernelUnavailableError: there is no such `kernel`, or it cannot run for this type, device or softcap;
            with `"auto"`, none can.

    Source: Striped Attention, arXiv 2311.09431, over the ring of Ring Attention, arXiv 2310.01889. Partial
    results are merged as in Online softmax, arXiv 1805.02867; the backward pass computes the scores anew
    from `lse`, as FlashAttention does, arXiv 2205.14135.

    Example:
        >>> import torch, hf_striped
        >>> from torch.nn.functional import scaled_dot_product_attention
        >>> query, key, value = (torch.randn(1, 2, 8, 16) for _ in range(3))
        >>> out = hf_striped.striped_ring_attention(query, key, value, group=None)
        >>> expected = scaled_dot_product_attention(query, key, value, is_causal=True)
        >>> torch.allclose(out, expected, atol=1e-5)
        True
    """
    _check_shapes(query, key, value)
    cp, sharers = ContextParallel.from_group(group), ContextParallel.from_group(heads_group)
    batch, query_heads, local_seq, head_dim = query.shape
    if reason := why_heads_cannot_split(query_heads, key.shape[1], sharers.size):
        raise ConfigurationError(
            f"The ranks of heads_group share the heads between them; received {sharers.size} ranks, and {reason}. "
            "Use a smaller group."
        )
    if cu_seqlens is None:
        cu_seqlens = dense_cu_seqlens(batch, local_seq * cp.size * sharers.size)
    if exchange not in EXCHANGES:
        raise ConfigurationError(f"exchange must be one of {EXCHANGES}; received {exchange!r}.")
    _check_rule(query, sliding_window, chunk_size, softcap, sinks)
    query, key, value = (_to_row(tensor) for tensor in (query, key, value))
    if sharers.size > 1:
        key, value = (repeat_key_heads(tensor, sharers.size) for tensor in (key, value))
        query, key, value = (tokens_to_heads(t, sharers.group_name) for t in (query, key, value))
        sinks = None if sinks is None else sinks.chunk(sharers.size)[sharers.rank].contiguous()
    out, lse = ring_attention(
        query,
        key,
        value,
        sinks,
        cu_seqlens.cpu(),
        cp.group_name,
        choose_kernel(kernel, query.device, query.dtype, softcap).name,
        exchange,
        head_dim**-0.5 if scale is None else scale,
        sliding_window,
        chunk_size,
        softcap,
    )
    if sharers.size > 1:
        out = heads_to_tokens(out, sharers.group_name)
    out = out.unflatten(0, (batch, local_seq)).transpose(1, 2)
    if not return_lse:
        return out
    lse = lse.detach()
    if sharers.size > 1:
        lse = heads_to_tokens(lse.unsqueeze(-1), sharers.group_name).squeeze(-1)
    return out, lse.unflatten(0, (batch, local_seq)).transpose(1, 2)


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


def _check_rule(
    query: Tensor,
    sliding_window: int | None,
    chunk_size: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    if chunk_size is not None and chunk_size < 1:
        raise BatchError(
            f"chunk_size must be at least 1; received {chunk_size}. Pass None for no chunks."
        )
    if sliding_window is not None and sliding_window < 1:
        raise BatchError(
            "sliding_window counts the keys a query sees, its own included, so it is at least 1; received "
            f"{sliding_window}. Pass None for no window."
        )
    if softcap is not None and not softcap > 0:
        raise BatchError(f"softcap must be positive; received {softcap}. Pass None for none.")
    if sinks is not None and tuple(sinks.shape) != query.shape[1:2]:
        raise BatchError(
            f"sinks must be [query_heads] = [{query.shape[1]}]; received {tuple(sinks.shape)}."
        )
