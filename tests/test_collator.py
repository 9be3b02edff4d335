"""From natural-order batches to stripes."""

import pickle

import pytest
import torch
from accelerate import Accelerator, ParallelismConfig
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DataCollatorWithFlattening

from hf_striped import (
    BatchError,
    ConfigurationError,
    StripedDataCollator,
    StripedParallelismConfig,
    UnsupportedFeatureError,
    unstripe,
)
from tests.documents import packed_by_positions, padded, padded_left, random_documents
from tests.models import token_rows
from tests.ranks import RankError
from tests.striped_model import already_batched

KEYS = {"input_ids", "position_ids", "labels", "shift_labels", "striped_cu_seqlens"}


def stripes(features, cp_size, base=None, **options):
    return [
        StripedDataCollator(base, cp_size=cp_size, cp_rank=rank, **options)(features)
        for rank in range(cp_size)
    ]


def natural(batches, key):
    return unstripe([batch[key] for batch in batches], 1)


def test_labels_are_shifted_before_striping():  # C02
    first, second = stripes([{"input_ids": list(range(8)), "labels": list(range(8))}], 2)
    assert first["shift_labels"].tolist() == [[1, 3, 5, 7]]
    assert second["shift_labels"].tolist() == [[2, 4, 6, -100]]
    assert first["input_ids"].tolist() == [[0, 2, 4, 6]]


def test_labels_equal_shift_labels_and_no_mask_is_left():  # C11
    for batch in stripes([padded(random_documents([3, 5])).batch], 2, already_batched):
        assert set(batch) == KEYS
        assert torch.equal(batch["labels"], batch["shift_labels"])


def test_a_batch_without_position_ids_gets_its_stripe_of_them():  # C16
    batches = stripes(token_rows(1, 8), 2)
    assert batches[0]["position_ids"].tolist() == [[0, 2, 4, 6]]
    assert batches[1]["position_ids"].tolist() == [[1, 3, 5, 7]]


def test_a_row_is_filled_up_with_a_document_that_counts_nowhere():  # C14
    batches = stripes(token_rows(1, 7), 2, pad_token_id=9)
    assert natural(batches, "input_ids")[0, 7] == 9
    assert natural(batches, "shift_labels")[0, 6:].tolist() == [-100, -100]
    assert batches[0]["striped_cu_seqlens"].tolist() == [0, 7, 8]


def test_padding_is_a_document_of_its_own_on_either_side():  # C15
    documents = random_documents([2, 4])
    right, left = padded(documents), padded_left(documents)
    assert stripes([right.batch], 2, already_batched)[0]["striped_cu_seqlens"].tolist() == [0, 2, 4, 8]  # fmt: skip
    batches = stripes([left.batch], 2, already_batched)
    assert batches[0]["striped_cu_seqlens"].tolist() == [0, 2, 4, 8]
    assert natural(batches, "position_ids")[0].tolist() == [0, 1, 0, 1]
    assert natural(batches, "shift_labels")[0, :2].tolist() == [-100, -100]


def test_a_document_in_the_middle_of_a_row_predicts_nothing_across_its_end():
    documents = random_documents([3, 2, 3])
    batches = stripes([packed_by_positions(documents).batch], 2, already_batched)
    tokens = natural(batches, "input_ids")[0]
    expected = tokens.roll(-1)
    expected[[2, 4, 7]] = -100
    assert torch.equal(natural(batches, "shift_labels")[0], expected)


@pytest.mark.parametrize("kwargs", [{}, {"return_flash_attn_kwargs": True}, {"return_seq_idx": True},
                                    {"return_flash_attn_kwargs": True, "return_seq_idx": True,
                                     "return_position_ids": False}])  # fmt: skip
def test_transformers_flattening_collator_is_understood_in_each_of_its_forms(kwargs):
    features = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}]
    batches = stripes(features, 2, DataCollatorWithFlattening(**kwargs))
    assert batches[0]["striped_cu_seqlens"].tolist() == [0, 3, 5, 6]
    assert natural(batches, "shift_labels").tolist() == [[2, 3, -100, 5, -100, -100]]
    assert set(batches[0]) == KEYS


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    cp_size=st.integers(1, 4),
    layout=st.sampled_from([padded, padded_left, packed_by_positions]),
)
def test_every_token_keeps_its_position_and_its_target(lengths, cp_size, layout):
    documents = random_documents(lengths)
    batch, places = layout(documents)
    batches = stripes([batch], cp_size, already_batched)
    found = {key: natural(batches, key) for key in ("input_ids", "position_ids", "shift_labels")}
    supervised = 0
    for document, (row, column) in zip(documents, places, strict=True):
        here = row, slice(column, column + len(document))
        assert torch.equal(found["input_ids"][here], document)
        assert torch.equal(found["position_ids"][here], torch.arange(len(document)))
        assert found["shift_labels"][here].tolist() == [*document[1:].tolist(), -100]
        supervised += len(document) - 1
    assert (found["shift_labels"] != -100).sum() == supervised


def test_keys_with_a_value_a_token_are_striped_and_the_rest_passes():
    features = [{**token_rows(1, 4)[0], "weights": [0.0, 1.0, 2.0, 3.0], "row_id": 7}]
    batch = stripes(features, 2)[1]
    assert batch["weights"].tolist() == [[1.0, 3.0]]
    assert batch["row_id"].tolist() == [7]


