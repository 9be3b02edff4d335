"""Ordinary attention with what sdpa lacks, for batches that are not striped: softcap and sinks.

It holds the scores of the whole sequence, as eager attention does.
"""

import torch
from torch import Tensor
from torch.nn.functional import dropout as apply_dropout


def ordinary_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Masked softmax attention.

    Args:
        query: `[batch, query_heads, queries, head_dim]`.
        key: `[batch, key_heads, keys, head_dim]`; `value` alike.
        mask: True (or 0.0) where a query sees a key, broadcast to `[batch, heads, queries, keys]`;
            None for plain causality, the last query seeing all keys.
        dropout: probability of dropping a weight.
        scale: factor of the scores; default `head_dim ** -0.5`.
        softcap: scores become `softcap * tanh(scores / softcap)`.
        sinks: `[query_heads]`, a score a head that has no value.

    Returns:
        `[batch, queries, query_heads, value_head_dim]`.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query @ key.mT).float() * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if mask is None:
        shape = scores.shape[-2:]
        mask = torch.ones(shape, dtype=torch.bool, device=scores.device).tril(shape[1] - shape[0])
    if mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    else:
        scores = scores + mask
    if sinks is not None:
        column = sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]].to(query.dtype)
    return (apply_dropout(weights, dropout) @ value).transpose(1, 2)
