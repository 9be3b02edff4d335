"""The mask function of "striped_ring": it builds nothing until attention knows what the batch is.

The mask is made at the top of the model, which cannot see whether the batch is striped. On stripes
position_ids step by cp_size, and a mask built from them would cut every token off as its own document.
So the request is kept, and attention either builds it (an ordinary batch) or checks that it asks for
nothing but causality (a striped one). Queries that follow cached keys are never striped: built at once.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor
from transformers import masking_utils

from hf_striped.errors import UnsupportedFeatureError

# mask functions that striped attention replaces exactly: causality, and documents by position
_CAUSAL_PARTS = {
    masking_utils.causal_mask_function.__qualname__,
    f"{masking_utils.and_masks.__qualname__}.<locals>.and_mask",
    f"{masking_utils.packed_sequence_mask_function.__qualname__}.<locals>.inner_mask",
    f"{masking_utils.remap_positions_for_packed_sequence.__qualname__}.<locals>.inner_mask",
}


@dataclass(frozen=True)
class DeferredMask:
    """The arguments of a mask that has not been built."""

    arguments: dict[str, Any]

    @cached_property
    def built(self) -> Tensor | None:
        """The mask that sdpa would use, built once for all layers."""
        return masking_utils.sdpa_mask(**self.arguments)

    def check_causal(self) -> None:
        """Raise `UnsupportedFeatureError` unless the mask is causal within documents and nothing else."""
        parts = {part.__qualname__ for part in _parts(self.arguments["mask_function"])}
        if unknown := parts - _CAUSAL_PARTS:
            raise UnsupportedFeatureError(
                "A striped batch takes causal attention within documents only; the model asked for the "
                f"mask rule(s) {sorted(unknown)}. Use a model without them, or "
                'attn_implementation="sdpa" without context parallelism.'
            )
        if self.arguments.get("attention_mask") is not None:
            raise UnsupportedFeatureError(
                "A striped batch carries no attention_mask, padding is a document of its own; received "
                f"one of shape {tuple(self.arguments['attention_mask'].shape)}. "
                "Pass the batch of StripedDataCollator on unchanged."
            )


def striped_ring_mask(**arguments: Any) -> Tensor | DeferredMask | None:
    """A `DeferredMask` where the batch may be striped, else sdpa's mask."""
    if arguments["q_length"] == arguments["kv_length"]:
        return DeferredMask(arguments)
    return masking_utils.sdpa_mask(**arguments)


def _parts(function: Callable) -> Iterator[Callable]:
    """The mask functions that `function` is composed of, itself included."""
    yield function
    for cell in getattr(function, "__closure__", None) or ():
        content = cell.cell_contents
        for part in content if isinstance(content, tuple) else (content,):
            if callable(part) and hasattr(part, "__qualname__"):
                yield from _parts(part)
