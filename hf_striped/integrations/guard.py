"""Checks of a whole set-up, made when a Trainer is built and when it starts to train.

Each message names the missing piece and the line to add. None patches the Trainer: they see what a
callback is given.
"""

from typing import Any

from torch import nn
from transformers import TrainingArguments

from hf_striped.errors import ConfigurationError, UnsupportedFeatureError
from hf_striped.integrations.accelerate import (
    StripedParallelismConfig,
    active_config,
    active_context,
)
from hf_striped.integrations.collator import StripedDataCollator
from hf_striped.integrations.transformers import ATTENTION_NAME


def check_arguments(args: TrainingArguments, model: nn.Module) -> None:
    """When a Trainer is built: the parallelism config has effect, and the model and the loss fit it."""
    asked = getattr(args, "parallelism_config", None)
    if isinstance(asked, StripedParallelismConfig):
        _check_effect(asked)
        if asked.striped and not is_striped(model):
            raise ConfigurationError(
                "A model trained with StripedParallelismConfig must have striped attention; received "
                f"{type(model).__name__} with attn_implementation={_attention_of(model)!r}, which would see "
                f'its stripe alone. Load it with attn_implementation="{ATTENTION_NAME}".'
            )
    if active_context() is not None and is_striped(model):
        if args.label_smoothing_factor:
            refuse_outside_loss(f"label_smoothing_factor={args.label_smoothing_factor}")
        _check_trl(args)


def check_collator(args: TrainingArguments, model: nn.Module, collate_fn: Any) -> None:
    """When training starts: the collator stripes exactly if there is a group to stripe over."""
    collator = getattr(collate_fn, "data_collator", collate_fn)  # the Trainer may have wrapped it
    stripes = isinstance(collator, StripedDataCollator)
    if is_striped(model) and active_context() is not None and not stripes:
        raise ConfigurationError(
            "With context parallelism each rank must collate its own stripe; received the collator "
            f"{type(collator).__name__}. Pass data_collator=StripedDataCollator(your_collator) to the Trainer."
        )
    if (
        stripes
        and args.world_size > 1
        and not isinstance(active_config(), StripedParallelismConfig)
    ):
        raise ConfigurationError(
            f"StripedDataCollator has no group to stripe over, and {args.world_size} processes would each take "
            "whole sequences. Add parallelism_config=StripedParallelismConfig(context_parallel_size="
            f"{args.world_size}) to TrainingArguments (a size of 1 says that whole sequences are meant)."
        )


def is_striped(model: nn.Module) -> bool:
    return _attention_of(model) == ATTENTION_NAME


def refuse_outside_loss(received: str) -> None:
    raise UnsupportedFeatureError(
        "On stripes the loss must be the model's own: label smoothing and compute_loss_func would shift the "
        f"stripe's labels once more; received {received}. Leave label_smoothing_factor at 0 and "
        "compute_loss_func unset."
    )


def _attention_of(model: nn.Module) -> str | None:
    return getattr(getattr(model, "config", None), "_attn_implementation", None)


def _check_effect(asked: StripedParallelismConfig) -> None:
    """Accelerate keeps the first config of a process: a later one may be without effect."""
    active = active_config()
    size = getattr(active, "context_parallel_size", 1)
    if size != asked.context_parallel_size:
        raise ConfigurationError(
            "A process has one context-parallel size, that of its first Accelerator; received "
            f"context_parallel_size={asked.context_parallel_size}, and {size} is active"
            f"{'' if active is not None else ' (an Accelerator was created before, without a config)'}. Give "
            "the same StripedParallelismConfig to the first Trainer or Accelerator of the process."
        )


def _check_trl(args: TrainingArguments) -> None:
    """TRL's trainers compute their losses themselves, from the log-probabilities of a stripe."""
    names = [cls.__name__ for cls in type(args).__mro__ if cls.__module__.startswith("trl.")]
    if names and "SFTConfig" not in names:
        raise UnsupportedFeatureError(
            "Of TRL's trainers striped attention supports the SFTTrainer; the others add up log-probabilities "
            f"over whole sequences, or generate, which a stripe cannot; received {names[0]}. "
            "Train without context parallelism, or by SFTTrainer."
        )
    if names and not args.average_tokens_across_devices:
        raise UnsupportedFeatureError(
            "SFTTrainer divides by the tokens of each rank when average_tokens_across_devices is off, which "
            "on stripes is no data-parallel mean; received average_tokens_across_devices=False. Leave it on."
        )
