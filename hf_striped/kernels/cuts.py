"""A span cut into rectangles and small triangles, which dense kernels compute without waste.

A causal call computes whole tiles along the diagonal and throws half of them away. Halving a triangle again and again leaves rectangles, and triangles of at most `smallest` queries.
"""

from collections.abc import Iterator
from typing import NamedTuple

from hf_striped.packing import Span


class Cut(NamedTuple):
    """Queries against keys, causal or all of them."""

    queries: slice
    keys: slice
    causal: bool


def causal_cuts(span: Span, smallest: int) -> Iterator[Cut]:
    """The cuts of a causal span."""
    if span.length < 2 * smallest:
        yield Cut(span.queries, span.keys, True)
        return
    first, second = _halves(span)
    yield from causal_cuts(first, smallest)
    yield Cut(second.queries, first.keys, False)
    yield from causal_cuts(second, smallest)


def _halves(span: Span) -> tuple[Span, Span]:
    half = span.length // 2
    return (
        Span(span.query_start, span.key_start, half),
        Span(span.query_start + half, span.key_start + half, span.length - half),
    )
