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
from hf_striped.errors import ConfigurationError
from hf_striped.integrations.active import (
    active_choices,
    active_context,
    check_heads_shared,
    check_not_dispatched,
)
from hf_striped.integrations.attention_checks import (
    check_causal_self_attention,
    check_config,
    check_stripe,
    local_rule,
    refuse,
)
from hf_striped.integrations.masks import DeferredMask, striped_ring_mask
from hf_striped.integrations.ordinary import ordinary_attention

ATTENTION_NAME = "striped_ring"
CU_SEQLENS_KEY = "striped_cu_seqlens"
REACHED_ATTENTION = "_striped_on_cpu"  # set on the tensor of that key by the first layer

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
    refuse("output_attentions", output_attentions or None)
    if unknown := sorted(k for k, v in kwargs.items() if k not in _HARMLESS and v is not None):
        refuse(f"the attention argument(s) {', '.join(unknown)}", unknown)
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
            refuse("position_bias together with softcap or attention sinks", position_bias)
            return ordinary_attention(
                query, key, value, attention_mask, dropout, scaling, softcap, s_aux
            ), None
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, position_bias
        )
    refuse("position_bias", position_bias)
    refuse(
        "attention dropout in training (attention_dropout in the model's config)", dropout or None
    )
    check_causal_self_attention(module, is_causal)
    check_config(module, cp)
    check_not_dispatched()
    check_heads_shared(cp)
    cu_seqlens = _on_cpu(striped_cu_seqlens)
    if not torch.compiler.is_compiling():  # there the operator checks it
        check_stripe(query, cu_seqlens, cp)
    rule = local_rule(attention_mask, sliding_window)
    if cp is not None and getattr(module, "attn_temperature_tuning", False):
        query = _tune_temperature(module, query, cp)
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    out = striped_ring_attention(
        query,
        key,
        value,
        None if cp is None else cp.group if cp.heads_group is None else cp.ring_group,
        heads_group=None if cp is None else cp.heads_group,
        scale=scaling,
        cu_seqlens=cu_seqlens,
        sliding_window=rule.sliding_window,
        chunk_size=rule.chunk_size,
        softcap=softcap,
        sinks=s_aux,
        **active_choices(),
    )
    return out.transpose(1, 2), None


def _on_cpu(cu_seqlens: Tensor) -> Tensor:
    """`cu_seqlens` where the ring reads it, moved once for all layers; marked as having come so far."""
    if not hasattr(cu_seqlens, REACHED_ATTENTION):
        setattr(cu_seqlens, REACHED_ATTENTION, cu_seqlens.cpu())
    return getattr(cu_seqlens, REACHED_ATTENTION)


def _tune_temperature(module: torch.nn.Module, query: Tensor, cp: ContextParallel) -> Tensor:
    """Llama 4 scales the queries of layers without RoPE by their index, which it counted locally."""
    if module.use_rope:
        return query
    local = torch.arange(query.shape[2], device=query.device)

    def factor(index: Tensor) -> Tensor:
        return ((index + 1.0) / module.floor_scale).floor().log1p() * module.attn_scale + 1.0

    ratio = factor(local * cp.size + cp.rank) / factor(local)
    return (query * ratio[:, None]).to(query.dtype)


def register() -> None:
    """Make `attn_implementation="striped_ring"` known to Transformers."""
    AttentionInterface.register(ATTENTION_NAME, striped_ring_attention_forward)
    AttentionMaskInterface.register(ATTENTION_NAME, striped_ring_mask)
