"""The rest of a Trainer's life over stripes: memory savers, data, saving and resuming."""

from functools import partial

import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import TrainerCallback

from tests.models import tiny_llama, token_rows
from tests.ranks import RankError
from tests.training import assert_same_run, train


def one_process(rows, batch_size=1, **options):
    options = {"per_device_train_batch_size": batch_size, **options}
    return train(0, 1, rows, 1, striped=False, **options)


@pytest.mark.parametrize("reentrant", [True, False])
def test_both_kinds_of_gradient_checkpointing_equal_one_process(ranks, reentrant):
    rows = token_rows(6, 13)
    options = {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": reentrant},
    }
    reference = one_process(rows, **options)
    for run in ranks.run(2, partial(train, **options), rows, 2):
        assert_same_run(run, reference)


def lora_llama(attn_implementation, modules):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    config = LoraConfig(
        r=4, target_modules=modules, init_lora_weights=False, layers_to_transform=[1]
    )
    return get_peft_model(tiny_llama(attn_implementation), config)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("modules", [["q_proj"], ["v_proj", "o_proj"], ["up_proj"]])
def test_lora_on_any_modules_equals_one_process(ranks, modules, checkpointing):
    """Layer 0 has no gradient at all: its ring runs forward only, on every rank."""
    rows = token_rows(6, 13)
    options = {
        "model": partial(lora_llama, modules=modules),
        "gradient_checkpointing": checkpointing,
    }
    reference = one_process(rows, **options)
    for run in ranks.run(2, partial(train, **options), rows, 2):
        assert_same_run(run, reference)


def frozen_base(attn_implementation):
    """As for QLoRA: a frozen base prepared for quantised training, with checkpointing, under LoRA."""
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    torch.manual_seed(3)
    base = prepare_model_for_kbit_training(tiny_llama(attn_implementation))
    return get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))


def test_lora_over_a_base_prepared_for_quantised_training_equals_one_process(ranks):
    rows = token_rows(6, 13)
    reference = one_process(rows, model=frozen_base)
    for run in ranks.run(2, partial(train, model=frozen_base), rows, 2):
        assert_same_run(run, reference)


def test_stripes_without_a_supervised_token_count_for_nothing(ranks):
    """One target a row: three of four ranks have none in any step."""
    rows = [
        {"input_ids": row["input_ids"], "labels": [-100] * 8 + row["labels"][8:]}
        for row in token_rows(6, 9)
    ]
    reference = one_process(rows)
    for run in ranks.run(4, train, rows, 4):
        assert_same_run(run, reference)


def test_mixed_precision_follows_one_process_in_the_same_precision(ranks):
    rows = token_rows(6, 13)
    reference = one_process(rows, bf16=True)
    for run in ranks.run(2, partial(train, bf16=True), rows, 2):
        torch.testing.assert_close(run["losses"], reference["losses"], atol=2e-2, rtol=0)
        torch.testing.assert_close(run["grad_norms"], reference["grad_norms"], atol=0, rtol=5e-2)


OWN_BATCHES = {"dispatch_batches": False}


