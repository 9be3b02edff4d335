"""Outputs of a stripe that a Trainer would take for those of whole rows: withheld, or made whole.

In evaluation the Trainer gathers logits by rows from all ranks. Stripes gathered so would be in no
order and P times too many rows, so whatever touches them is told. Wanting only the loss touches none.
`StripedTrainer` asks for whole rows instead.
"""

from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_striped.context import ContextParallel
from hf_striped.errors import UnsupportedFeatureError
from hf_striped.striping import unstripe

_whole_rows_wanted = ContextVar("whole_rows_wanted", default=False)
# what DDP and FSDP do with every output
_BOOKKEEPING = (Tensor.grad_fn.__get__, Tensor.requires_grad.__get__, Tensor.clone)


class WithheldLogits(Tensor):
    """An empty tensor that raises `UnsupportedFeatureError` on any use."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        if function in _BOOKKEEPING:
            return super().__torch_function__(function, types, args, kwargs or {})
        raise UnsupportedFeatureError(
            "The logits of a stripe are not those of whole rows in token order, and their labels are shifted; "
            f"received a use of them ({getattr(function, '__name__', function)}). For predictions and "
            "compute_metrics use hf_striped.StripedTrainer (or StripedTrainerMixin), which makes the rows "
            "whole; else evaluate for the loss alone (prediction_loss_only=True), and compute no loss of your "
            "own from logits."
        )


def whole_rows_wanted() -> bool:
    """Whether a Trainer asks for outputs with one value a token, of whole rows in natural order."""
    return _whole_rows_wanted.get()


@contextmanager
def wanting_whole_rows():
    """Within: evaluation returns whole rows."""
    token = _whole_rows_wanted.set(True)
    try:
        yield
    finally:
        _whole_rows_wanted.reset(token)


def withhold_logits(output: Any) -> Any:
    """`output` with its logits withheld, their memory freed; a scalar loss stays as it is."""
    withheld = torch.empty(0).as_subclass(WithheldLogits)
    if isinstance(output, dict):
        if isinstance(output.get("logits"), Tensor):
            output["logits"] = withheld
        return output
    return tuple(withheld if isinstance(o, Tensor) and o.ndim > 0 else o for o in output)


def whole_rows(output: Any, cp: ContextParallel, shape: tuple[int, int]) -> Any:
    """`output` with each tensor of one value a token gathered over the group, in natural order.

    Args:
        output: a model's output, or a part of it; tensors `[batch, local_seq, ...]` become
            `[batch, local_seq * P, ...]`, everything else stays.
        cp: the context-parallel group.
        shape: `(batch, local_seq)` of this rank's stripe.
    """
    if isinstance(output, Tensor) and output.shape[:2] == shape:
        output = output.detach().contiguous()
        shards = [torch.empty_like(output) for _ in range(cp.size)]
        dist.all_gather(shards, output, group=cp.group)
        return unstripe(shards, 1)
    if isinstance(output, dict):
        for key in list(output):
            output[key] = whole_rows(output[key], cp, shape)
        return output
    if type(output) in (tuple, list):
        return type(output)(whole_rows(part, cp, shape) for part in output)
    return output
