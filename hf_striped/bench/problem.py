"""What is computed: documents of one row, with or without a window."""

from itertools import pairwise
from typing import NamedTuple


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
