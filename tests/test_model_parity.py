"""A whole model on stripes equals one process that runs each document alone (fp64)."""

from functools import partial

import pytest
import torch
from transformers import GraniteConfig

from tests.documents import (
    dense,
    packed_by_cu_seq_lens,
    packed_by_positions,
    packed_by_seq_idx,
    packed_with_full_mask,
    padded,
    padded_left,
    random_documents,
)
from tests.models import tiny_llama, tiny_model
from tests.striped_model import assert_equal_to_one_process

double_llama = partial(tiny_llama, dtype=torch.float64)


@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
def test_a_dense_batch_without_position_ids_equals_one_process(ranks, cp_size):  # C12 C13 C16
    documents = random_documents([12, 12])
    assert_equal_to_one_process(ranks, cp_size, double_llama, documents, dense)


@pytest.mark.parametrize(("length", "cp_size"), [(7, 2), (1, 4), (5, 3), (9, 4)])
def test_a_length_not_divisible_by_cp_size_loses_no_token(ranks, length, cp_size):  # C14
    documents = random_documents([length, length])
    assert_equal_to_one_process(ranks, cp_size, double_llama, documents, dense)


@pytest.mark.parametrize("cp_size", [2, 4])
@pytest.mark.parametrize("layout", [padded, padded_left])
def test_padded_rows_on_either_side_equal_their_documents_alone(ranks, layout, cp_size):  # C15
    documents = random_documents([5, 9, 16])
    assert_equal_to_one_process(ranks, cp_size, double_llama, documents, layout)


@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "layout",
    [packed_by_positions, packed_with_full_mask, packed_by_cu_seq_lens, packed_by_seq_idx],
)
def test_packed_documents_equal_each_alone_however_they_are_named(
    ranks, layout, cp_size
):  # C05 C13
    documents = random_documents([6, 1, 2, 11, 3])
    assert_equal_to_one_process(ranks, cp_size, double_llama, documents, layout)


def test_in_fp32_a_packed_row_equals_its_documents_alone(ranks):
    documents = random_documents([6, 1, 2, 11, 3])
    assert_equal_to_one_process(ranks, 2, tiny_llama, documents, packed_by_positions)


@pytest.mark.parametrize(("heads", "key_heads"), [(6, 2), (4, 1), (4, 4)])
@pytest.mark.parametrize("cp_size", [2, 3])
def test_grouped_and_single_key_heads_equal_one_process(ranks, heads, key_heads, cp_size):  # C20
    build = partial(
        double_llama, hidden_size=48, num_attention_heads=heads, num_key_value_heads=key_heads
    )
    documents = random_documents([13])
    assert_equal_to_one_process(ranks, cp_size, build, documents, dense)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_usual_head_dims_equal_one_process(ranks, head_dim):
    build = partial(double_llama, head_dim=head_dim)
    assert_equal_to_one_process(ranks, 2, build, random_documents([11, 4]), packed_by_positions)


def tiny_granite(attn_implementation):
    config = GraniteConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_multiplier=0.5,
    )
    return tiny_model(config, attn_implementation, torch.float64)


def test_the_models_own_scaling_is_used(ranks):  # C18
    assert_equal_to_one_process(ranks, 2, tiny_granite, random_documents([9, 4]), padded)


def test_gradient_checkpointing_changes_nothing(ranks):
    documents = random_documents([6, 11, 3])
    assert_equal_to_one_process(
        ranks, 2, double_llama, documents, packed_by_positions, checkpointing=True
    )