class Stream(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


@pytest.mark.parametrize(("world", "cp_size"), [(2, 2), (4, 2)])
def test_a_stream_gives_each_row_once_to_one_group(ranks, world, cp_size):  # C09
    rows = token_rows(12, 9)
    options = {"max_steps": 12 * cp_size // world, "accelerator_config": OWN_BATCHES}
    reference = one_process(Stream(rows), batch_size=world // cp_size, **options)
    for run in ranks.run(world, partial(train, **options), Stream(rows), cp_size):
        assert_same_run(run, reference)


def hub_stream(rank, world, rows, cp_size, striped=True, **options):
    from datasets import Dataset

    stream = Dataset.from_list(rows).to_iterable_dataset(num_shards=3)
    return train(rank, world, stream, cp_size, striped=striped, **options)


def test_a_datasets_stream_equals_one_process(ranks):  # C09
    rows = token_rows(6, 9)
    options = {"max_steps": 6, "accelerator_config": OWN_BATCHES}
    reference = hub_stream(0, 1, rows, 1, striped=False, **options)
    for run in ranks.run(2, partial(hub_stream, **options), rows, 2):
        assert_same_run(run, reference)


@pytest.mark.parametrize("length", [8, 9])
@pytest.mark.parametrize("dataset", [Stream, list])
def test_batches_dispatched_by_the_main_process_are_refused_on_every_rank(ranks, dataset, length):
    rows = dataset(token_rows(6, length))
    options = {} if dataset is Stream else {"accelerator_config": {"dispatch_batches": True}}
    with pytest.raises(RankError, match='"dispatch_batches": False') as caught:
        ranks.run(2, partial(train, **options), rows, 2)
    assert caught.value.kinds == dict.fromkeys(range(2), "ConfigurationError")


OPTIONS = {
    "the last batch dropped": {"dataloader_drop_last": True, "per_device_train_batch_size": 2},
    "rows grouped by length": {"train_sampling_strategy": "group_by_length"},
    "batches split": {
        "accelerator_config": {"split_batches": True},
        "per_device_train_batch_size": 2,
    },
    "no even batches": {"accelerator_config": {"even_batches": False}},
    "accumulation over an uneven epoch": {"gradient_accumulation_steps": 2},
}


def test_two_workers_a_rank_give_the_rows_of_one_process(ranks):
    rows = token_rows(6, 9)
    reference = one_process(rows)
    for run in ranks.run(2, partial(train, dataloader_num_workers=2), rows, 2):
        assert_same_run(run, reference)


@pytest.mark.parametrize(("world", "cp_size"), [(2, 2), (4, 2)])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_data_options_of_a_trainer_equal_the_same_run_without_stripes(
    ranks, name, world, cp_size
):
    if world == 4 and name == "no even batches":
        pytest.skip(
            "7 rows over two groups: DDP itself cannot take ranks with different step counts"
        )
    rows = token_rows(7, 9)
    options = {"max_steps": -1, "num_train_epochs": 2, **OPTIONS[name]}
    reference = ranks.run(world // cp_size, partial(train, striped=False, **options), rows, 1)[0]
    for run in ranks.run(world, partial(train, **options), rows, cp_size):
        assert_same_run(run, reference)
        assert (run["steps"], run["epoch"]) == (reference["steps"], reference["epoch"])


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


@pytest.mark.parametrize("stopped_after", [3, 5])
def test_a_data_parallel_run_resumed_inside_an_epoch_continues_as_the_uninterrupted_one(
    ranks, stopped_after, tmp_path
):
    """Two groups of two, ten rows in batches of one a group: five steps an epoch, rows shuffled."""
    rows = token_rows(10, 9)
    options = {"max_steps": -1, "num_train_epochs": 3}
    reference = ranks.run(2, partial(train, striped=False, **options), rows, 1)[0]
    save = {
        "output_dir": str(tmp_path),
        "save_strategy": "steps",
        "save_steps": stopped_after,
        "callbacks": [StopAt(stopped_after)],
    }
    ranks.run(4, partial(train, **options, **save), rows, 2)
    resume = {"resume": f"{tmp_path}/checkpoint-{stopped_after}", "output_dir": str(tmp_path)}
    for run in ranks.run(4, partial(train, **options, **resume), rows, 2):
        assert run["steps"] == reference["steps"] == 15
        assert run["losses"] == pytest.approx(reference["losses"], abs=1e-4)
        for name, weight in reference["weights"].items():
            torch.testing.assert_close(run["weights"][name], weight, atol=2e-5, rtol=0)


@pytest.mark.parametrize(("first", "then"), [(2, 2), (4, 2), (2, 1), (1, 4)])
def test_a_run_resumed_at_another_size_continues_as_the_uninterrupted_one(
    ranks, first, then, tmp_path
):
    rows = token_rows(8, 9)
    options = {
        "max_steps": -1,
        "num_train_epochs": 2,
        "optim": "adamw_torch",
        "learning_rate": 1e-3,
        "lr_scheduler_type": "linear",
    }
    save = {
        "output_dir": str(tmp_path),
        "save_strategy": "steps",
        "save_steps": 5,
        "callbacks": [StopAt(5)],
    }
    ranks.run(first, partial(train, **options, **save), rows, first)
    resume = {"resume": f"{tmp_path}/checkpoint-5", "output_dir": str(tmp_path)}
    reference = one_process(rows, **options)
    for run in ranks.run(then, partial(train, **options, **resume), rows, then):
        assert run["steps"] == reference["steps"] == 16
        for name, weight in reference["weights"].items():
            torch.testing.assert_close(run["weights"][name], weight, atol=2e-5, rtol=0)


def test_the_best_checkpoint_is_loaded_at_the_end_on_every_rank(ranks, tmp_path):
    rows = token_rows(4, 9)
    options = {
        "max_steps": 4,
        "learning_rate": 2.0,  # gets worse: the first checkpoint is the best
        "eval_rows": rows,
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "eval_steps": 1,
        "save_steps": 1,
        "load_best_model_at_end": True,
    }
    reference = one_process(rows, **options)
    options["output_dir"] = str(tmp_path)
    for run in ranks.run(2, partial(train, **options), rows, 2):
        assert run["eval_loss"] == pytest.approx(reference["eval_loss"], abs=1e-4)
        assert run["best"].endswith("checkpoint-1") == reference["best"].endswith("checkpoint-1")


class Generates(TrainerCallback):
    """Generates after each step, on one rank or on all, with the model that is training."""

    def __init__(self, on_all_ranks):
        self.on_all_ranks = on_all_ranks

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if self.on_all_ranks or state.is_world_process_zero:
            model.eval()
            tokens = torch.tensor([[5, 6, 7]])
            with torch.no_grad():
                found = model.generate(tokens, max_new_tokens=3, do_sample=False, pad_token_id=0)
                plain = tiny_llama("sdpa").eval()
                plain.load_state_dict(model.state_dict())
                expected = plain.generate(tokens, max_new_tokens=3, do_sample=False, pad_token_id=0)
            assert torch.equal(found, expected)
            model.train()


@pytest.mark.parametrize("on_all_ranks", [False, True])
def test_generating_in_a_callback_is_ordinary_and_hangs_nobody(ranks, on_all_ranks):
    rows = token_rows(4, 9)
    reference = one_process(rows)
    run = partial(train, callbacks=[Generates(on_all_ranks)])
    for result in ranks.run(2, run, rows, 2):
        assert_same_run(result, reference)


def pad_to_longest(features):
    longest = max(len(f["input_ids"]) for f in features)
    fills = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    features = [{**f, "attention_mask": [1] * len(f["input_ids"])} for f in features]
    return {
        key: torch.tensor([f[key] + [fill] * (longest - len(f[key])) for f in features])
        for key, fill in fills.items()
    }


@pytest.mark.parametrize(("counted", "expected"), [("all", 3 * 2 * 8), ("non_padding", 34)])
def test_tokens_seen_are_those_of_one_process(ranks, counted, expected):  # C26
    """Padding counts or not as asked; what fills a row up to a multiple of P is padding."""
    lengths = [8, 3, 5, 8, 2, 8]
    rows = [
        {key: value[:n] for key, value in row.items()}
        for row, n in zip(token_rows(6, 8), lengths, strict=True)
    ]
    rows[0]["input_ids"][2] = 0  # a real token that looks like padding
    options = {
        "include_num_input_tokens_seen": counted,
        "per_device_train_batch_size": 2,
        "train_sampling_strategy": "sequential",
        "collator": pad_to_longest,
    }
    reference = one_process(rows, **options)
    for cp_size in (1, 2, 4):
        for run in ranks.run(cp_size, partial(train, **options), rows, cp_size):
            assert run["tokens_seen"] == reference["tokens_seen"] == expected
