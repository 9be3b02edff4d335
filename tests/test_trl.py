"""TRL over stripes: SFTTrainer trains to the numbers of one process, the other trainers are refused."""

import tempfile
from functools import partial

import pytest
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaForSequenceClassification, PreTrainedTokenizerFast

from hf_striped import StripedDataCollator, StripedParallelismConfig
from tests.models import tiny_llama, token_rows
from tests.ranks import RankError


def word_tokenizer():
    """A tokenizer of the tiny model's vocabulary, which TRL's trainers ask for."""
    words = {f"w{i}": i for i in range(63)} | {"[UNK]": 63}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", eos_token="w1")


COMMON = {
    "use_cpu": True,
    "max_steps": 2,
    "per_device_train_batch_size": 2,
    "logging_steps": 1,
    "learning_rate": 1e-2,
    "optim": "sgd",
    "report_to": [],
    "disable_tqdm": True,
    "save_strategy": "no",
    "bf16": False,
    "gradient_checkpointing": False,
}


def sft(rank, world, rows, striped, padding_free=True, evaluate=False, **changes):
    from trl import SFTConfig, SFTTrainer
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    collator = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=padding_free)
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            **{**COMMON, **changes},
            output_dir=folder,
            dataset_kwargs={"skip_prepare_dataset": True},
            parallelism_config=StripedParallelismConfig(world) if striped else None,
        )
        trainer = SFTTrainer(
            model=tiny_llama("striped_ring" if striped else "sdpa"),
            args=arguments,
            train_dataset=Dataset.from_list(rows),
            eval_dataset=Dataset.from_list(rows),
            data_collator=StripedDataCollator(collator) if striped else collator,
            processing_class=word_tokenizer(),
        )
        if evaluate:
            return trainer.evaluate()
        trainer.train()
        names = ("loss", "grad_norm", "num_tokens", "mean_token_accuracy", "entropy")
        entries = [entry for entry in trainer.state.log_history if "loss" in entry]
        return [{name: float(entry[name]) for name in names} for entry in entries]


def uneven_rows():
    rows = token_rows(6, 14)
    lengths = [14, 5, 9, 14, 3, 8]
    return [{"input_ids": row["input_ids"][:n]} for row, n in zip(rows, lengths, strict=True)]


@pytest.mark.parametrize("padding_free", [True, False])
@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_sft_steps_and_metrics_equal_one_process(ranks, padding_free, loss_type):  # C11 C26
    run = partial(sft, padding_free=padding_free, loss_type=loss_type)
    (reference,) = ranks.run(1, run, uneven_rows(), False)
    for entries in ranks.run(2, run, uneven_rows(), True):
        for entry, expected in zip(entries, reference, strict=True):
            if not padding_free:  # TRL counts what attention_mask says, stripes count padding too
                entry["num_tokens"] = expected["num_tokens"]
            assert entry == pytest.approx(expected, abs=1e-4, rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"evaluate": True}, "averages each rank's stripe by itself"),
        ({"average_tokens_across_devices": False}, "average_tokens_across_devices=False"),
        ({"label_smoothing_factor": 0.1}, r"label_smoothing_factor=0\.1"),
    ],
)
def test_what_sft_would_get_wrong_on_stripes_is_refused_on_every_rank(ranks, changes, message):
    with pytest.raises(RankError, match=message) as caught:
        ranks.run(2, partial(sft, **changes), uneven_rows(), True)
    assert caught.value.kinds == dict.fromkeys(range(2), "UnsupportedFeatureError")


def build_other(rank, world, name):
    import trl

    rows = {
        "DPO": {"prompt": "w3 w4", "chosen": "w5 w6", "rejected": "w7"},
        "Reward": {"chosen": "w5 w6", "rejected": "w7"},
        "GRPO": {"prompt": "w3 w4"},
        "RLOO": {"prompt": "w3 w4"},
    }
    generates = name in ("GRPO", "RLOO")
    rewards = {"reward_funcs": lambda completions, **_: [0.0] * len(completions)}
    model = tiny_llama("striped_ring")
    if name == "Reward":
        model.config.num_labels = 1
        model = LlamaForSequenceClassification(model.config)
    with tempfile.TemporaryDirectory() as folder:
        arguments = getattr(trl, f"{name}Config")(
            **COMMON,
            **({"num_generations": 2} if generates else {}),
            output_dir=folder,
            parallelism_config=StripedParallelismConfig(world),
        )
        getattr(trl, f"{name}Trainer")(
            model=model,
            args=arguments,
            train_dataset=Dataset.from_list([rows[name]] * 4),
            processing_class=word_tokenizer(),
            **(rewards if generates else {}),
        )


@pytest.mark.parametrize("name", ["DPO", "Reward", "GRPO", "RLOO"])
def test_the_other_trainers_are_refused_when_they_are_built(ranks, name):  # C24
    with pytest.raises(
        RankError, match=rf"supports the SFTTrainer.*received {name}Config"
    ) as caught:
        ranks.run(2, build_other, name)
    assert caught.value.kinds == dict.fromkeys(range(2), "UnsupportedFeatureError")
