"""What a plain Trainer needs beyond the collator: loss and counts that hold over a context-parallel group.

Two hooks on the model, put there by a default callback, patch no method of any library:
- the Trainer divides its count of supervised tokens by the number of ranks that hold the same rows,
  as if each held them whole; over stripes the ranks' counts add up to the right one;
- in evaluation every rank of a group must report the group's loss, or the last uneven batch is
  weighted wrongly when the Trainer gathers one loss a rank.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import TrainerCallback
from transformers.trainer import DEFAULT_CALLBACKS

from hf_striped.context import ContextParallel
from hf_striped.integrations.accelerate import active_context
from hf_striped.integrations.transformers import CU_SEQLENS_KEY


class StripedTrainerCallback(TrainerCallback):
    """Attaches the loss hooks to the model of every Trainer built while a group is active."""

    def on_init_end(self, args, state, control, model=None, **kwargs: Any) -> None:
        if model is None or active_context() is None:
            return
        if share_token_count not in model._forward_pre_hooks.values():
            model.register_forward_pre_hook(share_token_count, with_kwargs=True)
            model.register_forward_hook(share_loss, with_kwargs=True)


def share_token_count(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]):
    """Before a striped forward pass: `num_items_in_batch` becomes the sum over the group."""
    cp = active_context()
    count = kwargs.get("num_items_in_batch")
    if cp is None or count is None or CU_SEQLENS_KEY not in kwargs:
        return None
    device = kwargs[CU_SEQLENS_KEY].device
    count = torch.as_tensor(count, dtype=torch.float64, device=device)
    return args, {**kwargs, "num_items_in_batch": _group_sum(cp, count)}


def share_loss(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any], output: Any):
    """After a striped forward pass: a loss whose mean over the ranks is the group's loss.

    Without `num_items_in_batch` the model returns the mean over its own stripe, which is weighted by
    the stripe's share of supervised tokens. In evaluation the mean itself is returned, on every rank.
    """
    cp = active_context()
    labels = kwargs.get("shift_labels", kwargs.get("labels"))
    if cp is None or labels is None or CU_SEQLENS_KEY not in kwargs:
        return None
    loss = output["loss"] if isinstance(output, dict) else output[0]
    if kwargs.get("num_items_in_batch") is None:
        local = (labels != -100).sum()
        share = local / _group_sum(cp, local)
        loss = torch.where(local > 0, loss, torch.zeros_like(loss)) * share * cp.size
    if not module.training:
        loss = _group_sum(cp, loss.detach()) / cp.size
    if not isinstance(output, dict):
        return (loss, *output[1:])
    output["loss"] = loss
    return output


def _group_sum(cp: ContextParallel, value: Tensor) -> Tensor:
    total = value.clone()
    dist.all_reduce(total, group=cp.group)
    return total


def register() -> None:
    """Let every Trainer of this process have the callback."""
    if StripedTrainerCallback not in DEFAULT_CALLBACKS:
        DEFAULT_CALLBACKS.append(StripedTrainerCallback)
