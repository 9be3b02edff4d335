"""Trainer classes for what a plain Trainer cannot do right over stripes: predictions, metrics, label
smoothing.
"""

import copy
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.state import GradientState
from accelerate.utils import recursively_apply
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import Trainer
from transformers.trainer_pt_utils import LabelSmoother

from hf_striped.integrations.active import active_context
from hf_striped.integrations.collator import NATURAL_KEY, StripedDataCollator
from hf_striped.integrations.loss_hooks import remaining_rows
from hf_striped.integrations.predictions import wanting_whole_rows
from hf_striped.integrations.tiled_loss import with_loss_function


class StripedTrainerMixin:
    """For a Trainer class: predictions, metrics and label smoothing over stripes.

    Put it before the Trainer class: `class MyTrainer(StripedTrainerMixin, SFTTrainer)`.

    `predict()`, `compute_metrics` and `preprocess_logits_for_metrics` see what one process shows them:
    logits `[rows, seq, vocab]` and labels as the base collator made them, in the dataset's and the
    tokens' natural order. Each rank then holds the logits of whole rows; wanting only the loss keeps
    those of its stripe.

    Args:
        *args: the Trainer class's own.
        **kwargs: the Trainer class's own.

    Example:
        >>> import hf_striped
        >>> from transformers import Seq2SeqTrainer
        >>> class MyTrainer(hf_striped.StripedTrainerMixin, Seq2SeqTrainer):
        ...     pass
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.take_over_label_smoothing()

    def take_over_label_smoothing(self) -> None:
        """Let the model smooth its loss, in place of the Trainer, which would shift labels once more."""
        self.label_smoother = None

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """The model's loss, smoothed if the arguments ask for it.

        Args:
            model: the model, wrapped as it is trained.
            inputs: this rank's stripe of a batch.
            *args: the Trainer class's own.
            **kwargs: the Trainer class's own.

        Returns:
            The loss, a scalar; with `return_outputs` the outputs too.
        """
        with _smoothed_loss(self.model, self.args.label_smoothing_factor):
            return super().compute_loss(model, inputs, *args, **kwargs)

    def get_eval_dataloader(self, *args: Any, **kwargs: Any):
        """The Trainer class's loader for evaluation; its batches carry their rows in natural order too.

        Args:
            *args: the Trainer class's own.
            **kwargs: the Trainer class's own.

        Returns:
            What the Trainer class returns.
        """
        with self._natural_rows_kept():
            return super().get_eval_dataloader(*args, **kwargs)

    def get_test_dataloader(self, *args: Any, **kwargs: Any):
        """The Trainer class's loader for prediction; its batches carry their rows in natural order too.

        Args:
            *args: the Trainer class's own.
            **kwargs: the Trainer class's own.

        Returns:
            What the Trainer class returns.
        """
        with self._natural_rows_kept():
            return super().get_test_dataloader(*args, **kwargs)

    @contextmanager
    def _natural_rows_kept(self):
        """Within: data loaders are made whose batches carry the natural-order rows as well."""
        collator = self.data_collator
        if isinstance(collator, StripedDataCollator):
            self.data_collator = copy.copy(collator)
            self.data_collator.keeps_natural_rows = True
        try:
            yield
        finally:
            self.data_collator = collator

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        """One batch of evaluation or prediction.

        Args:
            model: the model, wrapped as it is trained.
            inputs: this rank's stripe of a batch; unless only the loss is wanted, it is replaced in place by
                the rows in natural order.
            prediction_loss_only: whether the loss is all that is wanted.
            ignore_keys: keys of the model's output that are left out.

        Returns:
            The loss, a scalar; the logits `[batch, seq, vocab]` and labels `[batch, seq]` of whole rows in
            natural order, or None for both if only the loss is wanted.

        Raises:
            ConfigurationError: Accelerate's own context or sequence parallelism is on.
        """
        natural = inputs.pop(NATURAL_KEY, None)
        if prediction_loss_only or natural is None:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        with wanting_whole_rows():
            loss, outputs, labels = super().prediction_step(
                model, inputs, prediction_loss_only, ignore_keys
            )
        natural = self._prepare_input(natural)
        inputs.clear()
        inputs.update(natural)  # for include_for_metrics=["inputs"]
        labels = natural["labels"] if labels is not None else None
        tokens = natural["input_ids"] if "input_ids" in natural else natural["inputs_embeds"]
        cp = active_context()
        return loss, _cut(outputs, tokens.shape[1], cp.size if cp is not None else 1), labels

    @property
    def gather_function(self) -> Callable:
        """Rows of all data-parallel groups, each once, in the dataset's order."""
        return self._gather_rows if active_context() is not None else self._gather_function

    @gather_function.setter
    def gather_function(self, function: Callable) -> None:
        self._gather_function = function

    def _gather_rows(self, data: Any) -> Any:
        size, rest = active_context().size, remaining_rows(GradientState().active_dataloader)

        def of_each_group(gathered: Tensor) -> Tensor:
            rows = torch.cat(gathered.chunk(self.accelerator.num_processes)[::size])
            return rows[:rest] if rest else rows

        return recursively_apply(of_each_group, self.accelerator.gather(data))


class StripedTrainer(StripedTrainerMixin, Trainer):
    """A Trainer whose predictions, metrics and label smoothing hold over stripes: `StripedTrainerMixin`.

    Its arguments are those of `transformers.Trainer`.

    Example:
        >>> import hf_striped
        >>> from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
        >>> sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1)
        >>> config = LlamaConfig(**sizes, num_attention_heads=2, attn_implementation="striped_ring")
        >>> rows = [{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}]
        >>> trainer = hf_striped.StripedTrainer(
        ...     LlamaForCausalLM(config),
        ...     TrainingArguments(use_cpu=True, report_to=[], disable_tqdm=True),
        ...     hf_striped.StripedDataCollator(),
        ... )
        >>> trainer.predict(rows).predictions.shape
        (1, 4, 32)
    """


def _cut(outputs: Any, seq_len: int, cp_size: int) -> Any:
    """Without the tokens that filled the rows up to a multiple of P, where a tensor has one value a token."""
    filled = -(-seq_len // cp_size) * cp_size

    def cut(tensor: Tensor) -> Tensor:
        per_token = tensor.ndim > 1 and tensor.shape[1] == filled
        return tensor[:, :seq_len] if per_token else tensor

    return recursively_apply(cut, outputs)


@contextmanager
def _smoothed_loss(model: nn.Module, epsilon: float):
    """Within: the causal language model `model` (or the one in a PEFT model) has the smoothed loss."""
    if not epsilon:
        yield
        return
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    smoother = LabelSmoother(epsilon)

    def smoothed_loss(
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if shift_labels is None:
            shift_labels = pad(labels, (0, 1), value=-100)[..., 1:]
        return smoother({"logits": logits}, shift_labels, num_items_in_batch=num_items_in_batch)

    with with_loss_function(base, smoothed_loss):
        yield
