"""What an attention call on a striped batch must be, and what is refused by name before any exchange."""

from typing import Any

import torch
from torch import Tensor

from hf_striped.context import ContextParallel
from hf_striped.errors import BatchError, ConfigurationError, UnsupportedFeatureError
from hf_striped.integrations.masks import DeferredMask, LocalRule

# layers of these kinds mix tokens by attention that the ring computes, or do not mix them
_LAYER_TYPES = frozenset(
    [
        "full_attention",
        "sliding_attention",
        "chunked_attention",
        "attention",
        "dense",
        "sparse",
        "moe",
    ]
)
PREPARED = "_striped_prepared"  # set on each module by prepare_model


def refuse(feature: str, asked: Any) -> None:
    """Raise `UnsupportedFeatureError` by the feature's name, unless `asked` is None."""
    if asked is not None:
        value = f"a tensor of shape {tuple(asked.shape)}" if isinstance(asked, Tensor) else asked
        raise UnsupportedFeatureError(
            f'attn_implementation="striped_ring" does not support {feature}; received {value}. '
            "Switch the feature off in the model's config or in the call, or use "
            'attn_implementation="sdpa" or "eager" without context parallelism.'
        )


def check_causal_self_attention(module: torch.nn.Module, is_causal: bool | None) -> None:
    """Raise unless the layer is causal, of a model without an encoder."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    refuse("non-causal attention (is_causal=False)", None if causal else False)
    config = getattr(module, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        refuse("encoder-decoder models", type(config).__name__)


def rope_depends_on_length(kind: str) -> bool:
    """Whether RoPE of this `rope_type` takes its frequencies from the largest position."""
    return "dynamic" in kind or kind == "longrope"


def check_config(module: torch.nn.Module, cp: ContextParallel | None) -> None:
    """What the config alone says about layers and RoPE that a stripe would get wrong."""
    config = getattr(module, "config", None)
    names = ("layer_types", "layers_block_type", "block_types")
    layers = {kind for name in names for kind in getattr(config, name, None) or ()}
    if other := sorted(layers - _LAYER_TYPES):
        refuse("layers that are not softmax attention over the whole sequence", other)
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {
        rope.get("rope_type"),
        *(v.get("rope_type") for v in rope.values() if isinstance(v, dict)),
    }
    by_length = sorted(kind for kind in kinds if kind and rope_depends_on_length(kind))
    if cp is not None and by_length and not getattr(module, PREPARED, False):
        raise ConfigurationError(
            "RoPE that looks at the largest position must see the whole sequence; received rope_type "
            f"{by_length} in a model that has not been prepared. Call hf_striped.prepare_model(model) once "
            "(a Trainer does)."
        )


def local_rule(
    attention_mask: Tensor | DeferredMask | None, sliding_window: int | None
) -> LocalRule:
    """The mask's rule, which is what sdpa and eager attention go by; the argument must not differ."""
    if not isinstance(attention_mask, DeferredMask):
        refuse("a custom attention_mask", attention_mask)
        return LocalRule(sliding_window)
    rule = attention_mask.local_rule()
    if sliding_window not in (None, rule.sliding_window):
        refuse(
            f"a sliding_window that the layer's mask does not have (the mask has {rule.sliding_window})",
            sliding_window,
        )
    return rule


def check_stripe(query: Tensor, cu_seqlens: Tensor, cp: ContextParallel | None) -> None:
    """Raise unless the ranks' stripes make up the row that `cu_seqlens` describes."""
    local_tokens = query.shape[0] * query.shape[2]
    row_length, size = int(cu_seqlens[-1]), cp.size if cp is not None else 1
    if row_length == local_tokens * size:
        return
    striped_over = row_length / local_tokens
    raise (BatchError if cp is not None else ConfigurationError)(
        "The batch must be striped over the active context-parallel group; it has "
        f"{local_tokens} tokens here of {row_length} in all (striped over {striped_over:g}), and the "
        f"context-parallel size is {size}. Pass parallelism_config=StripedParallelismConfig("
        f"context_parallel_size={max(round(striped_over), 1)}) to TrainingArguments or Accelerator, "
        "and let StripedDataCollator take its size from there."
    )
