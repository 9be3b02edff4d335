"""The mask function of "striped_ring": it builds nothing until attention knows what the batch is.

The mask is made at the top of the model, which cannot see whether the batch is striped. On stripes
position_ids step by cp_size, and a mask built from them would cut every token off as its own document.
So the request is kept, and attention either builds it (an ordinary batch) or checks that it asks for
nothing but causality, windows and chunks (a striped one). Queries that follow cached keys are never
striped: built at once.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils

from hf_striped.errors import UnsupportedFeatureError
from hf_striped.integrations.active import active_context

_WINDOW = f"{masking_utils.sliding_window_overlay.__qualname__}.<locals>.inner_mask"
_CHUNK = f"{masking_utils.chunked_overlay.__qualname__}.<locals>.inner_mask"
# mask functions that striped attention replaces exactly
_KNOWN_PARTS = {
    _WINDOW,
    _CHUNK,
    masking_utils.causal_mask_function.__qualname__,
    f"{masking_utils.and_masks.__qualname__}.<locals>.and_mask",
    f"{masking_utils.packed_sequence_mask_function.__qualname__}.<locals>.inner_mask",
    f"{masking_utils.remap_positions_for_packed_sequence.__qualname__}.<locals>.inner_mask",
}


class LocalRule(NamedTuple):
    """The keys that a query sees of its document: the last `sliding_window`, those of its chunk."""

    sliding_window: int | None = None
    chunk_size: int | None = None


class MaskParts(NamedTuple):
    """What a mask function is composed of: the rule that striped attention replaces, and the rest."""

    rule: LocalRule
    unknown: tuple[str, ...]


@dataclass(frozen=True)
class DeferredMask:
    """The arguments of a mask that has not been built, and what its function asks for."""

    arguments: dict[str, Any]
    parts: MaskParts

    @cached_property
    def built(self) -> Tensor | None:
        """The mask that sdpa would use, built once for all layers."""
        return masking_utils.sdpa_mask(**self.arguments)

    def local_rule(self) -> LocalRule:
        """What the mask asks for beyond causality within documents.

        Raises:
            UnsupportedFeatureError: anything but a sliding window or chunks.
        """
        if self.parts.unknown:
            raise UnsupportedFeatureError(
                "A striped batch takes causal attention within documents, windows and chunks; the model asked "
                f"for the mask rule(s) {list(self.parts.unknown)}. Use a model without them, or "
                'attn_implementation="sdpa" without context parallelism.'
            )
        if self.arguments.get("attention_mask") is not None:
            raise UnsupportedFeatureError(
                "A striped batch carries no attention_mask, padding is a document of its own; received "
                f"one of shape {tuple(self.arguments['attention_mask'].shape)}. "
                "Pass the batch of StripedDataCollator on unchanged."
            )
        return self.parts.rule

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape the mask would have."""
        names = ("q_length", "kv_length")
        return self.arguments["batch_size"], 1, *(self.arguments[name] for name in names)

    @property
    def ndim(self) -> int:
        return 4

    def __getattr__(self, name: str) -> Any:
        """A model that works on the mask itself gets the real one, unless the batch may be striped."""
        if name.startswith("__") or name == "to" or not hasattr(Tensor, name):
            raise AttributeError(name)
        return getattr(self._for_the_model(), name)

    def __getitem__(self, index: Any) -> Tensor:
        return self._for_the_model()[index]

    def _for_the_model(self) -> Tensor:
        config = self.arguments.get("config")
        if active_context() is not None:
            raise UnsupportedFeatureError(
                "A striped batch has no mask that a model could change; "
                f"{getattr(config, 'model_type', 'this model')} works on its attention mask itself. "
                'Use another model, or attn_implementation="sdpa" without context parallelism.'
            )
        return masking_utils.sdpa_mask(**{**self.arguments, "allow_is_causal_skip": False})


def striped_ring_mask(**arguments: Any) -> Tensor | DeferredMask | None:
    """A `DeferredMask` where the batch may be striped, else sdpa's mask."""
    if isinstance(arguments["attention_mask"], DeferredMask):
        return arguments[
            "attention_mask"
        ]  # generation makes masks ahead and hands them to the model
    cached = isinstance(arguments["q_offset"], Tensor) or arguments["q_offset"] > 0
    if not cached and arguments["q_length"] == arguments["kv_length"]:
        return DeferredMask(arguments, mask_parts(arguments["mask_function"]))
    return masking_utils.sdpa_mask(**arguments)


@torch.compiler.disable  # it reads closures; once a forward pass, outside of all layers
def mask_parts(function: Callable) -> MaskParts:
    """Take a mask function apart."""
    parts = list(_parts(function))
    unknown = {part.__qualname__ for part in parts} - _KNOWN_PARTS
    rule = LocalRule(
        _free_variable(parts, _WINDOW, "sliding_window"),
        _free_variable(parts, _CHUNK, "chunk_size"),
    )
    return MaskParts(rule, tuple(sorted(unknown)))


def _free_variable(parts: list[Callable], qualname: str, name: str) -> int | None:
    for part in parts:
        if part.__qualname__ == qualname:
            return part.__closure__[part.__code__.co_freevars.index(name)].cell_contents
    return None


def _parts(function: Callable) -> Iterator[Callable]:
    """The mask functions that `function` is composed of, itself included."""
    yield function
    for cell in getattr(function, "__closure__", None) or ():
        content = cell.cell_contents
        for part in content if isinstance(content, tuple) else (content,):
            if callable(part) and hasattr(part, "__qualname__"):
                yield from _parts(part)
