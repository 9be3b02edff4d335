"""The callback that every Trainer of the process has: it checks the set-up and prepares the model."""

import sys
from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer import DEFAULT_CALLBACKS

from hf_striped.integrations.active import active_context
from hf_striped.integrations.collator import StripedDataCollator
from hf_striped.integrations.guard import (
    check_arguments,
    check_collator,
    check_loss,
    check_predictions,
    check_same_length,
    is_striped,
    own_loss,
)
from hf_striped.integrations.loss_hooks import LossHooks
from hf_striped.integrations.model import prepare_model, save_memory
from hf_striped.integrations.randomness import seed_workers_alike


class StripedTrainerCallback(TrainerCallback):
    """Checks the set-up of every Trainer of the process, and attaches the loss hooks to its model."""

    def on_init_end(self, args, state, control, model=None, **kwargs: Any) -> None:
        if model is None:
            return
        trainer = calling_trainer()
        check_arguments(args, model)
        stripes = isinstance(getattr(trainer, "data_collator", None), StripedDataCollator)
        if stripes or (active_context() is not None and is_striped(model)):
            check_loss(args, trainer)
            check_predictions(trainer)
            _keep_for_the_trainer(getattr(trainer, "data_collator", None), args)
        self._prepare(model, trainer)
        if trainer is not None and is_striped(model) and (cp := active_context()) is not None:
            count_rows_of_groups(trainer, cp.size)

    def on_train_begin(
        self, args, state, control, model=None, train_dataloader=None, **kwargs: Any
    ) -> None:
        collator = check_collator(args, model, getattr(train_dataloader, "collate_fn", None))
        _keep_for_the_trainer(collator, args)
        cp = active_context()
        if cp is not None and is_striped(model) and train_dataloader is not None:
            check_same_length(cp, train_dataloader)
            seed_workers_alike(train_dataloader, cp.size)
        self._prepare(model, calling_trainer())  # `model_init` makes a new model for each run

    def on_prediction_step(
        self, args, state, control, model=None, eval_dataloader=None, **kwargs: Any
    ) -> None:
        if model is not None and eval_dataloader is not None:
            check_collator(args, model, getattr(eval_dataloader, "collate_fn", None))

    def _prepare(self, model: nn.Module, trainer: Trainer | None) -> None:
        if not is_striped(model):
            return
        if active_context() is not None:
            prepare_model(model)
        else:
            save_memory(model)
        LossHooks.of(model).loss_only = own_loss(trainer) is not None


def _keep_for_the_trainer(collator: Any, args: TrainingArguments) -> None:
    """What a collator of stripes also hands out to a Trainer."""
    if isinstance(collator, StripedDataCollator):
        collator.keeps_checksum = active_context() is not None
        collator.keeps_attention_mask |= counts_real_tokens(args)


def count_rows_of_groups(trainer: Trainer, cp_size: int) -> None:
    """Let this Trainer's "Total train batch size" and samples a second count a group's rows once."""
    counted = trainer.get_total_train_batch_size
    trainer.get_total_train_batch_size = lambda args: counted(args) // cp_size


def counts_real_tokens(args: TrainingArguments) -> bool:
    """Whether a Trainer with `args` reads the attention mask to count tokens."""
    counts = getattr(args, "include_num_input_tokens_seen", None) == "non_padding"
    return counts or any(cls.__name__ == "SFTConfig" for cls in type(args).__mro__)


def calling_trainer() -> Trainer | None:
    """The Trainer whose event this is. A callback is not handed it, and is called by its methods."""
    frame = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer):
            return caller
        frame = frame.f_back
    return None


def register() -> None:
    """Let every Trainer of this process have the callback."""
    if StripedTrainerCallback not in DEFAULT_CALLBACKS:
        DEFAULT_CALLBACKS.append(StripedTrainerCallback)
