"""The layouts that are compared: each a forward and a backward pass over one rank's rows.

query, key, value, dout: [local_tokens, heads, head_dim]
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hf_striped.bench.pieces import (
    Piece,
    chunk_pieces,
    contiguous_chunks,
    tokens_of,
    zigzag_chunks,
)
from hf_striped.context import ContextParallel
from hf_striped.exchange import GATHER, RING, RingExchange
from hf_striped.kernels import cpu
from hf_striped.lse import merge_partial_
from hf_striped.packing import Span
from hf_striped.ring_op import ring_attention, ring_attention_backward


class Problem(NamedTuple):
    """What is computed: documents of one row, with or without a window."""

    bounds: list[int]
    sliding_window: int | None
    scale: float

    @property
    def row_length(self) -> int:
        return self.bounds[-1]

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that count, over all documents."""
        total = 0
        for begin, end in pairwise(self.bounds):
            length, window = end - begin, self.sliding_window or end - begin
            seen = min(window, length)
            total += seen * (seen + 1) // 2 + (length - seen) * seen
        return total


class Layout(Protocol):
    """One way to spread a row over the ranks."""

    name: str

    def tokens(self) -> Tensor:
        """The global indices of this rank's tokens, in local order."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """`out` and `lse` `[local_tokens, heads]`."""

    def backward(
        self, dout: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of query, key and value."""


class Striped:
    """The product: token g on rank g mod P. With `exchange="gather"`, all keys and values gathered."""

    def __init__(self, problem: Problem, cp: ContextParallel, exchange: str = RING):
        self.name = "striped" if exchange == RING else "striped, all-gather"
        self._problem, self._cp = problem, cp
        bounds = torch.tensor(problem.bounds, dtype=torch.int32)
        rule = problem.scale, problem.sliding_window, None, None
        self._settings = (bounds, cp.group_name, "auto", exchange, *rule)

    def tokens(self) -> Tensor:
        return torch.arange(self._cp.rank, self._problem.row_length, self._cp.size)

    def gathered_bytes(self, key: Tensor, value: Tensor) -> int:
        """What a rank receives in collectives, which no shift brings: blocks twice, and fp32 gradients."""
        if self.name == "striped":
            return 0
        numbers = (self._cp.size - 1) * (key.numel() + value.numel())
        return numbers * (2 * key.element_size() + 4)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return ring_attention(query, key, value, None, *self._settings)

    def backward(
        self, dout: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return ring_attention_backward(dout, query, key, value, out, lse, *self._settings)


class Chunked:
    """A ring over contiguous chunks: the same transport, kernel calls, merge and backward pass."""

    def __init__(self, name: str, problem: Problem, cp: ContextParallel):
        self.name = name
        self._problem, self._cp = problem, cp
        self._chunks = zigzag_chunks if name == "zigzag" else contiguous_chunks

    def chunks(self, rank: int) -> list[tuple[int, int]]:
        return self._chunks(self._problem.row_length, self._cp.size, rank)

    def tokens(self) -> Tensor:
        return tokens_of(self.chunks(self._cp.rank))

    def pieces(self, query_rank: int, key_rank: int, dtype: torch.dtype) -> list[Piece]:
        chunks = self.chunks(query_rank), self.chunks(key_rank)
        return chunk_pieces(*chunks, self._problem.bounds, self._problem.sliding_window, dtype)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(query.dtype, torch.float32)
        out = torch.zeros(*query.shape[:2], value.shape[-1], dtype=wide)
        lse = torch.full(query.shape[:2], -torch.inf, dtype=wide)
        for step, k, v in RingExchange(self._cp, key, value, self._cp.size).blocks():
            pieces = self.pieces(self._cp.rank, step.key_rank, query.dtype)
            for queries, block, block_lse in run_forward(query, k, v, pieces, self._problem.scale):
                merge_partial_(out[queries], lse[queries], block, block_lse)
        return out.to(query.dtype), lse

    def backward(
        self, dout: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        exchange = RingExchange(self._cp, key, value, self._cp.size)
        exchange.start_gradients(lse.dtype)
        dquery = torch.zeros_like(query, dtype=lse.dtype)
        for step, k, v in exchange.blocks():
            dkey, dvalue = exchange.gradients_of(step)
            pieces = self.pieces(self._cp.rank, step.key_rank, query.dtype)
            add_backward(
                dout, query, k, v, out, lse, pieces, self._problem.scale, (dquery, dkey, dvalue)
            )
            exchange.send_gradients(step)
        return dquery, *exchange.collect_gradients()


class OneProcess:
    """The whole row in one process, one causal call a document, as PyTorch's sdpa makes it."""

    name = "one process"

    def __init__(self, problem: Problem):
        self._problem = problem

    def pieces(self, dtype: torch.dtype) -> list[Piece]:
        bounds, window = self._problem.bounds, self._problem.sliding_window
        if window is None:
            parts = [slice(begin, end) for begin, end in pairwise(bounds) if begin < end]
            return [Piece(part, part, True) for part in parts]
        whole = [(0, self._problem.row_length)]
        return chunk_pieces(whole, whole, bounds, window, dtype)

    def tokens(self) -> Tensor:
        return torch.arange(self._problem.row_length)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.empty(*query.shape[:2], value.shape[-1], dtype=query.dtype)
        lse = torch.empty(query.shape[:2], dtype=torch.promote_types(query.dtype, torch.float32))
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
    return _calls_forward(query, key, value, list(_cut(pieces)), scale)


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
    _calls_backward(dout, query, key, value, out, lse, list(_cut(pieces)), scale, totals)


def _cut(pieces: Sequence[Piece]) -> Iterator[Piece]:
    for piece in pieces:
        if not piece.causal:
            yield piece
            continue
        span = Span(piece.queries.start, piece.keys.start, piece.queries.stop - piece.queries.start)
        for queries, keys, causal in cpu.halves(span):
            yield Piece(queries, keys, causal)


def _calls_forward(query, key, value, pieces, scale):
    for queries, keys, causal, mask in pieces:
        out, lse = cpu.call_forward(query[queries], key[keys], value[keys], causal, mask, scale)
        yield queries, out, lse


def _calls_backward(dout, query, key, value, out, lse, pieces, scale, totals):
    for queries, keys, causal, mask in pieces:
        blocks = dout[queries], query[queries], key[keys], value[keys], out[queries], lse[queries]
        found = cpu.call_backward(*blocks, causal, mask, scale)
        for total, part, gradient in zip(totals, (queries, keys, keys), found, strict=True):
            total[part] += gradient


def make_layout(name: str, problem: Problem, cp: ContextParallel) -> Layout:
    """The layout called `name`."""
    if name == "one-process":
        return OneProcess(problem)
    if name in ("striped", "all-gather"):
        return Striped(problem, cp, RING if name == "striped" else GATHER)
    return Chunked(name, problem, cp)


LAYOUTS = ("striped", "contiguous", "zigzag", "all-gather", "one-process")


def multiple_of(names: Sequence[str], size: int) -> int:
    """What a row's length must be a multiple of."""
    return 2 * size if "zigzag" in names else size


def group_of(size: int) -> ContextParallel:
    """The group of all ranks."""
    return ContextParallel.from_group(dist.group.WORLD if size > 1 else None)
