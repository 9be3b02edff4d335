"""hf_striped: exact long-context training for Hugging Face models by Striped Attention.

Importing the package registers `attn_implementation="striped_ring"` with Transformers.
"""

from importlib.metadata import version as _version

from hf_striped.attention import striped_ring_attention
from hf_striped.errors import (
    BatchError,
    ConfigurationError,
    KernelUnavailableError,
    StripedError,
    UnsupportedFeatureError,
)
from hf_striped.integrations import callback as _callback
from hf_striped.integrations import transformers as _transformers
from hf_striped.integrations.accelerate import StripedParallelismConfig
from hf_striped.integrations.checkpointing import keep_attention
from hf_striped.integrations.collator import StripedDataCollator
from hf_striped.integrations.model import prepare_model
from hf_striped.integrations.telemetry import StripedTelemetry
from hf_striped.integrations.trainer import StripedTrainer, StripedTrainerMixin
from hf_striped.striping import stripe, unstripe

__version__ = _version("hf_striped")

__all__ = [
    "BatchError",
    "ConfigurationError",
    "KernelUnavailableError",
    "StripedDataCollator",
    "StripedError",
    "StripedParallelismConfig",
    "StripedTelemetry",
    "StripedTrainer",
    "StripedTrainerMixin",
    "UnsupportedFeatureError",
    "keep_attention",
    "prepare_model",
    "stripe",
    "striped_ring_attention",
    "unstripe",
]

_transformers.register()
_callback.register()
