"""Models by name, for the commands that try one."""

from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from hf_striped.errors import ConfigurationError

TINY = "tiny"
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


def config_of(name: str) -> PreTrainedConfig:
    """The configuration called `name`: "tiny", or of a folder, a .gguf file or a hub name.

    Raises:
        ConfigurationError: there is no such model.
    """
    if name == TINY:
        return LlamaConfig(
            vocab_size=4096,
            hidden_size=256,
            intermediate_size=688,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2**20,
        )
    try:
        return AutoConfig.from_pretrained(*_place(name), **_gguf(name))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigurationError(
            f"MODEL must be a folder with a config.json, a .gguf file, a hub name that can be reached, or "
            f'"{TINY}"; received {name!r}: {error}'
        ) from error


def has_weights(name: str) -> bool:
    """Whether the model called `name` comes with weights; a hub name does."""
    if name == TINY or name.endswith(".json"):
        return False
    folder = Path(name)
    if not folder.is_dir():
        return True
    return any(True for pattern in _WEIGHTS for _ in folder.glob(pattern))


def model_of(name: str, attn_implementation: str, dtype: torch.dtype) -> nn.Module:
    """A model with random weights, the same in every process; for names see `config_of`."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        config_of(name), attn_implementation=attn_implementation, dtype=dtype
    ).train()


def trained_model_of(name: str, attn_implementation: str, dtype: torch.dtype) -> nn.Module:
    """A model with its own weights, where `has_weights`."""
    return AutoModelForCausalLM.from_pretrained(
        *_place(name), attn_implementation=attn_implementation, dtype=dtype, **_gguf(name)
    ).train()


def _place(name: str) -> tuple[str]:
    return (str(Path(name).parent) if name.endswith(".gguf") else name,)


def _gguf(name: str) -> dict[str, str]:
    return {"gguf_file": Path(name).name} if name.endswith(".gguf") else {}
