"""TRL over stripes: SFTTrainer trains to the numbers of one process, the other trainers are refused."""

import tempfile
from functools import partial

import pytest
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaForSequenceClassification, PreTrainedTokenizerFast

from hf_striped import StripedDataCollator, StripedParallelismConfig, StripedTrainerMixin
from tests.models import tiny_llama, token_rows
from tests.ranks import RankError


def word_tokenizer():
    """A tokenizer of the tiny model's vocabulary, which TRL's trainers ask for."""
    words = {f"w{i}": i for i in range(63)} | {"[UNK]": 63}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", eos_token="w1")
    fast.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}w2 {% generation %}"
        "{{ m.content }} w1{% endgeneration %}{% else %}w3 {{ m.content }} {% endif %}{% endfor %}"
    )
    return fast


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


def sft(rank, world, rows, striped, evaluate=False, metrics=None, mixed_in=False, **changes):
    from trl import SFTConfig, SFTTrainer

    class Mixed(StripedTrainerMixin, SFTTrainer):
        pass

    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            **{**COMMON, **changes},
            output_dir=folder,
            parallelism_config=StripedParallelismConfig(world) if striped else None,
        )
        trainer = (Mixed if mixed_in else SFTTrainer)(
            model=tiny_llama("striped_ring" if striped else "sdpa"),
            args=arguments,
            train_dataset=Dataset.from_list(rows),
            eval_dataset=Dataset.from_list(rows),
            processing_class=word_tokenizer(),
            compute_metrics=metrics,
        )
        if striped:
            trainer.data_collator = StripedDataCollator(trainer.data_collator)
        if evaluate:
            return [trainer.evaluate()]
        trainer.train()
        return [entry for entry in trainer.state.log_history if "loss" in entry]


def uneven_rows():
    rows = token_rows(6, 14)
    lengths = [14, 5, 9, 14, 3, 8]
    return [{"input_ids": row["input_ids"][:n]} for row, n in zip(rows, lengths, strict=True)]


def texts():
    """Documents of 3 to 14 words, of which none fills a multiple of the group's size."""
    return [{"text": " ".join(f"w{i}" for i in row["input_ids"])} for row in uneven_rows()]


def prompts():
    """Prompts with completions."""
    words = [text["text"].split() for text in texts()]
    return [{"prompt": " ".join(w[:2]), "completion": " ".join(w[2:])} for w in words]


def conversations():
    """Two turns, of which only the assistant's are learned."""
    return [
        {
            "messages": [
                {"role": "user", "content": p["prompt"]},
                {"role": "assistant", "content": p["completion"]},
            ]
        }
        for p in prompts()
    ]


def tokens():
    return [{"input_ids": row["input_ids"]} for row in uneven_rows()]


SFT = {
    "padded rows": (tokens, {}),
    "padding-free": (tokens, {"padding_free": True, "max_length": None}),
    "dft": (tokens, {"loss_type": "dft"}),
    "packed by best fit": (texts, {"packing": True, "max_length": 20}),
    "packed by best fit, long documents split": (
        texts,
        {"packing": True, "packing_strategy": "bfd_split", "max_length": 9},
    ),
    "packed in a stream": (
        texts,
        {"packing": True, "packing_strategy": "wrapped", "max_length": 9},
    ),
    "completions only": (prompts, {}),
    "completions only, packed": (prompts, {"packing": True, "max_length": 20}),
    "assistant only": (conversations, {"assistant_only_loss": True}),
}
REPORTED = ("loss", "grad_norm", "num_tokens", "mean_token_accuracy", "entropy")


@pytest.mark.parametrize("name", SFT)
def test_sft_steps_metrics_and_counts_equal_one_process(ranks, name):  # C11 C26
    make_rows, options = SFT[name]
    run = partial(sft, **options)
    (reference,) = ranks.run(1, run, make_rows(), False)
    assert len(reference) == 2
    for entries in ranks.run(2, run, make_rows(), True):
        for entry, expected in zip(entries, reference, strict=True):
            for key in REPORTED:
                assert float(entry[key]) == pytest.approx(float(expected[key]), rel=1e-4), key


@pytest.mark.parametrize("name", ["padded rows", "packed by best fit", "completions only"])
def test_sft_evaluation_equals_one_process(ranks, name):
    make_rows, options = SFT[name]
    run = partial(sft, evaluate=True, per_device_eval_batch_size=4, **options)
    (reference,) = ranks.run(1, run, make_rows(), False)
    for found in ranks.run(2, run, make_rows(), True):
        for key in ("eval_loss", "eval_mean_token_accuracy", "eval_entropy"):
            assert found[0][key] == pytest.approx(reference[0][key], rel=1e-4), key


def accuracy(prediction):
    predicted, labels = prediction.predictions.argmax(-1)[:, :-1], prediction.label_ids[:, 1:]
    return {"accuracy": (predicted == labels)[labels != -100].mean(), "rows": len(labels)}


def test_metrics_of_an_sft_trainer_with_the_mixin_equal_one_process(ranks):
    run = partial(sft, evaluate=True, metrics=accuracy, per_device_eval_batch_size=4)
    (reference,) = ranks.run(1, run, tokens(), False)
    for found in ranks.run(2, partial(run, mixed_in=True), tokens(), True):
        for key in ("eval_loss", "eval_accuracy", "eval_rows"):
            assert found[0][key] == pytest.approx(reference[0][key], rel=1e-4), key


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"average_tokens_across_devices": False}, "average_tokens_across_devices=False"),
        ({"label_smoothing_factor": 0.1}, r"label_smoothing_factor=0\.1"),
    ],
)
def test_what_sft_would_get_wrong_on_stripes_is_refused_on_every_rank(ranks, changes, message):
    with pytest.raises(RankError, match=message) as caught:
        ranks.run(2, partial(sft, **changes), tokens(), True)
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