def test_a_tokenizer_is_a_collator_that_pads_and_labels(packaged_tokenizer):
    features = [{"input_ids": [5, 6, 7]}, {"input_ids": [8]}]
    batches = stripes(features, 2, packaged_tokenizer)
    assert natural(batches, "shift_labels").tolist() == [[6, 7, -100, -100], [-100] * 4]
    assert natural(batches, "input_ids")[1, 1:].tolist() == [packaged_tokenizer.pad_token_id] * 3


def custom_mask(batch):
    batch["attention_mask"] = torch.ones(1, 1, 4, 4)


def integer_mask(batch):
    batch["attention_mask"] = torch.tensor([[1, 1, 2, 2]])


def hole(batch):
    batch["attention_mask"] = torch.tensor([[1, 0, 1, 1]])


def contradiction(batch):
    batch["seq_idx"] = torch.tensor([[0, 0, 1, 1]])
    batch["cu_seq_lens_q"] = torch.tensor([0, 1, 4])


def restart_inside(batch):
    batch["seq_idx"] = torch.tensor([[0, 0, 0, 0]])
    batch["position_ids"] = torch.tensor([[0, 1, 0, 1]])


def short_cu_seq_lens(batch):
    batch["cu_seq_lens_q"] = torch.tensor([0, 3])


def multimodal_positions(batch):
    batch["position_ids"] = torch.zeros(3, 1, 4)


def unknown_shape(batch):
    batch["pixel_values"] = torch.zeros(1, 3, 8, 8)


def wrong_mask_shape(batch):
    batch["attention_mask"] = torch.ones(1, 3)


def striped_twice(batch):
    batch["striped_cu_seqlens"] = torch.tensor([0, 4])


def lists(batch):
    batch["input_ids"] = [[1, 2, 3, 4]]


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (custom_mask, UnsupportedFeatureError, r"custom mask of shape \(1, 1, 4, 4\)"),
        (integer_mask, UnsupportedFeatureError, r"received the values \[1, 2\]"),
        (hole, UnsupportedFeatureError, "back to 1 at row 0, token 2"),
        (contradiction, BatchError, "cu_seq_lens_q and seq_idx must name the same documents"),
        (restart_inside, BatchError, "such a restart at row 0, token 2"),
        (short_cu_seq_lens, BatchError, "rise from 0 to the 4 tokens"),
        (multimodal_positions, UnsupportedFeatureError, r"received the shape \(3, 1, 4\)"),
        (unknown_shape, UnsupportedFeatureError, "'pixel_values' of shape"),
        (wrong_mask_shape, BatchError, r"\(1, 4\); received \(1, 3\)"),
        (striped_twice, ConfigurationError, "striped already"),
        (lists, BatchError, "as tensors"),
    ],
)
def test_a_batch_that_cannot_be_striped_exactly_is_refused(spoil, error, message):  # C21
    batch = dict(packed_by_positions(random_documents([4])).batch)
    del batch["position_ids"]
    spoil(batch)
    with pytest.raises(error, match=message):
        stripes([batch], 2, already_batched)


def test_features_of_different_lengths_need_a_base_collator():
    with pytest.raises(BatchError, match=r"'input_ids' has \[\(3,\), \(4,\)\]"):
        stripes([{"input_ids": [1, 2, 3]}, {"input_ids": [1, 2, 3, 4]}], 2)
    with pytest.raises(BatchError, match="same keys"):
        stripes([{"input_ids": [1]}, {"tokens": [1]}], 1)


def test_size_and_rank_come_together():
    with pytest.raises(ConfigurationError, match="cp_size=2, cp_rank=None"):
        StripedDataCollator(cp_size=2)
    with pytest.raises(ConfigurationError, match="cp_rank=2, cp_size=2"):
        StripedDataCollator(cp_size=2, cp_rank=2)
    with pytest.raises(ConfigurationError, match="received int"):
        StripedDataCollator(3)


def test_without_an_accelerate_state_a_batch_stays_whole():
    batch = StripedDataCollator()(token_rows(1, 5))
    assert batch["input_ids"].shape == (1, 5)
    assert batch["striped_cu_seqlens"].tolist() == [0, 5]


def size_from_state(rank, world):
    Accelerator(cpu=True, parallelism_config=StripedParallelismConfig(2))
    collator = StripedDataCollator()
    assert pickle.loads(pickle.dumps(collator)).size_and_rank() == (2, rank % 2)
    with pytest.raises(ConfigurationError, match=r"active group has \(2, "):
        StripedDataCollator(cp_size=4, cp_rank=rank)(token_rows(1, 8))
    return collator.size_and_rank()


def test_size_and_rank_come_from_the_accelerate_state_in_workers_too(ranks):  # C23
    assert ranks.run(4, size_from_state) == [(2, 0), (2, 1), (2, 0), (2, 1)]


def accelerates_own_cp(rank, world):
    from accelerate.state import AcceleratorState

    AcceleratorState._shared_state["parallelism_config"] = ParallelismConfig(cp_size=2)
    StripedDataCollator()(token_rows(1, 8))


def test_a_sequence_that_accelerate_splits_too_is_refused_on_every_rank(ranks):  # C10
    with pytest.raises(RankError, match="split each sequence twice") as caught:
        ranks.run(2, accelerates_own_cp)
    assert caught.value.kinds == dict.fromkeys(range(2), "ConfigurationError")
