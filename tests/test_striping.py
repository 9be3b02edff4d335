"""Which rank holds which token."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_striped import BatchError, ConfigurationError, stripe, unstripe


def test_two_ranks_share_four_tokens_alternately():
    tokens = torch.arange(4)
    assert stripe(tokens, 0, 2, 0).tolist() == [0, 2]
    assert stripe(tokens, 0, 2, 1).tolist() == [1, 3]


@given(cp_size=st.integers(1, 6), local=st.integers(0, 5), dim=st.sampled_from([0, 1, 2, -1, -2]))
def test_unstripe_is_the_inverse_of_stripe(cp_size, local, dim):
    shape = [2, 3, 4]
    shape[dim] = cp_size * local
    tensor = torch.randn(shape)
    shards = [stripe(tensor, dim, cp_size, rank) for rank in range(cp_size)]
    assert torch.equal(unstripe(shards, dim), tensor)


def test_a_length_that_is_no_multiple_of_cp_size_is_refused():
    with pytest.raises(BatchError, match=r"length 5 at dim 1, cp_size=2\. Pad it by 1 token"):
        stripe(torch.zeros(1, 5), 1, 2, 0)


@pytest.mark.parametrize(("size", "rank"), [(2, 2), (2, -1), (0, 0)])
def test_a_rank_outside_the_group_is_refused(size, rank):
    with pytest.raises(ConfigurationError, match=f"cp_rank={rank}, cp_size={size}"):
        stripe(torch.zeros(1, 4), 1, size, rank)


def test_shards_of_different_shapes_are_refused():
    with pytest.raises(BatchError, match=r"\(1, 2\), \(1, 3\)"):
        unstripe([torch.zeros(1, 2), torch.zeros(1, 3)], 1)
    with pytest.raises(BatchError, match="one shard a rank"):
        unstripe([], 1)


@pytest.mark.parametrize(("shape", "dim"), [((2, 4), 2), ((2, 4), -3), ((), 0)])
def test_a_dimension_that_a_tensor_has_not_is_named(shape, dim):
    tensor = torch.zeros(shape)
    message = rf"received dim={dim} and shape {re.escape(str(shape))}"
    with pytest.raises(BatchError, match=message):
        stripe(tensor, dim, 2, 0)
    with pytest.raises(BatchError, match=message):
        unstripe([tensor, tensor], dim)
