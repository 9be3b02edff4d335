"""What variable-length flash attention kernels share: one call a ring step over the local row.

The spans of a step leave gaps in the row: a first query that sees no key, a last key that no query
sees. Extra segments carry them, so that nothing is copied:

    a gap in the queries   a segment of that many queries and no key
    a gap in the keys      a segment of no query and that many keys
    a span                 a segment of as many queries as keys, causal
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_striped.errors import KernelUnavailableError
from hf_striped.kernels.base import BlockGradients, BlockOutput, ScoreRule, widen
from hf_striped.packing import Span

DTYPES = (torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256


class Segments(NamedTuple):
    """Cumulative segment lengths, int32 `[segments + 1]`, and bounds on a segment's length."""

    query_bounds: Tensor
    key_bounds: Tensor
    longest_query: int
    longest_key: int


def segment_lengths(spans: Sequence[Span], tokens: int) -> list[tuple[int, int]]:
    """(queries, keys) of each segment of a local row of `tokens` queries and as many keys."""
    lengths = []
    query = key = 0
    for span in (*spans, Span(tokens, tokens, 0)):
        if span.query_start > query:
            lengths.append((span.query_start - query, 0))
        if span.key_start > key:
            lengths.append((0, span.key_start - key))
        if span.length:
            lengths.append((span.length, span.length))
        query, key = span.queries.stop, span.keys.stop
    return lengths


def _segments(spans: Sequence[Span], tokens: int, device: torch.device) -> Segments:
    lengths = torch.tensor([(0, 0), *segment_lengths(spans, tokens)], dtype=torch.int32)
    # at least 2: for rows of single queries flash-attn folds grouped heads into the queries, and
    # then takes every segment to have one, which a gap in the keys has not
    longest = lengths.max(0).values.clamp(min=2).tolist()
    query_bounds, key_bounds = lengths.cumsum(0, dtype=torch.int32).to(device).T.contiguous()
    return Segments(query_bounds, key_bounds, *longest)


class VarlenKernel:
    """A block kernel over `_forward_row` and `_backward_row`, which a subclass supplies.

    Both take tensors of one head_dim, a multiple of 8, and lse as `[heads, tokens]`.
    """

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, spans: Sequence[Span], rule: ScoreRule
    ) -> Iterator[BlockOutput]:
        if not spans:
            return
        width = _width(query, value)
        rows = (widen(tensor, width) for tensor in (query, key, value))
        out, lse = self._forward_row(*rows, _segments(spans, len(query), query.device), rule)
        lse = lse.masked_fill(lse == torch.inf, -torch.inf).T  # how some write a query without keys
        yield BlockOutput(slice(0, len(query)), out[..., : value.shape[-1]], lse)

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
        if not spans:
            return
        width = _width(query, value)
        rows = (widen(tensor, width) for tensor in (dout, query, key, value, out))
        segments = _segments(spans, len(query), query.device)
        lse = lse.masked_fill(lse == -torch.inf, torch.inf).T.contiguous()  # no weight, no NaN
        dquery, dkey, dvalue = self._backward_row(*rows, lse, segments, rule)
        yield BlockGradients(
            slice(0, len(query)),
            slice(0, len(key)),
            dquery[..., : query.shape[-1]],
            dkey[..., : query.shape[-1]],
            dvalue[..., : value.shape[-1]],
        )

    def _forward_row(
        self, query: Tensor, key: Tensor, value: Tensor, segments: Segments, rule: ScoreRule
    ) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def _backward_row(
        self,
        dout: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        segments: Segments,
        rule: ScoreRule,
    ) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError


def _width(query: Tensor, value: Tensor) -> int:
    """One head_dim for all, a multiple of 8: zero columns change nothing."""
    width = -(-max(query.shape[-1], value.shape[-1]) // 8) * 8
    if width > MAX_HEAD_DIM:
        raise KernelUnavailableError(
            f"Flash attention for CUDA takes a head_dim of at most {MAX_HEAD_DIM}; received "
            f"{query.shape[-1]} for query and key, {value.shape[-1]} for value. "
            "Ask for kernel='reference', which is plain PyTorch and slow."
        )
    return width


def why_not_on_cuda(device: torch.device, dtype: torch.dtype) -> str | None:
    """What keeps any flash attention kernel from running for these tensors."""
    if device.type != "cuda":
        return f"it runs on cuda tensors, and these are on {device.type}"
    if dtype not in DTYPES:
        return f"it takes {' and '.join(map(str, DTYPES))}, and these are {dtype}"
    return None
