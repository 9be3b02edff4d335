"""Checks of a whole set-up, made when a Trainer is built and when it starts to train.

Each message names the missing piece and the line to add. None patches the Trainer: they see it, and
what a callback is given.
"""

from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import torch.distributed as dist
from accelerate.state import AcceleratorState
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import has_length

from hf_striped.context import ContextParallel
from hf_striped.errors import ConfigurationError, UnsupportedFeatureError
from hf_striped.integrations.accelerate import StripedParallelismConfig
from hf_striped.integrations.active import active_config, active_context
from hf_striped.integrations.collator import StripedDataCollator
from hf_striped.integrations.loss_hooks import refuse_outside_loss
from hf_striped.integrations.trainer import StripedTrainerMixin
from hf_striped.integrations.transformers import ATTENTION_NAME

# names in a `compute_loss` of one's own: on stripes they are not what they are in one process
_OF_A_STRIPE = {"logits", "labels", "shift_labels", "input_ids", "attention_mask", "position_ids"}


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
        _check_trl(args)
        _check_switches(args)
        _check_fsdp()


def check_collator(args: TrainingArguments, model: nn.Module, collate_fn: Any) -> Any:
    """When training starts: the collator, which stripes exactly if there is a group to stripe over."""
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
    return collator


def is_striped(model: nn.Module) -> bool:
    return _attention_of(model) == ATTENTION_NAME


def check_loss(args: TrainingArguments, trainer: Trainer | None) -> None:
    """When a Trainer is built: the loss is the model's own, or one that `StripedTrainerMixin` makes."""
    smooths = isinstance(trainer, StripedTrainerMixin) and not _trl_config_names(args)
    if args.label_smoothing_factor and not smooths:
        refuse_outside_loss(f"label_smoothing_factor={args.label_smoothing_factor}")
    if (function := getattr(trainer, "compute_loss_func", None)) is not None:
        refuse_outside_loss(f"compute_loss_func={getattr(function, '__name__', function)}")
    method = own_loss(trainer)
    if method is None:
        return
    names = set(_names(method.__code__))
    if read := sorted(names & _OF_A_STRIPE):
        refuse_outside_loss(f"{method.__qualname__}, which reads {', '.join(read)}")
    if (
        "num_items_in_batch" in {*names, *method.__code__.co_varnames}
        and "compute_loss" not in names
    ):
        refuse_outside_loss(
            f"{method.__qualname__}, which takes num_items_in_batch and does not call super().compute_loss"
        )


def check_same_length(cp: ContextParallel, loader: Any) -> None:
    """When training starts: the ranks of a group have as many batches each; every rank calls it."""
    length = len(loader) if has_length(loader) else -1
    lengths: list[Any] = [None] * cp.size
    dist.all_gather_object(lengths, length, group=cp.group)
    if len(set(lengths)) > 1:
        raise ConfigurationError(
            "The ranks of a context-parallel group must have the same batches; received data loaders of "
            f"{lengths} batches. Give every rank the whole dataset: the data loader shares rows out."
        )


def check_predictions(trainer: Trainer | None) -> None:
    """When a Trainer is built: one that is to show predictions makes their rows whole."""
    asked = [
        name
        for name in ("compute_metrics", "preprocess_logits_for_metrics")
        if getattr(trainer, name, None) is not None
    ]
    if asked and not isinstance(trainer, StripedTrainerMixin):
        raise UnsupportedFeatureError(
            "A plain Trainer would show its metrics the logits and labels of stripes; received "
            f"{' and '.join(asked)} for a {type(trainer).__name__}. Use hf_striped.StripedTrainer, or put "
            "hf_striped.StripedTrainerMixin before your Trainer class."
        )


def own_loss(trainer: Trainer | None) -> FunctionType | None:
    """The `compute_loss` of a user's Trainer class, if it has one."""
    for cls in type(trainer).__mro__:
        if cls.__module__.split(".")[0] in ("transformers", "trl", "hf_striped"):
            continue
        if isinstance(method := vars(cls).get("compute_loss"), FunctionType):
            return method
    return None


def _names(code: CodeType) -> Iterator[str]:
    """All names and texts of a function's code, of the functions inside it too."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
        elif isinstance(constant, str):
            yield constant


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


def _trl_config_names(args: TrainingArguments) -> list[str]:
    return [cls.__name__ for cls in type(args).__mro__ if cls.__module__.startswith("trl.")]


def _check_trl(args: TrainingArguments) -> None:
    """TRL's trainers compute their losses themselves, from the log-probabilities of a stripe."""
    names = _trl_config_names(args)
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


def _check_switches(args: TrainingArguments) -> None:
    """Arguments that do something to batches or models which a stripe would get wrong."""
    refused = {
        "use_liger_kernel": "Liger's kernels replace the model's loss, and have not been checked over stripes",
        "neftune_noise_alpha": "NEFTune scales its noise by the length of what it sees, which is a stripe's",
        "predict_with_generate": "Generation takes whole rows, and a striped evaluation batch has none",
    }
    for name, reason in refused.items():
        if getattr(args, name, None):
            raise UnsupportedFeatureError(
                f"{reason}; received {name}={getattr(args, name)}. Leave it off."
            )


def _check_fsdp() -> None:
    """FSDP's own checkpointing wraps layers by itself, and would recompute what was to be kept."""
    plugin = AcceleratorState._shared_state.get("fsdp_plugin")
    recomputes = getattr(plugin, "activation_checkpointing", False)
    if recomputes and getattr(active_config(), "keep_attention", False):
        raise ConfigurationError(
            "FSDP's own activation checkpointing takes no policy, so it would run the ring again; received "
            "keep_attention=True and an FSDP config with activation_checkpointing. Take it out of the FSDP "
            "config and pass TrainingArguments(activation_checkpointing=True)."
        )
