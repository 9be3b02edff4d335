"""The step rule against every query/key pair, by brute force."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_striped import BatchError
from hf_striped.packing import block_spans, block_window, check_cu_seqlens, cu_seqlens_from_starts


@st.composite
def packed_rows(draw):
    """A number of ranks, and the cuts of a row that it divides."""
    cp_size = draw(st.integers(1, 8))
    length = cp_size * draw(st.integers(1, 8))
    cuts = draw(st.lists(st.integers(0, length), max_size=8))
    return cp_size, [0, *sorted(cuts), length]


@given(packed_rows())
def test_the_spans_of_all_steps_are_exactly_the_allowed_pairs(row):
    cp_size, bounds = row
    allowed = {(q, k) for a, b in pairwise(bounds) for q in range(a, b) for k in range(a, q + 1)}
    computed = []
    for query_rank in range(cp_size):
        for key_rank in range(cp_size):
            for span in block_spans(bounds, cp_size, query_rank, key_rank):
                computed += [
                    (
                        (span.query_start + i) * cp_size + query_rank,
                        (span.key_start + j) * cp_size + key_rank,
                    )
                    for i in range(span.length)
                    for j in range(i + 1)
                ]
    assert len(computed) == len(set(computed))
    assert set(computed) == allowed


@given(packed_rows(), st.integers(1, 40))
def test_a_sliding_window_is_one_number_a_step(row, window):
    cp_size, bounds = row
    allowed = {
        (q, k)
        for a, b in pairwise(bounds)
        for q in range(a, b)
        for k in range(max(a, q - window + 1), q + 1)
    }
    computed = []
    for query_rank in range(cp_size):
        for index in range(min(cp_size, window)):
            key_rank = (query_rank - index) % cp_size
            left = block_window(window, cp_size, query_rank, key_rank)
            assert left >= 0
            for span in block_spans(bounds, cp_size, query_rank, key_rank):
                computed += [
                    (
                        (span.query_start + i) * cp_size + query_rank,
                        (span.key_start + j) * cp_size + key_rank,
                    )
                    for i in range(span.length)
                    for j in range(max(0, i - left), i + 1)
                ]
    assert len(computed) == len(set(computed))
    assert set(computed) == allowed


@given(packed_rows())
def test_spans_stay_inside_the_shard_and_in_order(row):
    cp_size, bounds = row
    local = bounds[-1] // cp_size
    for query_rank in range(cp_size):
        for key_rank in range(cp_size):
            query_end = key_end = 0
            for span in block_spans(bounds, cp_size, query_rank, key_rank):
                assert query_end <= span.query_start and key_end <= span.key_start
                query_end, key_end = span.queries.stop, span.keys.stop
            assert query_end <= local and key_end <= local


def test_a_late_source_rank_excludes_the_diagonal():
    assert block_spans([0, 8], 2, query_rank=1, key_rank=0) == ((0, 0, 4),)
    assert block_spans([0, 8], 2, query_rank=0, key_rank=1) == ((1, 0, 3),)


def test_every_rank_has_equal_work_at_every_step_to_within_one_token():
    cp_size, length = 4, 64
    for key_offset in range(cp_size):
        lengths = [
            block_spans([0, length], cp_size, r, (r - key_offset) % cp_size)[0].length
            for r in range(cp_size)
        ]
        assert max(lengths) - min(lengths) <= 1


def test_a_document_of_one_token_takes_part_only_at_home():
    steps = {(q, k): block_spans([0, 1, 2, 4], 2, q, k) for q in range(2) for k in range(2)}
    assert steps == {(0, 0): ((0, 0, 1), (1, 1, 1)), (1, 1): ((0, 0, 1), (1, 1, 1)),
                     (1, 0): ((1, 1, 1),), (0, 1): ()}  # fmt: skip


def test_cu_seqlens_start_a_document_with_every_row():
    starts = torch.tensor([[False, False, True], [False, False, False]])
    assert cu_seqlens_from_starts(starts).tolist() == [0, 2, 3, 6]


@pytest.mark.parametrize("bounds", [[0], [1, 8], [0, 6], [0, 5, 4, 8], [0, *range(1, 20), 9]])
def test_cu_seqlens_that_do_not_cover_the_row_are_refused(bounds):
    with pytest.raises(BatchError, match="must rise from 0 to the global length"):
        check_cu_seqlens(bounds, 8)
