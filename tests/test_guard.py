"""A set-up with a piece missing is refused before the first step, with the line to add."""

from functools import partial

import pytest
from transformers import MixtralConfig, Trainer, TrainingArguments, default_data_collator

from hf_striped import ConfigurationError, StripedDataCollator, StripedParallelismConfig
from tests.models import tiny_llama, tiny_model, token_rows
from tests.ranks import RankError
from tests.training import assert_same_run, train


def sdpa_llama(attn_implementation):
    return tiny_llama("sdpa")


class ForgetsTheCollator(Trainer):
    def __init__(self, **kwargs):
        super().__init__(**{**kwargs, "data_collator": default_data_collator})


class ForgetsTheConfig(Trainer):
    def __init__(self, args, **kwargs):
        args.parallelism_config = None
        super().__init__(args=args, **kwargs)


class Generates(Trainer):
    def __init__(self, args, **kwargs):
        args.predict_with_generate = True
        super().__init__(args=args, **kwargs)


def test_generation_in_evaluation_is_refused_on_every_rank(ranks):
    with pytest.raises(RankError, match=r"predict_with_generate=True\. Leave it off") as caught:
        ranks.run(2, partial(train, trainer_class=Generates), token_rows(4, 8), 2)
    assert caught.value.kinds == dict.fromkeys(range(2), "UnsupportedFeatureError")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"model": sdpa_llama},
            r"attn_implementation='sdpa'.*attn_implementation=\"striped_ring\"",
        ),
        (
            {"trainer_class": ForgetsTheCollator},
            r"data_collator=StripedDataCollator\(your_collator\)",
        ),
        (
            {"trainer_class": ForgetsTheConfig},
            r"StripedParallelismConfig\(context_parallel_size=2\)",
        ),
    ],
)
def test_a_missing_piece_is_named_on_every_rank(ranks, options, message):
    with pytest.raises(RankError, match=message) as caught:
        ranks.run(2, partial(train, **options), token_rows(4, 8), 2)
    assert caught.value.kinds == dict.fromkeys(range(2), "ConfigurationError")


def balances_experts(attn_implementation):
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        output_router_logits=True,
    )
    return tiny_model(config, attn_implementation)


def test_a_loss_that_balances_experts_is_refused_on_every_rank(ranks):
    with pytest.raises(RankError, match="output_router_logits") as caught:
        ranks.run(2, partial(train, model=balances_experts), token_rows(4, 8), 2)
    assert caught.value.kinds == dict.fromkeys(range(2), "UnsupportedFeatureError")


@pytest.mark.parametrize("field", ["cp_size", "sp_size", "tp_size"])
def test_accelerates_own_splits_of_a_sequence_are_refused(field):
    with pytest.raises(ConfigurationError, match=f"received {field}=2"):
        StripedParallelismConfig(2, **{field: 2})


def two_trainers(rank, world, sizes, folder):
    """The arguments of two Trainers, then the Trainers: Accelerate keeps the first config."""
    both = [
        TrainingArguments(folder, use_cpu=True, parallelism_config=StripedParallelismConfig(size))
        for size in sizes
    ]
    for arguments in both:
        Trainer(tiny_llama(), arguments, data_collator=StripedDataCollator())


def test_two_sizes_in_one_process_are_refused(ranks, tmp_path):
    message = "context_parallel_size=4, and 2 is active"
    with pytest.raises(RankError, match=message) as caught:
        ranks.run(4, two_trainers, (2, 4), str(tmp_path))
    assert caught.value.kinds == dict.fromkeys(range(4), "ConfigurationError")
    ranks.run(4, two_trainers, (2, 2), str(tmp_path))


def plain_run(rank, world, after_a_striped_one):
    if after_a_striped_one:
        train(rank, world, token_rows(4, 8), 2)
    return train(rank, world, token_rows(4, 8), 1, striped=False)


def test_a_plain_model_in_the_same_process_trains_as_ever(ranks):
    reference = ranks.run(2, plain_run, False)
    for run, expected in zip(ranks.run(2, plain_run, True), reference, strict=True):
        assert_same_run(run, expected)
