"""What a whole model needs before it trains on stripes: a check of its layers, and RoPE that sees the
whole sequence.

Attention mixes tokens through the ring. A layer that mixes them any other way would see its stripe
alone, so it is refused. RoPE frequencies that depend on the largest position would depend on this
rank's largest, so the rotary modules are shown the largest of all ranks.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from hf_striped.errors import ConfigurationError, UnsupportedFeatureError
from hf_striped.integrations.active import active_config, active_context
from hf_striped.integrations.attention_checks import PREPARED, rope_depends_on_length
from hf_striped.integrations.checkpointing import keep_attention_in_checkpoints
from hf_striped.integrations.tiled_loss import tile_loss
from hf_striped.integrations.transformers import CU_SEQLENS_KEY

_MIXES_TOKENS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase)


def prepare_model(model: nn.Module) -> nn.Module:
    """Check `model` for striped training, make its RoPE see the whole sequence, and let it save the memory
    that the process's `StripedParallelismConfig` asks for (`loss_tile_size`, `keep_attention`).

    The Trainer does this by itself. In a loop of your own every rank calls it once: after the Accelerator is
    made and gradient checkpointing is enabled, before `Accelerator.prepare`.

    Args:
        model: a causal language model with `attn_implementation="striped_ring"`, PEFT or not.

    Returns:
        The same model, changed in place.

    Raises:
        UnsupportedFeatureError: attention that does not go through Transformers' interface, a loss other than
            the causal one, a layer that mixes tokens by other means than attention, positions that count from
            the padding token, or `loss_tile_size` for a model without a backbone of its own.
        ConfigurationError: the ranks cannot share the model's heads, `keep_attention` meets reentrant
            checkpointing, or Accelerate's own context or sequence parallelism is on.

    Example:
        >>> import hf_striped
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1)
        >>> config = LlamaConfig(**sizes, num_attention_heads=2, attn_implementation="striped_ring")
        >>> model = hf_striped.prepare_model(LlamaForCausalLM(config))
    """
    check_layers(model)
    save_memory(model)
    _share_heads(model)
    if getattr(model, PREPARED, False):
        return model
    rotary = [module for module in model.modules() if _is_length_dependent_rotary(module)]
    if rotary:
        whole = WholeSequence()
        model.register_forward_pre_hook(whole.see, with_kwargs=True)
        for module in rotary:
            module.register_forward_pre_hook(whole.add_last_position, with_kwargs=True)
            module.register_forward_hook(whole.drop_last_position)
    for module in model.modules():
        setattr(module, PREPARED, True)
    return model


def save_memory(model: nn.Module) -> None:
    """What the process's `StripedParallelismConfig` asks of the model: loss tiles, kept attention."""
    config = active_config()
    if getattr(config, "loss_tile_size", None) is not None:
        tile_loss(model, config.loss_tile_size)
    if getattr(config, "keep_attention", False):
        keep_attention_in_checkpoints(model)


def _share_heads(model: nn.Module) -> None:
    if active_context() is not None and hasattr(model, "config"):
        config = model.config.get_text_config()
        query_heads = getattr(config, "num_attention_heads", 1)
        key_heads = getattr(config, "num_key_value_heads", None) or query_heads
        active_config().share_heads(query_heads, key_heads)


def check_layers(model: nn.Module) -> None:
    """Raise `UnsupportedFeatureError` for layers that would see their stripe alone."""
    if not getattr(model, "_supports_attention_backend", True):
        raise UnsupportedFeatureError(
            f"{type(model).__name__} has attention of its own, which attn_implementation does not replace. "
            "Use a model whose attention goes through Transformers' attention interface."
        )
    loss_type = getattr(model, "loss_type", None)
    if loss_type is not None and LOSS_MAPPING.get(loss_type) is not ForCausalLMLoss:
        raise UnsupportedFeatureError(
            f"Striped training is for causal language models; received {type(model).__name__}, whose loss is "
            f"{loss_type}: it would read a stripe's last token, or labels that are shifted, as something else."
        )
    reasons = {
        f"{type(module).__name__} ({name})"
        for name, module in model.named_modules()
        if isinstance(module, _MIXES_TOKENS) and not _belongs_to_another_modality(name)
    }
    if getattr(model, "_is_stateful", False):
        reasons.add("a recurrent state")
    if reasons:
        raise UnsupportedFeatureError(
            f"{type(model).__name__} mixes tokens by other means than attention, which stripes would cut: "
            f"{', '.join(sorted(reasons)[:4])}. Use a model whose layers mix tokens by attention alone."
        )
    for module in model.modules():
        if hasattr(module, "create_position_ids_from_input_ids"):
            raise UnsupportedFeatureError(
                f"{type(model).__name__} numbers positions from its padding token on, not from 0 "
                f"({type(module).__name__}), which a stripe cannot see. Use a model that takes "
                "position_ids from 0."
            )


def _belongs_to_another_modality(name: str) -> bool:
    """Encoders of images and sound, which a batch of text does not run."""
    return any(part in name for part in ("vision", "visual", "image", "audio", "vqmodel", "speech"))


def _is_length_dependent_rotary(module: nn.Module) -> bool:
    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(isinstance(kind, str) and rope_depends_on_length(kind) for kind in kinds)


class WholeSequence:
    """The largest position of a striped batch over all ranks, as its rotary modules see it."""

    def __init__(self):
        self.last_position: Tensor | None = None

    def see(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Before the model: the largest of the ranks' positions; None for an ordinary batch."""
        cp = active_context()
        self.last_position = None
        if cp is None or CU_SEQLENS_KEY not in kwargs:
            return
        if kwargs.get("position_ids") is None:
            raise ConfigurationError(
                "A striped batch must have position_ids, which RoPE takes its frequencies from; received "
                f"{sorted(kwargs)}. Pass the batch of StripedDataCollator on unchanged."
            )
        self.last_position = kwargs["position_ids"].max()
        dist.all_reduce(self.last_position, dist.ReduceOp.MAX, group=cp.group)

    def add_last_position(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]):
        """Before a rotary module: one more position a row, the last of the whole sequence."""
        if self.last_position is None:
            return None
        positions = kwargs.get("position_ids", args[1] if len(args) > 1 else None)
        last = self.last_position.to(positions).expand(*positions.shape[:-1], 1)
        positions = torch.cat([positions, last], -1)
        if "position_ids" in kwargs:
            return args, {**kwargs, "position_ids": positions}
        return (args[0], positions, *args[2:]), kwargs

    def drop_last_position(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """After a rotary module: without the extra position."""
        if self.last_position is None:
            return None
        if isinstance(output, tuple):
            return tuple(part[..., :-1, :] for part in output)
        return output[..., :-1, :]
