"""Tiles of a span: runs of its queries, each with only the keys that any of them sees."""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from hf_striped.packing import Span


class Tile(NamedTuple):
    """Queries against keys, and `mask` `[queries, keys]`: where a query does not see a key it is True, or -inf
    in a mask to be added.
    """

    queries: slice
    keys: slice
    mask: Tensor


def tiles(
    span: Span,
    window_left: int | None,
    size: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bool,
) -> Iterator[Tile]:
    """Cut `span` into tiles of at most `size` queries, causal and within the window; `dtype` is the masks'."""
    left = span.length if window_left is None else window_left
    for begin in range(0, span.length, size):
        end = min(begin + size, span.length)
        first = max(0, begin - left)
        yield Tile(
            slice(span.query_start + begin, span.query_start + end),
            slice(span.key_start + first, span.key_start + end),
            _mask(end - begin, begin - first, left, str(device), dtype),
        )


@lru_cache(maxsize=64)
def _mask(rows: int, before: int, left: int, device: str, dtype: torch.dtype) -> Tensor:
    """The mask of `rows` queries whose first sees `before` keys ahead of its own."""
    distance = torch.arange(rows, device=device)[:, None] - torch.arange(
        -before, rows, device=device
    )
    hidden = (distance < 0) | (distance > left)
    if dtype == torch.bool:
        return hidden
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)
