"""Logits of a stripe that a Trainer would take for those of whole rows: withheld, with the reason.

In evaluation the Trainer gathers logits by rows from all ranks. Stripes gathered so would be in no
order and P times too many rows, so whatever touches them is told. Wanting only the loss touches none.
"""

from typing import Any

import torch
from torch import Tensor

from hf_striped.errors import UnsupportedFeatureError


class WithheldLogits(Tensor):
    """An empty tensor that raises `UnsupportedFeatureError` on any use."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        raise UnsupportedFeatureError(
            "A Trainer's predictions over stripes are not gathered into token order; received a use of the "
            f"logits ({getattr(function, '__name__', function)}). Evaluate for the loss alone "
            "(no compute_metrics, prediction_loss_only=True), or predict without context parallelism."
        )


def withhold_logits(output: Any) -> Any:
    """`output` with its logits withheld, their memory freed; a scalar loss stays as it is."""
    withheld = torch.empty(0).as_subclass(WithheldLogits)
    if isinstance(output, dict):
        if isinstance(output.get("logits"), Tensor):
            output["logits"] = withheld
        return output
    return tuple(withheld if isinstance(o, Tensor) and o.ndim > 0 else o for o in output)
