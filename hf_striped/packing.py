"""Documents of a packed row: where they start, and what one ring step computes of each.

A batch `[batch, seq]` with `seq` a multiple of `cp_size` is one packed row of `batch * seq` tokens,
so dense, padded, batched and packed inputs differ only in `cu_seqlens`.

    cu_seqlens: int32 [documents + 1], global, from 0 to the length of the row
    spans:      the equal-length causal pieces of one ring step, in local indices
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from hf_striped.errors import BatchError


class Span(NamedTuple):
    """Queries `[query_start, query_start + length)` against as many keys from `key_start`, causally."""

    query_start: int
    key_start: int
    length: int

    @property
    def queries(self) -> slice:
        return slice(self.query_start, self.query_start + self.length)

    @property
    def keys(self) -> slice:
        return slice(self.key_start, self.key_start + self.length)


def _local_index(token: int, cp_size: int, rank: int) -> int:
    """How many of `rank`'s tokens come before global `token`: ceil((token - rank) / cp_size)."""
    return -((rank - token) // cp_size)


def block_spans(
    bounds: Sequence[int], cp_size: int, query_rank: int, key_rank: int
) -> tuple[Span, ...]:
    """The spans of the ring step in which `query_rank`'s queries meet `key_rank`'s keys.

    Within each span plain causal attention over equal lengths is exact, so that top-left and
    bottom-right aligned kernels agree. Derivation: docs/explanation/striping.md.

    Args:
        bounds: `cu_seqlens` as integers, global.
        cp_size: number of ranks; the row's length is a multiple of it.
        query_rank: the rank whose queries are used.
        key_rank: the rank whose keys are used.

    Returns:
        One span a document that has at least one allowed pair in this step, in row order.
    """
    excluded = int(key_rank > query_rank)
    spans = []
    for begin, end in pairwise(bounds):
        key_start = _local_index(begin, cp_size, key_rank)
        query_start = key_start + excluded
        length = _local_index(end, cp_size, query_rank) - query_start
        if length > 0:
            spans.append(Span(query_start, key_start, length))
    return tuple(spans)


def block_window(sliding_window: int, cp_size: int, query_rank: int, key_rank: int) -> int:
    """How many keys before its own a query of a span still sees, of those in this ring step.

    Args:
        sliding_window: keys a query sees in all, its own included; at least 1.
        cp_size: number of ranks.
        query_rank: the rank whose queries are used.
        key_rank: the rank whose keys are used.

    Returns:
        The window to the left of the span's diagonal; negative where the step holds no pair at all
        (from the `sliding_window`-th ring step on).
    """
    return (sliding_window - 1 - (query_rank - key_rank) % cp_size) // cp_size


def chunk_bounds(bounds: Sequence[int], chunk_size: int) -> list[int]:
    """Cut each document into chunks of `chunk_size` tokens, counted from its start (Llama 4).

    Args:
        bounds: `cu_seqlens` as integers.
        chunk_size: tokens of a chunk; attention does not cross its ends.
    """
    cuts = [cut for begin, end in pairwise(bounds) for cut in range(begin, end, chunk_size)]
    return [*cuts, bounds[-1]]


def dense_cu_seqlens(batch_size: int, seq_len: int) -> Tensor:
    """`cu_seqlens` of a batch in which each row is one document."""
    return torch.arange(batch_size + 1, dtype=torch.int32) * seq_len


def cu_seqlens_from_starts(starts: Tensor) -> Tensor:
    """`cu_seqlens` of a batch from a boolean map of document starts.

    Args:
        starts: bool `[batch, seq]`; the first token of each row starts a document whatever it says.

    Returns:
        int32 `[documents + 1]` over the flattened row, on the CPU.
    """
    starts = starts.clone()
    starts[:, 0] = True
    begins = starts.flatten().nonzero().flatten().cpu()
    return torch.cat([begins, begins.new_tensor([starts.numel()])]).to(torch.int32)


def check_cu_seqlens(bounds: Sequence[int], row_length: int) -> None:
    """Raise `BatchError` unless `bounds` rise from 0 to `row_length`."""
    ordered = all(a <= b for a, b in pairwise(bounds))
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != row_length or not ordered:
        shown = list(bounds) if len(bounds) <= 8 else [*bounds[:4], "...", *bounds[-3:]]
        raise BatchError(
            "cu_seqlens must rise from 0 to the global length of the flattened row "
            f"(batch * local_seq * cp_size = {row_length}); received {shown}. "
            "Pass the global cu_seqlens, over all ranks' tokens and all rows of the batch."
        )
