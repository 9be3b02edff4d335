"""A plain Trainer over stripes trains to the numbers of one process."""

from functools import partial

import pytest
import torch
from accelerate import ParallelismConfig
from transformers import Trainer

from hf_striped import StripedParallelismConfig, StripedTrainer
from tests.fsdp import train_fsdp2
from tests.models import tiny_llama, token_rows
from tests.ranks import RankError
from tests.training import assert_same_run, train

TOPOLOGIES = {  # name: processes, cp_size, how it trains
    "DDP, cp 2": (2, 2, train),
    "DDP, cp 4": (4, 4, train),
    "DDP, dp 2 x cp 2": (4, 2, train),
    "FSDP2, cp 2": (2, 2, train_fsdp2),
    "FSDP2, dp 2 x cp 2": (4, 2, train_fsdp2),
}


def supervised_rows(counts, length=32, seed=0):
    """Rows of which only some tokens are targets, as many as `counts` says."""
    rows = token_rows(len(counts), length, seed)
    for row, count in zip(rows, counts, strict=True):
        row["labels"] = [-100] * (length - count) + row["labels"][length - count :]
    return rows


def one_process(rows, batch_size=1, **options):
    return train(0, 1, rows, 1, striped=False, per_device_train_batch_size=batch_size, **options)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_three_steps_equal_one_process_on_every_rank(ranks, name):  # C03 C06
    world, cp_size, how = TOPOLOGIES[name]
    rows = supervised_rows([3, 16, 9, 16, 5, 11], length=17)
    reference = one_process(rows, batch_size=world // cp_size)
    for run in ranks.run(world, how, rows, cp_size):
        assert_same_run(run, reference)


@pytest.mark.parametrize("name", ["DDP, cp 2", "DDP, dp 2 x cp 2", "FSDP2, cp 2"])
def test_the_clipped_gradient_is_the_same_on_every_rank(ranks, name):  # C06
    world, cp_size, how = TOPOLOGIES[name]
    rows = token_rows(6, 12)
    reference = one_process(rows, batch_size=world // cp_size, max_grad_norm=0.3)
    for run in ranks.run(world, partial(how, max_grad_norm=0.3), rows, cp_size):
        assert_same_run(run, reference)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize(("world", "cp_size"), [(2, 2), (4, 4), (4, 2)])
def test_tokens_averaged_a_device_equal_the_same_data_parallel_size_without_stripes(  # C03
    ranks, world, cp_size, steps
):
    rows = supervised_rows([3, 16, 9, 16, 5, 11, 2, 7, 12, 1, 8, 16], length=17)
    options = {"average_tokens_across_devices": False, "gradient_accumulation_steps": steps}
    plain = partial(train, striped=False, **options)
    reference = ranks.run(world // cp_size, plain, rows, 1)[0]
    for run in ranks.run(world, partial(train, **options), rows, cp_size):
        assert_same_run(run, reference)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_accumulated_micro_batches_weigh_by_tokens_as_one_big_batch(ranks, name):  # C04
    world, cp_size, how = TOPOLOGIES[name]
    counts = [3, 30, 7, 19, 4, 25, 1, 12]
    rows = supervised_rows(counts[: 4 * world // cp_size])
    options = {"gradient_accumulation_steps": 4, "max_steps": 1}
    reference = one_process(rows, batch_size=len(rows), max_steps=1)
    for run in ranks.run(world, partial(how, **options), rows, cp_size):
        assert_same_run(run, reference)


def unaware_of_counts(trainer):
    trainer.model_accepts_loss_kwargs = False


def test_a_loss_averaged_by_the_model_is_weighted_by_each_stripes_tokens(ranks):  # C03 C04
    rows = supervised_rows([1, 16, 9, 2, 5, 11], length=17)
    options = {"prepare": unaware_of_counts, "gradient_accumulation_steps": 2}
    reference = one_process(rows, **options)
    for run in ranks.run(2, partial(train, **options), rows, 2):
        assert_same_run(run, reference)


class BuildsItsModelLate(Trainer):
    """A Trainer that gets its model from `model_init`, as a hyperparameter search does."""

    def __init__(self, model, **kwargs):
        super().__init__(model_init=lambda: tiny_llama(model.config._attn_implementation), **kwargs)
        self.original = model

    def train(self, *args, **kwargs):
        super().train(*args, **kwargs)
        self.original.load_state_dict(self.model.state_dict())


def test_a_model_from_model_init_is_averaged_as_any_other(ranks):
    rows = supervised_rows([3, 16, 9, 16, 5, 11], length=17)
    options = {"trainer_class": BuildsItsModelLate, "average_tokens_across_devices": False}
    reference = one_process(rows, **options)
    for run in ranks.run(2, partial(train, **options), rows, 2):
        assert_same_run(run, reference)


def packed_collator():
    from transformers import DataCollatorWithFlattening

    return DataCollatorWithFlattening()


def test_packed_rows_train_as_their_documents(ranks):  # C05
    rows = [
        {"input_ids": row["input_ids"][:length]}
        for row, length in zip(token_rows(6, 20), [20, 3, 11, 1, 7, 16], strict=True)
    ]
    options = {"collator": packed_collator(), "per_device_train_batch_size": 3, "max_steps": 2}
    reference = train(0, 1, rows, 1, striped=False, **options)
    for run in ranks.run(2, partial(train, **options), rows, 2):
        assert_same_run(run, reference)


@pytest.mark.parametrize("batch_size", [2, 3, 7])
@pytest.mark.parametrize(("world", "cp_size"), [(1, 1), (2, 2), (4, 4), (4, 2)])
def test_evaluation_reports_the_loss_of_the_same_run_without_stripes(  # C01
    ranks, world, cp_size, batch_size
):
    rows = supervised_rows([1, 16, 9, 16, 2, 11, 3], length=17)
    options = {"eval_rows": rows, "per_device_eval_batch_size": batch_size, "max_steps": 1}
    plain = partial(train, striped=False, **options)
    reference = ranks.run(world // cp_size, plain, rows, 1)[0]
    for run in ranks.run(world, partial(train, **options), rows, cp_size):
        assert run["eval_loss"] == pytest.approx(reference["eval_loss"], abs=1e-5)


def test_epochs_and_steps_count_rows_not_ranks(ranks):  # C25
    rows = token_rows(8, 8)
    for trainer_class in (Trainer, StripedTrainer):
        run = partial(train, trainer_class=trainer_class)
        for seen in ranks.run(2, partial(run, max_steps=-1, num_train_epochs=1), rows, 2):
            assert (seen["steps"], seen["epoch"]) == (8, 1.0)
        for seen in ranks.run(2, partial(run, max_steps=4), rows, 2):
            assert (seen["steps"], seen["epoch"]) == (4, 0.5)
            assert seen["total_batch_size"] == 1


def sampled_rows(rank, world, workers):
    rows = [{**row, "row_id": index} for index, row in enumerate(token_rows(12, 8))]
    seen = []

    def look(trainer):
        loader = trainer.get_train_dataloader()
        for epoch in range(2):
            loader.set_epoch(epoch)
            seen.append([i for batch in loader for i in batch["row_id"].tolist()])
        trainer.train = lambda **_: None

    arguments = {"remove_unused_columns": False, "dataloader_num_workers": workers}
    arguments["dataloader_persistent_workers"] = workers > 0
    train(rank, world, rows, 2, prepare=look, **arguments)
    return seen


@pytest.mark.parametrize("workers", [0, 1])
def test_peers_of_a_group_draw_the_same_rows_and_groups_share_them_out(ranks, workers):  # C08
    seen = ranks.run(4, sampled_rows, workers)
    assert seen[0] == seen[1] and seen[2] == seen[3]
    for epoch in range(2):
        first, second = seen[0][epoch], seen[2][epoch]
        assert not set(first) & set(second)
        assert sorted(first + second) == list(range(12))
    assert seen[0][0] != seen[0][1]


class SavesCheckpoint(Trainer):
    def train(self, *args, **kwargs):
        super().train(*args, **kwargs)
        if not self.is_world_process_zero():
            return
        saved = torch.load(
            f"{self.args.output_dir}/checkpoint-3/training_args.bin", weights_only=False
        )
        assert saved.parallelism_config.context_parallel_size == 2
        plain = type(self.model).from_pretrained(f"{self.args.output_dir}/checkpoint-3")
        assert plain.config._attn_implementation == "sdpa"
        for name, weight in plain.named_parameters():
            assert torch.equal(weight, self.model.get_parameter(name))


def test_a_checkpoint_reloads_as_an_ordinary_model(ranks):
    options = {"trainer_class": SavesCheckpoint, "save_strategy": "steps", "save_steps": 3}
    ranks.run(2, partial(train, **options), token_rows(3, 8), 2)


def build_config(rank, world, fields):
    from accelerate import Accelerator

    Accelerator(cpu=True, parallelism_config=StripedParallelismConfig(**fields))


@pytest.mark.parametrize(
    ("world", "fields", "message"),
    [
        (3, {"context_parallel_size": 2}, "a multiple of context_parallel_size; received 3"),
        (1, {"context_parallel_size": 2}, "accelerate launch --num_processes 2"),
        (4, {"context_parallel_size": 2, "dp_replicate_size": 4}, "received 4 x 1 x 2 for 4"),
        (
            2,
            {"context_parallel_size": 2, "cp_size": 2},
            "cannot be combined with Accelerate's cp_size",
        ),
        (2, {"context_parallel_size": 0}, "positive integer; received 0"),
        (2, {"context_parallel_size": "2"}, "positive integer; received '2'"),
        (2, {"context_parallel_size": 2, "kernel": "flesh"}, "received 'flesh'"),
    ],
)
def test_sizes_that_cannot_work_are_refused_on_every_rank(ranks, world, fields, message):  # C10
    with pytest.raises(RankError, match=message) as caught:
        ranks.run(world, build_config, fields)
    assert caught.value.kinds == dict.fromkeys(range(world), "ConfigurationError")


def test_the_size_defaults_to_the_environment(monkeypatch):
    monkeypatch.setenv("HF_STRIPED_CONTEXT_PARALLEL_SIZE", "4")
    assert StripedParallelismConfig().context_parallel_size == 4
    monkeypatch.setenv("HF_STRIPED_CONTEXT_PARALLEL_SIZE", "four")
    with pytest.raises(ValueError, match=r"HF_STRIPED_CONTEXT_PARALLEL_SIZE.*received 'four'"):
        StripedParallelismConfig()
    monkeypatch.delenv("HF_STRIPED_CONTEXT_PARALLEL_SIZE")
    assert StripedParallelismConfig().context_parallel_size == 1
    assert isinstance(StripedParallelismConfig(), ParallelismConfig)
