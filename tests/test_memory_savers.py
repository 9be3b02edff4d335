"""Loss tiles and kept attention change memory and time, not numbers."""

from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, Trainer

from hf_striped import StripedTrainer
from tests.fsdp import FSDP2, train_fsdp2
from tests.models import VOCABULARY, tiny_llama, tiny_model, token_rows
from tests.ranks import RankError
from tests.test_evaluation import evaluate, uneven_rows
from tests.test_trainer_life import lora_llama, one_process
from tests.training import assert_same_run, train

SIZE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}


def of_type(attn_implementation, name):
    """Models that change hidden states or logits between backbone and loss."""
    changes = {
        "gemma2": {"final_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
        "granite": {"logits_scaling": 3.0},
        "cohere": {"logit_scale": 0.25},
        "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    }
    config = AutoConfig.for_model(name, **SIZE, **changes[name])
    # sdpa has no softcap
    eager = attn_implementation == "sdpa" and name == "gemma2"
    return tiny_model(config, "eager" if eager else attn_implementation)


@pytest.mark.parametrize("tile_size", [1, 5, 100])
@pytest.mark.parametrize("average", [True, False])
def test_a_loss_in_tiles_is_the_loss(ranks, tile_size, average):
    rows = token_rows(12, 9)
    options = {
        "gradient_accumulation_steps": 2,
        "average_tokens_across_devices": average,
        "eval_rows": rows[:3],
    }
    reference = one_process(rows, **options)
    tiled = {"config": {"loss_tile_size": tile_size}, "per_device_train_batch_size": 1}
    for world in (1, 2):
        for run in ranks.run(world, partial(train, **options, **tiled), rows, world):
            assert_same_run(run, reference)
            assert run["eval_loss"] == pytest.approx(reference["eval_loss"], abs=1e-4)


@pytest.mark.parametrize("name", ["gemma2", "granite", "cohere", "qwen3_moe"])
def test_tiles_keep_what_a_model_does_to_its_logits(ranks, name):
    rows = token_rows(6, 9)
    options = {"model": partial(of_type, name=name)}
    reference = one_process(rows, **options)
    for run in ranks.run(2, partial(train, config={"loss_tile_size": 3}, **options), rows, 2):
        assert_same_run(run, reference)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_tiles_and_kept_attention_hold_under_lora(ranks, checkpointing):
    rows = token_rows(6, 13)
    options = {
        "model": partial(lora_llama, modules=["q_proj"]),
        "gradient_checkpointing": checkpointing,
    }
    reference = one_process(rows, **options)
    config = {"loss_tile_size": 4, "keep_attention": True}
    for run in ranks.run(2, partial(train, config=config, **options), rows, 2):
        assert_same_run(run, reference)


def test_a_striped_trainer_still_predicts_with_tiles(ranks):
    plain = partial(evaluate, striped=False, trainer_class=Trainer)
    (reference,) = ranks.run(1, plain, uneven_rows(), 1)
    run = partial(evaluate, trainer_class=StripedTrainer, config={"loss_tile_size": 4})
    for found in ranks.run(2, run, uneven_rows(), 2):
        assert found["metrics"] == pytest.approx(reference["metrics"], abs=1e-4)


class Seen(TorchDispatchMode):
    """The largest floating-point tensor that any operator returns, and how often the ring ran."""

    def __init__(self):
        super().__init__()
        self.largest, self.rings = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.rings += function is torch.ops.hf_striped.ring_attention.default
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                self.largest = max(self.largest, tensor.numel())
        return result


class WatchedTrainer(Trainer):
    def training_step(self, *args, **kwargs):
        with Seen() as seen:
            loss = super().training_step(*args, **kwargs)
        self.state.num_input_tokens_seen = (seen.largest, seen.rings)
        return loss


def test_no_more_than_a_tile_of_logits_exists(ranks):
    rows = token_rows(3, 200)
    logits, weight = 100 * 512, 512 * 32  # of a stripe; of the head, which is larger than all else
    for tile_size, largest in ((None, logits), (8, weight)):
        config = {"loss_tile_size": tile_size}
        run = partial(train, trainer_class=WatchedTrainer, model=wide_vocabulary, config=config)
        assert [r["tokens_seen"][0] for r in ranks.run(2, run, rows, 2)] == [largest] * 2


def wide_vocabulary(attn_implementation):
    return tiny_llama(attn_implementation, vocab_size=512)


@pytest.mark.parametrize(("kept", "rings"), [(False, 4), (True, 2)])
def test_a_kept_ring_runs_forward_once(ranks, kept, rings):
    rows = token_rows(6, 13)
    reference = one_process(rows)
    options = {
        "gradient_checkpointing": True,
        "trainer_class": WatchedTrainer,
        "config": {"keep_attention": kept},
    }
    for run in ranks.run(2, partial(train, **options), rows, 2):
        assert_same_run(run, reference)
        assert run["tokens_seen"][1] == rings  # of two layers


def test_kept_attention_needs_checkpointing_that_is_not_reentrant(ranks):
    options = {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
        "config": {"keep_attention": True},
    }
    with pytest.raises(RankError, match='"use_reentrant": False') as caught:
        ranks.run(2, partial(train, **options), token_rows(4, 8), 2)
    assert caught.value.kinds == dict.fromkeys(range(2), "ConfigurationError")


@pytest.mark.parametrize("checkpointing", [False, True])
def test_both_hold_under_fsdp2(ranks, checkpointing):
    rows = token_rows(6, 13)
    config = {"loss_tile_size": 4, "keep_attention": True}
    reference = ranks.run(2, partial(train, striped=False), rows, 1)[0]
    options = {"config": config, "gradient_checkpointing": checkpointing}
    for run in ranks.run(4, partial(train_fsdp2, **options), rows, 2):
        assert_same_run(run, reference)


def test_label_smoothing_holds_in_tiles_which_are_recomputed_after_the_loss(ranks):
    rows = token_rows(6, 13)
    options = {"label_smoothing_factor": 0.3, "trainer_class": StripedTrainer}
    reference = one_process(rows, **options)
    for run in ranks.run(2, partial(train, config={"loss_tile_size": 4}, **options), rows, 2):
        assert_same_run(run, reference)


def test_checkpointing_by_fsdp_itself_is_refused_where_attention_is_to_be_kept(ranks):
    options = {
        "config": {"keep_attention": True},
        "fsdp_config": {**FSDP2["fsdp_config"], "activation_checkpointing": True},
    }
    with pytest.raises(
        RankError, match=r"TrainingArguments\(activation_checkpointing=True\)"
    ) as caught:
        ranks.run(2, partial(train_fsdp2, **options), token_rows(4, 8), 2)
    assert caught.value.kinds == dict.fromkeys(range(2), "ConfigurationError")
