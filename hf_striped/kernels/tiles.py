"""Tiles of a span: runs of its queries, each with only the keys that any of them sees."""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from hf_striped.packing import Span


class Tile(NamedTuple):
    """Queries against keys, and `hidden` `[queries, keys]`, True where a query does not see a key."""

    queries: slice
    keys: slice
    hidden: Tensor


def tiles(
    span: Span, window_left: int | None, size: int, device: torch.device | str = "cpu"
) -> Iterator[Tile]:
    """Cut `span` into tiles of at most `size` queries, causal and within the window."""
    left = span.length if window_left is None else window_left
    for begin in range(0, span.length, size):
        end = min(begin + size, span.length)
        first = max(0, begin - left)
        yield Tile(
            slice(span.query_start + begin, span.query_start + end),
            slice(span.key_start + first, span.key_start + end),
            _hidden(end - begin, begin - first, left, str(device)),
        )


@lru_cache(maxsize=16)
def _hidden(rows: int, before: int, left: int, device: str) -> Tensor:
    """The mask of `rows` queries whose first sees `before` keys ahead of its own."""
    distance = torch.arange(rows, device=device)[:, None] - torch.arange(
        -before, rows, device=device
    )
    return (distance < 0) | (distance > left)
