"""What a Trainer needs of its model beyond the collator: a loss that holds over a context-parallel group.

Two hooks on the model, put there by a default callback, patch no method of any library:
- a count of supervised tokens that is this rank's own (average_tokens_across_devices=False) becomes
  the mean over the group, so that the mean of the ranks' losses is the group's;
- in evaluation the Trainer gathers one loss a rank and row, and cuts the last batch's to the rows that
  remain: every rank of a group reports the group's loss, and the rows are counted once a rank (in
  training, too, where TRL gathers its metrics so).
"""

from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import DataLoaderShard
from accelerate.state import GradientState
from torch import Tensor, nn

from hf_striped.context import ContextParallel
from hf_striped.errors import BatchError, UnsupportedFeatureError
from hf_striped.integrations.active import active_context, check_not_dispatched
from hf_striped.integrations.collator import CHECKSUM_KEY, NATURAL_KEY
from hf_striped.integrations.predictions import whole_rows, whole_rows_wanted, withhold_logits
from hf_striped.integrations.randomness import RankRandomness, drops_out
from hf_striped.integrations.transformers import CU_SEQLENS_KEY, REACHED_ATTENTION

_ATTRIBUTE = "_striped_loss_hooks"


class LossHooks:
    """The hooks of one model, and what its Trainer wants of the outputs.

    Attributes:
        loss_only: in training, too, logits are withheld, for a Trainer that may read them.
    """

    def __init__(self):
        self.loss_only = False
        self._rng: RankRandomness | None = None

    @classmethod
    def of(cls, model: nn.Module) -> "LossHooks":
        """The hooks of `model`, attached when first asked for."""
        hooks = getattr(model, _ATTRIBUTE, None)
        if hooks is None:
            hooks = cls()
            setattr(model, _ATTRIBUTE, hooks)
            model.register_forward_pre_hook(hooks.before, with_kwargs=True)
            model.register_forward_hook(hooks.after, with_kwargs=True)
        return hooks

    def before(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]):
        """Before a striped forward pass: `num_items_in_batch` becomes the mean over the group, and what
        the collator kept for the Trainer is taken out.
        """
        if CU_SEQLENS_KEY not in kwargs:
            return None
        labels_taken = kwargs.get("shift_labels") is not None and kwargs.get("labels") is None
        if labels_taken and not whole_rows_wanted():
            refuse_outside_loss("a batch whose labels were taken out before the model was called")
        cp = active_context()
        if cp is not None and CHECKSUM_KEY in kwargs:
            check_not_dispatched()
            _check_same_batch(cp, kwargs[CHECKSUM_KEY])
        kept = ("attention_mask", NATURAL_KEY, CHECKSUM_KEY)
        kwargs = {key: value for key, value in kwargs.items() if key not in kept}
        count = kwargs.get("num_items_in_batch")
        if count is not None and cp is not None:
            device = kwargs[CU_SEQLENS_KEY].device
            count = torch.as_tensor(count, dtype=torch.float64, device=device)
            kwargs["num_items_in_batch"] = _group_sum(cp, count) / cp.size
        if cp is not None and module.training and drops_out(module):
            self._rng = RankRandomness(cp.rank)
        return args, kwargs

    def after(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any):
        """After a striped forward pass: a loss whose mean over the ranks is the group's loss.

        Without `num_items_in_batch` the model returns the mean over its own stripe, which is weighted
        by the stripe's share of supervised tokens. In evaluation the mean itself is returned, on every
        rank.
        """
        if CU_SEQLENS_KEY not in kwargs:
            return None
        if self._rng is not None:
            self._rng.restore()
            self._rng = None
        cp, labels = active_context(), kwargs.get("labels")
        if cp is not None and labels is not None:
            _check_output(module, kwargs, output)
            loss = output["loss"] if isinstance(output, dict) else output[0]
            if kwargs.get("num_items_in_batch") is None:
                local = (labels != -100).sum()
                share = local / _group_sum(cp, local)
                loss = torch.where(local > 0, loss, torch.zeros_like(loss)) * share * cp.size
            of_the_group = _group_sum(cp, loss.detach()) / cp.size
            # in training the value is the group's, the gradient this rank's: a Trainer adds up values of
            # steps that it does not log without gathering them
            loss = loss + (of_the_group - loss.detach()) if module.training else of_the_group
            _count_remaining_rows_on_each_rank(cp)
            if isinstance(output, dict):
                output["loss"] = loss
            else:
                output = (loss, *output[1:])
        return self._outputs(module, kwargs, output, cp)

    def _outputs(
        self, module: nn.Module, kwargs: dict[str, Any], output: Any, cp: ContextParallel | None
    ) -> Any:
        """`output` with what its Trainer may see of the logits."""
        if module.training:
            return withhold_logits(output) if self.loss_only else output
        per_token_loss = isinstance(output, dict) and "log_probs" in output  # of TRL's SFTTrainer
        if whole_rows_wanted() or per_token_loss:
            return output if cp is None else whole_rows(output, cp, kwargs["position_ids"].shape)
        return withhold_logits(output)


def refuse_outside_loss(received: str) -> None:
    raise UnsupportedFeatureError(
        "On stripes the loss must be the model's own: one computed outside of it would shift the stripe's labels "
        f"once more; received {received}. Leave compute_loss_func unset and let compute_loss return the model's "
        "loss; for label smoothing use hf_striped.StripedTrainer (or StripedTrainerMixin)."
    )


def remaining_rows(loader: Any) -> int:
    """Rows of the dataset in the last batch of all groups; 0 where the last batch is full or unknown."""
    if isinstance(loader, DataLoaderShard) and loader.end_of_dataloader and loader.remainder > 0:
        return loader.total_dataset_length % loader.total_batch_size
    return 0


def _check_output(module: nn.Module, kwargs: dict[str, Any], output: Any) -> None:
    if not hasattr(kwargs[CU_SEQLENS_KEY], REACHED_ATTENTION):
        raise UnsupportedFeatureError(
            f"{type(module).__name__} does not hand keyword arguments to its attention, so that "
            f"{CU_SEQLENS_KEY} never reached it. Use another model."
        )
    if getattr(output, "aux_loss", None) is not None:
        raise UnsupportedFeatureError(
            "On stripes a router's auxiliary loss would be that of each stripe; received one from "
            f"{type(module).__name__}. Set output_router_logits=False in the model's config "
            "(router_aux_loss_coef=0.0 in TRL's SFTConfig): docs/explanation/loss.md."
        )


def _count_remaining_rows_on_each_rank(cp: ContextParallel) -> None:
    """In the last batch, of which Accelerate keeps `remainder` gathered rows: keep them of every rank."""
    loader = GradientState().active_dataloader
    if rows := remaining_rows(loader):
        loader.remainder = rows * cp.size


def _check_same_batch(cp: ContextParallel, checksum: Tensor) -> None:
    every = [torch.empty_like(checksum) for _ in range(cp.size)]
    dist.all_gather(every, checksum, group=cp.group)
    if not all(torch.equal(every[0], other) for other in every):
        different = [rank for rank, other in enumerate(every) if not torch.equal(every[0], other)]
        raise BatchError(
            "All ranks of a context-parallel group must collate the same batch, of which each keeps its stripe; "
            f"rank(s) {different} of the group collated another one than rank 0. Give every rank the whole dataset "
            "(no shard or split_dataset_by_node by rank: the data loader shares rows out), and keep datasets and "
            "collators free of randomness that differs between ranks."
        )


def _group_sum(cp: ContextParallel, value: Tensor) -> Tensor:
    total = value.clone()
    dist.all_reduce(total, group=cp.group)
    return total
