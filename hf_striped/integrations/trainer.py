"""What a plain Trainer needs beyond the collator: a loss that holds over a context-parallel group.

Two hooks on the model, put there by a default callback, patch no method of any library:
- a count of supervised tokens that is this rank's own (average_tokens_across_devices=False) becomes
  the mean over the group, so that the mean of the ranks' losses is the group's;
- in evaluation the Trainer gathers one loss a rank and row, and cuts the last batch's to the rows that
  remain: every rank of a group reports the group's loss, and the rows are counted once a rank.
"""

from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import DataLoaderShard
from accelerate.state import GradientState
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer import DEFAULT_CALLBACKS

from hf_striped.context import ContextParallel
from hf_striped.errors import UnsupportedFeatureError
from hf_striped.integrations.accelerate import active_context
from hf_striped.integrations.guard import (
    check_arguments,
    check_collator,
    is_striped,
    refuse_outside_loss,
)
from hf_striped.integrations.model import prepare_model
from hf_striped.integrations.predictions import withhold_logits
from hf_striped.integrations.transformers import CU_SEQLENS_KEY


class StripedTrainerCallback(TrainerCallback):
    """Checks the set-up of every Trainer of the process, and attaches the loss hooks to its model."""

    def on_init_end(self, args, state, control, model=None, **kwargs: Any) -> None:
        if model is not None:
            check_arguments(args, model)
            _prepare(model)

    def on_train_begin(
        self, args, state, control, model=None, train_dataloader=None, **kwargs: Any
    ) -> None:
        check_collator(args, model, getattr(train_dataloader, "collate_fn", None))
        _prepare(model)  # `model_init` makes a new model for each run


def _prepare(model: torch.nn.Module) -> None:
    if active_context() is not None and is_striped(model):
        prepare_model(model)
        attach_loss_hooks(model)


def attach_loss_hooks(model: torch.nn.Module) -> None:
    """Put the hooks on `model`, once."""
    if share_token_count not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(share_token_count, with_kwargs=True)
        model.register_forward_hook(share_loss, with_kwargs=True)


def share_token_count(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]):
    """Before a striped forward pass: `num_items_in_batch` becomes the mean over the group."""
    cp = active_context()
    if cp is None or CU_SEQLENS_KEY not in kwargs:
        return None
    if kwargs.get("shift_labels") is not None and kwargs.get("labels") is None:
        refuse_outside_loss("a batch whose labels were taken out before the model was called")
    count = kwargs.get("num_items_in_batch")
    if count is None:
        return None
    device = kwargs[CU_SEQLENS_KEY].device
    count = torch.as_tensor(count, dtype=torch.float64, device=device)
    return args, {**kwargs, "num_items_in_batch": _group_sum(cp, count) / cp.size}


def share_loss(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any], output: Any):
    """After a striped forward pass: a loss whose mean over the ranks is the group's loss.

    Without `num_items_in_batch` the model returns the mean over its own stripe, which is weighted by
    the stripe's share of supervised tokens. In evaluation the mean itself is returned, on every rank.
    """
    cp = active_context()
    labels = kwargs.get("labels")
    if cp is None or CU_SEQLENS_KEY not in kwargs:
        return None
    if labels is None:
        return None if module.training else withhold_logits(output)
    loss = output["loss"] if isinstance(output, dict) else output[0]
    if kwargs.get("num_items_in_batch") is None:
        local = (labels != -100).sum()
        share = local / _group_sum(cp, local)
        loss = torch.where(local > 0, loss, torch.zeros_like(loss)) * share * cp.size
    if not hasattr(kwargs[CU_SEQLENS_KEY], "reached_attention"):
        raise UnsupportedFeatureError(
            f"{type(module).__name__} does not hand keyword arguments to its attention, so that "
            f"{CU_SEQLENS_KEY} never reached it. Use another model."
        )
    if getattr(output, "aux_loss", None) is not None:
        raise UnsupportedFeatureError(
            "On stripes a router's auxiliary loss would be that of each stripe; received one from "
            f"{type(module).__name__}. Set output_router_logits=False in the model's config: "
            "docs/explanation/loss.md."
        )
    if not module.training:
        if isinstance(output, dict) and "log_probs" in output:
            raise UnsupportedFeatureError(
                "SFTTrainer's evaluation averages each rank's stripe by itself, which is not the mean over the "
                "tokens; received an evaluation batch with TRL's fused loss. Evaluate with a plain Trainer, or "
                'set eval_strategy="no".'
            )
        loss = _group_sum(cp, loss.detach()) / cp.size
        _count_remaining_rows_on_each_rank(cp)
    if isinstance(output, dict):
        output["loss"] = loss
    else:
        output = (loss, *output[1:])
    return output if module.training else withhold_logits(output)


def _count_remaining_rows_on_each_rank(cp: ContextParallel) -> None:
    """In the last batch, of which Accelerate keeps `remainder` gathered rows: keep them of every rank."""
    loader = GradientState().active_dataloader
    if isinstance(loader, DataLoaderShard) and loader.end_of_dataloader and loader.remainder > 0:
        loader.remainder = loader.total_dataset_length % loader.total_batch_size * cp.size


def _group_sum(cp: ContextParallel, value: Tensor) -> Tensor:
    total = value.clone()
    dist.all_reduce(total, group=cp.group)
    return total


class StripedTrainerMixin:
    """For a Trainer class: reports that a plain Trainer gets wrong by a factor of the group's size.

    Put it before the Trainer class: `class MyTrainer(StripedTrainerMixin, SFTTrainer)`.
    """

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Rows an optimizer step takes: a group's ranks share theirs."""
        cp = active_context()
        return super().get_total_train_batch_size(args) // (cp.size if cp is not None else 1)


class StripedTrainer(StripedTrainerMixin, Trainer):
    """A Trainer whose total batch size and samples a second count rows, not ranks."""


def register() -> None:
    """Let every Trainer of this process have the callback."""
    if StripedTrainerCallback not in DEFAULT_CALLBACKS:
        DEFAULT_CALLBACKS.append(StripedTrainerCallback)
