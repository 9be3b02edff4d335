"""Block attention by ATen's flash attention for CPU: exact, trains, grouped heads unexpanded.

It works on views of the packed row: no copy, no padding. Spans are cut into rectangles and small triangles
(`cuts`, 7 % less time for 4096 tokens); with a window, into tiles of queries, each with the
keys in reach and a mask of that size.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hf_striped.kernels.base import BlockGradients, BlockOutput, ScoreRule, widen
from hf_striped.kernels.cuts import causal_cuts
from hf_striped.kernels.tiles import tiles
from hf_striped.packing import Span

TILE = 32  # queries of a call with a window
TRIANGLE = 128  # queries of the smallest triangle
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class CpuKernel:
    name = "cpu"

    def why_unavailable(
        self, device: torch.device, dtype: torch.dtype, softcap: float | None
    ) -> str | None:
        if device.type != "cpu":
            return f"it runs on cpu tensors, and these are on {device.type}"
        if dtype not in _DTYPES:
            return f"it takes {', '.join(map(str, _DTYPES))}, and these are {dtype}"
        if softcap is not None:
            return "ATen's flash attention for CPU has no softcap"
        return None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, spans: Sequence[Span], rule: ScoreRule
    ) -> Iterator[BlockOutput]:
        head_dim, value_head_dim = query.shape[-1], value.shape[-1]
        width = max(head_dim, value_head_dim)
        query, key, value = (widen(tensor, width) for tensor in (query, key, value))
        for queries, keys, causal, mask in _pieces(spans, rule, query.dtype):
            out, lse = call_forward(
                query[queries], key[keys], value[keys], causal, mask, rule.scale
            )
            yield BlockOutput(queries, out[..., :value_head_dim], lse)

    def backward(
        self,
        dout: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        spans: Sequence[Span],
        rule: ScoreRule,
    ) -> Iterator[BlockGradients]:
        head_dim, value_head_dim = query.shape[-1], value.shape[-1]
        width = max(head_dim, value_head_dim)
        dout, query, key, value, out = (
            widen(tensor, width) for tensor in (dout, query, key, value, out)
        )
        for queries, keys, causal, mask in _pieces(spans, rule, query.dtype):
            dquery, dkey, dvalue = call_backward(
                dout[queries],
                query[queries],
                key[keys],
                value[keys],
                out[queries],
                lse[queries],
                causal,
                mask,
                rule.scale,
            )
            yield BlockGradients(
                queries,
                keys,
                dquery[..., :head_dim],
                dkey[..., :head_dim],
                dvalue[..., :value_head_dim],
            )


def call_forward(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """One call of ATen: `[tokens, heads, head_dim]` in, out and lse `[tokens, heads]` back."""
    rows = (_heads_first(tensor) for tensor in (query, key, value))
    out, lse = _forward(*rows, is_causal=causal, attn_mask=mask, scale=scale)
    return _tokens_first(out), lse.squeeze(0).T


def call_backward(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """One call of ATen: the gradients of query, key and value."""
    rows = (_heads_first(tensor) for tensor in (dout, query, key, value, out))
    lse = lse.T.unsqueeze(0)
    gradients = _backward(*rows, lse, 0.0, causal, attn_mask=mask, scale=scale)
    return tuple(_tokens_first(gradient) for gradient in gradients)


def _pieces(
    spans: Sequence[Span], rule: ScoreRule, dtype: torch.dtype
) -> Iterator[tuple[slice, slice, bool, Tensor | None]]:
    """Queries, keys, whether plain causality is the rule, and the additive mask of each call."""
    for span in spans:
        if rule.window_left is None or rule.window_left >= span.length - 1:
            for queries, keys, causal in causal_cuts(span, TRIANGLE):
                yield queries, keys, causal, None
            continue
        for queries, keys, mask in tiles(span, rule.window_left, TILE, dtype=dtype):
            yield queries, keys, False, mask


def _heads_first(row: Tensor) -> Tensor:
    return row.transpose(0, 1).unsqueeze(0)


def _tokens_first(batch: Tensor) -> Tensor:
    return batch.squeeze(0).transpose(0, 1)
