"""What would make the ranks of a group train on spliced rows, or on one dropout mask, is mended or refused."""

from functools import partial

import pytest
import torch
from datasets import Dataset as Rows
from datasets.distributed import split_dataset_by_node
from torch.utils.data import Dataset
from transformers import GPT2Config, Trainer, TrainerCallback

from hf_striped import StripedTrainer
from tests.models import tiny_llama, tiny_model, token_rows
from tests.ranks import RankError
from tests.test_trainer_life import one_process
from tests.training import assert_same_run, train


class RandomCrops(Dataset):
    """Each row a random crop, drawn where the row is loaded."""

    def __init__(self):
        self.rows = token_rows(8, 32)

    def __len__(self):
        return 8

    def __getitem__(self, index):
        begin = int(torch.randint(24, ()))
        return {key: value[begin : begin + 8] for key, value in self.rows[index].items()}


def crops_by_workers(rank, world, striped):
    return train(rank, world, RandomCrops(), world, striped=striped, dataloader_num_workers=1)


def test_workers_of_a_group_draw_the_same_random_crops(ranks):
    (reference,) = ranks.run(1, crops_by_workers, False)
    for run in ranks.run(2, crops_by_workers, True):
        assert_same_run(run, reference)


def shard(rank, world, kind):
    rows = Rows.from_list(token_rows(12, 8))
    if kind == "a stream split by node":
        rows = split_dataset_by_node(rows.to_iterable_dataset(), rank, world)
    else:
        rows = rows.shard(world, rank)
    return train(rank, world, rows, world, accelerator_config={"dispatch_batches": False})


class DrawsOnOneRank(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            torch.rand(3)


@pytest.mark.parametrize("kind", ["a stream split by node", "a dataset sharded by rank"])
def test_data_sharded_by_rank_is_refused_on_every_rank(ranks, kind):
    with pytest.raises(RankError, match="must collate the same batch") as caught:
        ranks.run(2, shard, kind)
    assert caught.value.kinds == dict.fromkeys(range(2), "BatchError")


def test_randomness_that_drifted_apart_is_refused_on_every_rank(ranks):
    run = partial(train, callbacks=[DrawsOnOneRank()])
    with pytest.raises(
        RankError, match=r"rank\(s\) \[1\] of the group collated another one"
    ) as caught:
        ranks.run(2, run, RandomCrops(), 2)
    assert caught.value.kinds == dict.fromkeys(range(2), "BatchError")


def rows_by_rank(rank, world):
    return train(rank, world, token_rows(4 + 2 * rank, 8), world, max_steps=-1)


def test_data_loaders_of_other_lengths_are_refused_on_every_rank(ranks):
    with pytest.raises(RankError, match=r"data loaders of \[4, 6\] batches") as caught:
        ranks.run(2, rows_by_rank)
    assert caught.value.kinds == dict.fromkeys(range(2), "ConfigurationError")


def masks(rank, world):
    """The dropout masks of two steps, and what the group's generator gives afterwards."""
    config = GPT2Config(
        vocab_size=64,
        n_embd=32,
        n_layer=1,
        n_head=4,
        n_positions=64,
        attn_pdrop=0.0,
        embd_pdrop=0.5,
    )
    seen = []

    def model(attn_implementation):
        network = tiny_model(config, attn_implementation)
        network.transformer.drop.register_forward_hook(
            lambda module, args, output: seen.append((output == 0).flatten()[:64])
        )
        return network

    train(rank, world, token_rows(4, 64), world, model=model, max_steps=2)
    return (*seen, torch.rand(4))


def test_each_rank_drops_out_by_itself_and_the_groups_randomness_goes_on(ranks):
    (first, second, after), (other, _, also_after) = ranks.run(2, masks)
    assert not torch.equal(first, other) and not torch.equal(first, second)
    assert torch.equal(after, also_after)


class KeepsTrainLoss(Trainer):
    def train(self, *args, **kwargs):
        done = super().train(*args, **kwargs)
        self.state.num_input_tokens_seen = done.training_loss
        return done


@pytest.mark.parametrize("cp_size", [2, 4])
def test_the_reported_train_loss_is_that_of_one_process_on_every_rank(ranks, cp_size):
    """No step is logged, and most stripes have no label."""
    rows = [
        {"input_ids": r["input_ids"], "labels": [-100] * 7 + r["labels"][7:]}
        for r in token_rows(6, 9)
    ]
    options = {"trainer_class": KeepsTrainLoss, "logging_steps": 500}
    expected = one_process(rows, **options)["tokens_seen"]
    for run in ranks.run(cp_size, partial(train, **options), rows, cp_size):
        assert run["tokens_seen"] == pytest.approx(expected, abs=1e-4)


class PassesTheCount(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class ReadsLabels(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        count = (inputs["labels"] != -100).sum()
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        return (loss * count, outputs) if return_outputs else loss * count


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trainer_class": PassesTheCount}, r"does not call super\(\)\.compute_loss"),
        ({"trainer_class": ReadsLabels}, "which reads labels"),
        ({"neftune_noise_alpha": 5.0}, "received neftune_noise_alpha=5.0"),
    ],
)
def test_what_a_trainer_would_get_wrong_on_stripes_is_refused_when_it_is_built(
    ranks, options, message
):
    with pytest.raises(RankError, match=message) as caught:
        ranks.run(2, partial(train, **options), token_rows(4, 8), 2)
    assert caught.value.kinds == dict.fromkeys(range(2), "UnsupportedFeatureError")


def smooth_then_plain(rank, world, striped):
    kept = []

    def model(attn_implementation):
        kept.append(tiny_llama(attn_implementation))
        return kept[-1]

    train(
        rank,
        world,
        token_rows(4, 8),
        world,
        model=model,
        striped=striped,
        trainer_class=StripedTrainer,
        label_smoothing_factor=0.3,
        max_steps=1,
    )
    tokens = torch.arange(1, 9)[None]
    with torch.no_grad():
        return kept[0].eval()(tokens, labels=tokens).loss.item()


def test_label_smoothing_does_not_stay_on_the_model(ranks):
    (expected,) = ranks.run(1, smooth_then_plain, False)
    for found in ranks.run(2, smooth_then_plain, True):
        assert found == pytest.approx(expected, abs=1e-4)
