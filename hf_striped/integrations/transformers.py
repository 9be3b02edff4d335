"""The attention function of "striped_ring", and its registration with Transformers.

    query: [batch, query_heads, seq, head_dim]      seq is local on a striped batch
    out:   [batch, seq, query_heads, value_head_dim]

A batch with `striped_cu_seqlens` goes through the ring. A batch without it is ordinary causal
attention, and is refused in training while a context-parallel group is active.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_striped.attention import striped_ring_attention
from hf_striped.context import ContextParallel
from hf_striped.errors import BatchError, ConfigurationError, UnsupportedFeatureError
from hf_striped.integrations.accelerate import (
    active_context,
    active_kernel,
    check_not_dispatched,
)
from hf_striped.integrations.masks import DeferredMask, LocalRule, striped_ring_mask
from hf_striped.integrations.ordinary import ordinary_attention
from hf_striped.packing import chunk_cu_seqlens

ATTENTION_NAME = "striped_ring"
CU_SEQLENS_KEY = "striped_cu_seqlens"

# what models pass down to attention that changes nothing in it
_HARMLESS = frozenset(
    [
        "position_ids",
        "position_embeddings",
        "cache",
        "past_key_values",
        "past_key_value",
        "cache_position",
        "use_cache",
        "layer_idx",
        "return_dict",
        "num_items_in_batch",
        "labels",
        "shift_labels",
        "logits_to_keep",
        "output_hidden_states",
        "output_router_logits",
    ]
)


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


def striped_ring_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | DeferredMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    output_attentions: bool | None = None,
    striped_cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as Transformers calls it.

    Args:
        module: the attention module; its `is_causal`, `training` and `config` are read.
        query: `[batch, query_heads, seq, head_dim]`.
        key: `[batch, key_heads, seq, head_dim]`.
        value: `[batch, key_heads, seq, value_head_dim]`.
        attention_mask: what `striped_ring_mask` returned.
        dropout: attention dropout of this call; above 0 it is refused on a striped batch.
        scaling: factor of the scores; default `head_dim ** -0.5`.
        sliding_window: keys a query sees, its own included; must be what the mask says.
        softcap: scores become `softcap * tanh(scores / softcap)`.
        s_aux: `[query_heads]`, attention sinks.
        striped_cu_seqlens: int32 `[documents + 1]`, from `StripedDataCollator`.
        **kwargs: only names known to be harmless to attention are accepted.

    Returns:
        `[batch, seq, query_heads, value_head_dim]` and None: attention weights never exist.

    Raises:
        UnsupportedFeatureError: a feature that is refused, by name, before any exchange.
        ConfigurationError: a batch and a parallelism config that do not belong together.
    """
    _refuse("output_attentions", output_attentions or None)
    if unknown := sorted(k for k, v in kwargs.items() if k not in _HARMLESS and v is not None):
        _refuse(f"the attention argument(s) {', '.join(unknown)}", unknown)
    cp = active_context()
    if striped_cu_seqlens is None:
        if cp is not None and module.training:
            raise ConfigurationError(
                "In training with context parallelism every batch must be striped, and "
                f"{type(module).__name__} received no {CU_SEQLENS_KEY!r}: either the batch is not striped, or "
                "the model does not hand its keyword arguments to attention (then it is not supported). Pass "
                "data_collator=StripedDataCollator(your_collator) to the Trainer, or call model.eval() for an "
                "ordinary forward pass."
            )
        if isinstance(attention_mask, DeferredMask):
            attention_mask = attention_mask.built
        if softcap is not None or s_aux is not None:
            _refuse("position_bias together with softcap or attention sinks", position_bias)
            return ordinary_attention(
                query, key, value, attention_mask, dropout, scaling, softcap, s_aux
            ), None
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, position_bias
        )
    _refuse("position_bias", position_bias)
    _refuse(
        "attention dropout in training (attention_dropout in the model's config)", dropout or None
    )
    _check_causal_self_attention(module, is_causal)
    _check_config(module, cp)
    check_not_dispatched()
    _check_stripe(query, striped_cu_seqlens, cp)
    striped_cu_seqlens.reached_attention = True
    rule = _local_rule(attention_mask, sliding_window)
    if rule.chunk_size is not None:
        striped_cu_seqlens = chunk_cu_seqlens(striped_cu_seqlens, rule.chunk_size)
    if cp is not None and getattr(module, "attn_temperature_tuning", False):
        query = _tune_temperature(module, query, cp)
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    out = striped_ring_attention(
        query,
        key,
        value,
        cp.group if cp is not None else None,
        scale=scaling,
        cu_seqlens=striped_cu_seqlens,
        sliding_window=rule.sliding_window,
        softcap=softcap,
        sinks=s_aux,
        kernel=active_kernel(),
    )
    return out.transpose(1, 2), None


def _refuse(feature: str, asked: Any) -> None:
    if asked is not None:
        value = f"a tensor of shape {tuple(asked.shape)}" if isinstance(asked, Tensor) else asked
        raise UnsupportedFeatureError(
            f'attn_implementation="striped_ring" does not support {feature}; received {value}. '
            "Switch the feature off in the model's config or in the call, or use "
            'attn_implementation="sdpa" or "eager" without context parallelism.'
        )


def _check_causal_self_attention(module: torch.nn.Module, is_causal: bool | None) -> None:
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    _refuse("non-causal attention (is_causal=False)", None if causal else False)
    config = getattr(module, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        _refuse("encoder-decoder models", type(config).__name__)


def rope_depends_on_length(kind: str) -> bool:
    """Whether RoPE of this `rope_type` takes its frequencies from the largest position."""
    return "dynamic" in kind or kind == "longrope"


def _check_config(module: torch.nn.Module, cp: ContextParallel | None) -> None:
    """What the config alone says about layers and RoPE that a stripe would get wrong."""
    config = getattr(module, "config", None)
    names = ("layer_types", "layers_block_type", "block_types")
    layers = {kind for name in names for kind in getattr(config, name, None) or ()}
    if other := sorted(layers - _LAYER_TYPES):
        _refuse("layers that are not softmax attention over the whole sequence", other)
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


def _tune_temperature(module: torch.nn.Module, query: Tensor, cp: ContextParallel) -> Tensor:
    """Llama 4 scales the queries of layers without RoPE by their index, which it counted locally."""
    if module.use_rope:
        return query
    local = torch.arange(query.shape[2], device=query.device)

    def factor(index: Tensor) -> Tensor:
        return ((index + 1.0) / module.floor_scale).floor().log1p() * module.attn_scale + 1.0

    ratio = factor(local * cp.size + cp.rank) / factor(local)
    return (query * ratio[:, None]).to(query.dtype)


def _local_rule(
    attention_mask: Tensor | DeferredMask | None, sliding_window: int | None
) -> LocalRule:
    """The mask's rule, which is what sdpa and eager attention go by; the argument must not differ."""
    if not isinstance(attention_mask, DeferredMask):
        _refuse("a custom attention_mask", attention_mask)
        return LocalRule(sliding_window)
    rule = attention_mask.local_rule()
    if sliding_window not in (None, rule.sliding_window):
        _refuse(
            f"a sliding_window that the layer's mask does not have (the mask has {rule.sliding_window})",
            sliding_window,
        )
    return rule


def _check_stripe(query: Tensor, cu_seqlens: Tensor, cp: ContextParallel | None) -> None:
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


def register() -> None:
    """Make `attn_implementation="striped_ring"` known to Transformers."""
    AttentionInterface.register(ATTENTION_NAME, striped_ring_attention_forward)
    AttentionMaskInterface.register(ATTENTION_NAME, striped_ring_mask)
