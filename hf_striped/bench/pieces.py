"""What a layout of contiguous chunks computes at one ring step: triangles, rectangles and windows.

A rank of such a layout holds chunks [begin, end) of the row: one in a contiguous ring, two in a zigzag one.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

Chunk = tuple[int, int]
TILE = 128  # queries of a call with a window


class Piece(NamedTuple):
    """Local queries against local keys: causal, or all of them, or those that `mask` (additive) leaves."""

    queries: slice
    keys: slice
    causal: bool
    mask: Tensor | None = None


def contiguous_chunks(row_length: int, size: int, rank: int) -> list[Chunk]:
    """The one chunk of `rank` in a contiguous ring."""
    local = row_length // size
    return [(rank * local, (rank + 1) * local)]


def zigzag_chunks(row_length: int, size: int, rank: int) -> list[Chunk]:
    """The two chunks of `rank` in a zigzag ring: one from the front, one from the back."""
    chunk = row_length // (2 * size)
    return [(i * chunk, (i + 1) * chunk) for i in (rank, 2 * size - 1 - rank)]


def tokens_of(chunks: Sequence[Chunk]) -> Tensor:
    """The global indices of a rank's tokens, in local order."""
    return torch.cat([torch.arange(begin, end) for begin, end in chunks])


def chunk_pieces(
    query_chunks: Sequence[Chunk],
    key_chunks: Sequence[Chunk],
    bounds: Sequence[int],
    sliding_window: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[Piece]:
    """The pieces of a step, neighbours joined into one call.

    Args:
        query_chunks: chunks of the rank whose queries are used.
        key_chunks: chunks of the rank whose keys are used.
        bounds: the documents' bounds, global.
        sliding_window: keys a query sees, its own included.
        dtype: of the masks.
    """
    pieces: list[Piece] = []
    for begin, end in pairwise(bounds):
        for query, query_at in _parts(query_chunks, begin, end):
            for key, key_at in _parts(key_chunks, begin, end):
                queries = slice(query_at, query_at + query[1] - query[0])
                keys = slice(key_at, key_at + key[1] - key[0])
                if key[0] > query[0]:
                    continue
                if sliding_window is None:
                    _join(pieces, Piece(queries, keys, key == query))
                else:
                    pieces.extend(_windows(queries, keys, query[0], key[0], sliding_window, dtype))
    return pieces


def _parts(chunks: Sequence[Chunk], begin: int, end: int) -> Iterator[tuple[Chunk, int]]:
    """What of a document each chunk holds, and its local index."""
    local = 0
    for first, last in chunks:
        part = max(first, begin), min(last, end)
        if part[0] < part[1]:
            yield part, local + part[0] - first
        local += last - first


def _join(pieces: list[Piece], piece: Piece) -> None:
    """Append a piece, or widen the last one by it where both are one rectangle."""
    last = pieces[-1] if pieces and not pieces[-1].causal and not piece.causal else None
    if last and last.queries == piece.queries and last.keys.stop == piece.keys.start:
        pieces[-1] = Piece(last.queries, slice(last.keys.start, piece.keys.stop), False)
    elif last and last.keys == piece.keys and last.queries.stop == piece.queries.start:
        pieces[-1] = Piece(slice(last.queries.start, piece.queries.stop), last.keys, False)
    else:
        pieces.append(piece)


def _windows(
    queries: slice, keys: slice, query: int, key: int, window: int, dtype: torch.dtype
) -> Iterator[Piece]:
    """Tiles of queries, each with the keys that its window reaches; `query` and `key` are global."""
    begin = max(0, key - query)  # the first query, and the end of those, that reach a key
    end = min(_length(queries), key + _length(keys) + window - 1 - query)
    for start in range(begin, end, TILE):
        stop = min(start + TILE, end)
        first = max(0, query + start - window + 1 - key)
        last = min(_length(keys), query + stop - key)
        distance = torch.arange(query + start, query + stop)[:, None] - torch.arange(
            key + first, key + last
        )
        hidden = (distance < 0) | (distance >= window)
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
        yield Piece(
            slice(queries.start + start, queries.start + stop),
            slice(keys.start + first, keys.start + last),
            False,
            mask if hidden.any() else None,
        )


def _length(part: slice) -> int:
    return part.stop - part.start
