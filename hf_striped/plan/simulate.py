"""The bytes and the arithmetic of a training step, counted on tensors that have sizes and no data.

The model's own forward and backward pass runs on PyTorch's fake tensors, so that whatever a model does is
counted as it does it: nothing is allocated, and nothing is estimated from names in a config.
"""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, PreTrainedConfig

from hf_striped.errors import UnsupportedFeatureError
from hf_striped.integrations.model import check_layers
from hf_striped.integrations.tiled_loss import TiledLoss
from hf_striped.integrations.transformers import ATTENTION_NAME, CU_SEQLENS_KEY
from hf_striped.plan.counter import AttentionShape, Counter

NOTHING, RECOMPUTE, KEEP_ATTENTION = "none", "layers", "layers, attention kept"
_LENGTHS = (2048, 4096)


@dataclass(frozen=True)
class Line:
    """A quantity that grows with the tokens of a rank: `fixed + tokens * a_token`."""

    fixed: float
    a_token: float

    def at(self, tokens: float) -> float:
        return self.fixed + self.a_token * tokens

    def plus(self, a_token: float) -> "Line":
        return Line(self.fixed, self.a_token + a_token)

    @classmethod
    def through(cls, first: float, second: float) -> "Line":
        """The line through what was counted at the two lengths."""
        slope = (second - first) / (_LENGTHS[1] - _LENGTHS[0])
        return cls(first - slope * _LENGTHS[0], slope)


@dataclass(frozen=True)
class Pass:
    """What one way to run the layers takes: bytes and flops (a multiply and an add are two)."""

    held: Line  # bytes that wait for the backward pass when the forward pass ends
    peak: Line  # the most bytes at once, forward and backward
    flops: Line  # of matrix products


@dataclass(frozen=True)
class Simulation:
    """A model's training step, as functions of the tokens of a rank."""

    parameters: int
    layer_parameters: int  # of the largest layer
    root_parameters: int  # of what is in no layer: embeddings, head, last norm
    layers: int
    input_bytes: int  # of one layer's input, a token
    layers_pass: dict[str, Pass]
    head: Pass
    ring: float  # bytes a token that attention works in, beside its inputs and outputs
    key_value: float  # bytes a token of one block of keys and values
    attention: tuple[AttentionShape, ...]


def simulate(
    config: PreTrainedConfig,
    *,
    bf16: bool,
    ring: bool = True,
) -> Simulation:
    """Run a training step of the model that `config` describes on tensors without data.

    Args:
        config: of a causal language model.
        bf16: whether the weights are fp32 and autocast computes in bf16; else all is fp32.
        ring: whether there are other ranks, whose keys, values and gradients arrive.

    Raises:
        UnsupportedFeatureError: a model that striped training refuses, or that needs data to run.
    """
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), _without_data():
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation=ATTENTION_NAME, dtype=torch.float32
            ).train()
            check_layers(model)
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            return _simulate(model, bf16, ring)
    except UnsupportedFeatureError:
        raise
    except Exception as error:
        raise UnsupportedFeatureError(
            "plan runs the model on tensors that have no data, which its code must allow; received "
            f"{config.model_type}: {type(error).__name__}: {error}. Measure it with hf-striped bench instead."
        ) from error


def _simulate(model: nn.Module, bf16: bool, ring: bool) -> Simulation:
    lists = (module for module in model.base_model.modules() if isinstance(module, nn.ModuleList))
    layers = max(lists, key=_size)
    sizes = [_size(layer) for layer in layers]
    counts = {NOTHING: _count_twice(model, _run_layers, bf16)}
    model.activation_checkpointing_enable({"use_reentrant": False})
    counts[RECOMPUTE] = _count_twice(model, _run_layers, bf16)
    head = _count_twice(model, _run_head, bf16)
    parameters = _size(model)
    block = counts[NOTHING][0]
    passes = {way: _pass(*found) for way, found in counts.items()}
    kept = block.attention_results / _LENGTHS[0]
    plain = passes[RECOMPUTE]
    passes[KEEP_ATTENTION] = Pass(
        plain.held.plus(kept), plain.peak.plus(kept * (1 - 1 / len(layers))), plain.flops
    )
    return Simulation(
        parameters=parameters,
        layer_parameters=max(sizes),
        root_parameters=parameters - sum(sizes),
        layers=len(layers),
        input_bytes=model.config.get_text_config().hidden_size * 4,  # the residual stream is fp32
        layers_pass=passes,
        head=_pass(*head),
        ring=block.ring_bytes(ring) / _LENGTHS[0],
        key_value=block.key_value / _LENGTHS[0],
        attention=tuple(block.attention),
    )


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _pass(first: Counter, second: Counter) -> Pass:
    names = ("held", "peak", "flops")
    return Pass(**{n: Line.through(getattr(first, n), getattr(second, n)) for n in names})


def _run_layers(model: nn.Module, tokens: int) -> Tensor:
    ids = torch.zeros(1, tokens, dtype=torch.long)
    cu_seqlens = torch.tensor([0, tokens], dtype=torch.int32)
    batch = {"input_ids": ids, "position_ids": torch.arange(tokens)[None]}
    output = model.base_model(**batch, **{CU_SEQLENS_KEY: cu_seqlens}, use_cache=False)
    return output.last_hidden_state


def _run_head(model: nn.Module, tokens: int) -> Tensor:
    text = model.config.get_text_config()
    hidden = torch.zeros(1, tokens, text.hidden_size, requires_grad=True)
    labels = torch.zeros(1, tokens, dtype=torch.long)
    return TiledLoss(model, tokens).loss_of(model, model.loss_function, hidden, labels)


def _count_twice(
    model: nn.Module, run: Callable[[nn.Module, int], Tensor], bf16: bool
) -> tuple[Counter, Counter]:
    first, second = (_count(model, partial(run, model), n, bf16) for n in _LENGTHS)
    return first, second


def _count(model: nn.Module, run: Callable[[int], Tensor], tokens: int, bf16: bool) -> Counter:
    counter = Counter([*model.parameters(), *model.buffers()])
    with counter:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            result = run(tokens)
        counter.held = counter.now
        result.backward(torch.ones_like(result))
    return counter


@contextmanager
def _without_data() -> Any:
    """Within: what would read numbers of a batch does not, and experts take the way that works for all types."""
    with (
        patch("hf_striped.integrations.transformers.check_stripe", lambda *_: None),
        patch("transformers.integrations.moe._can_use_grouped_mm", lambda *_: False),
    ):
        yield
