"""What the product is compared with: rings over contiguous chunks, and one process.

query, key, value, dout: [local_tokens, heads, head_dim]
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from hf_striped.bench.calls import call_backward, call_forward
from hf_striped.bench.pieces import (
    Piece,
    chunk_pieces,
    contiguous_chunks,
    tokens_of,
    zigzag_chunks,
)
from hf_striped.bench.problem import Problem
from hf_striped.context import ContextParallel
from hf_striped.exchange import RingExchange
from hf_striped.kernels import cpu
from hf_striped.kernels.cuts import causal_cuts
from hf_striped.lse import merge_partial_
from hf_striped.packing import Span


class Chunked:
    """A ring over contiguous chunks: the same transport, kernel calls, merge and backward pass."""

    def __init__(self, name: str, problem: Problem, cp: ContextParallel):
        self.name = name
        self._problem, self._cp = problem, cp
        self._chunks = zigzag_chunks if name == "zigzag" else contiguous_chunks
        self._pieces: dict[tuple[int, torch.dtype], list[Piece]] = {}
        self._steps = 1 + max(
            (i for q in range(cp.size) for i in range(cp.size) if self._meet(q, (q - i) % cp.size)),
            default=0,
        )

    def chunks(self, rank: int) -> list[tuple[int, int]]:
        return self._chunks(self._problem.row_length, self._cp.size, rank)

    def tokens(self) -> Tensor:
        return tokens_of(self.chunks(self._cp.rank))

    def pieces(self, key_rank: int, dtype: torch.dtype) -> list[Piece]:
        """What this rank computes with the keys of `key_rank`, worked out once."""
        found = self._pieces.get((key_rank, dtype))
        if found is None:
            found = self._pieces[key_rank, dtype] = self._meet(self._cp.rank, key_rank, dtype)
        return found

    def _meet(self, query_rank: int, key_rank: int, dtype=torch.float32) -> list[Piece]:
        chunks = self.chunks(query_rank), self.chunks(key_rank)
        return chunk_pieces(*chunks, self._problem.bounds, self._problem.sliding_window, dtype)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(query.dtype, torch.float32)
        out = query.new_zeros((*query.shape[:2], value.shape[-1]), dtype=wide)
        lse = query.new_full(query.shape[:2], -torch.inf, dtype=wide)
        for step, k, v in RingExchange(self._cp, key, value, self._steps).blocks():
            pieces = self.pieces(step.key_rank, query.dtype)
            for queries, block, block_lse in run_forward(query, k, v, pieces, self._problem.scale):
                merge_partial_(out[queries], lse[queries], block, block_lse)
        return out.to(query.dtype), lse

    def backward(
        self, dout: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        exchange = RingExchange(self._cp, key, value, self._steps)
        exchange.start_gradients(lse.dtype)
        dquery = torch.zeros_like(query, dtype=lse.dtype)
        for step, k, v in exchange.blocks():
            dkey, dvalue = exchange.gradients_of(step)
            pieces = self.pieces(step.key_rank, query.dtype)
            add_backward(
                dout, query, k, v, out, lse, pieces, self._problem.scale, (dquery, dkey, dvalue)
            )
            exchange.send_gradients(step)
        gradients = (dquery, *exchange.collect_gradients())
        return tuple(gradient.to(query.dtype) for gradient in gradients)


class OneProcess:
    """The whole row in one process, one causal call a document, as PyTorch's sdpa makes it."""

    name = "one process"

    def __init__(self, problem: Problem):
        self._problem = problem
        self._pieces: dict[torch.dtype, list[Piece]] = {}

    def pieces(self, dtype: torch.dtype) -> list[Piece]:
        if dtype not in self._pieces:
            self._pieces[dtype] = self._whole(dtype)
        return self._pieces[dtype]

    def _whole(self, dtype: torch.dtype) -> list[Piece]:
        bounds, window = self._problem.bounds, self._problem.sliding_window
        if window is None:
            parts = [slice(begin, end) for begin, end in pairwise(bounds) if begin < end]
            return [Piece(part, part, True) for part in parts]
        whole = [(0, self._problem.row_length)]
        return chunk_pieces(whole, whole, bounds, window, dtype)

    def tokens(self) -> Tensor:
        return torch.arange(self._problem.row_length)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(query.dtype, torch.float32)
        out = query.new_empty((*query.shape[:2], value.shape[-1]))
        lse = query.new_empty(query.shape[:2], dtype=wide)
        found = _calls_forward(query, key, value, self.pieces(query.dtype), self._problem.scale)
        for queries, block, block_lse in found:
            out[queries], lse[queries] = block, block_lse
        return out, lse

    def backward(
        self, dout: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        totals = tuple(torch.zeros_like(tensor) for tensor in (query, key, value))
        pieces = self.pieces(query.dtype)
        _calls_backward(dout, query, key, value, out, lse, pieces, self._problem.scale, totals)
        return totals


def run_forward(
    query: Tensor, key: Tensor, value: Tensor, pieces: Sequence[Piece], scale: float
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """The outputs of pieces, their triangles cut up as the product's CPU kernel cuts them."""
    return _calls_forward(query, key, value, list(_cut(pieces, query.device)), scale)


def add_backward(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    pieces: Sequence[Piece],
    scale: float,
    totals: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Add the gradients of pieces to `totals`."""
    cut = list(_cut(pieces, query.device))
    _calls_backward(dout, query, key, value, out, lse, cut, scale, totals)


def _cut(pieces: Sequence[Piece], device: torch.device) -> Iterator[Piece]:
    for piece in pieces:
        if not piece.causal or device.type != "cpu":
            yield piece
            continue
        span = Span(piece.queries.start, piece.keys.start, piece.queries.stop - piece.queries.start)
        for queries, keys, causal in causal_cuts(span, cpu.TRIANGLE):
            yield Piece(queries, keys, causal)


def _calls_forward(query, key, value, pieces, scale):
    for queries, keys, causal, mask in pieces:
        out, lse = call_forward(query[queries], key[keys], value[keys], causal, mask, scale)
        yield queries, out, lse


def _calls_backward(dout, query, key, value, out, lse, pieces, scale, totals):
    for queries, keys, causal, mask in pieces:
        blocks = dout[queries], query[queries], key[keys], value[keys], out[queries], lse[queries]
        found = call_backward(*blocks, causal, mask, scale)
        for total, part, gradient in zip(totals, (queries, keys, keys), found, strict=True):
            total[part] += gradient
