"""The bytes and the arithmetic of a training step, counted on tensors that have sizes and no data.

The model's own forward and backward pass runs on PyTorch's fake tensors, so that whatever a model does is
counted as it does it: nothing is allocated, and nothing is estimated from names in a config.
"""

import weakref
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry
from transformers import AutoModelForCausalLM, PreTrainedConfig

from hf_striped.errors import UnsupportedFeatureError
from hf_striped.integrations.checkpointing import keep_attention
from hf_striped.integrations.model import check_layers
from hf_striped.integrations.tiled_loss import TiledLoss
from hf_striped.integrations.transformers import ATTENTION_NAME, CU_SEQLENS_KEY

NOTHING, RECOMPUTE, KEEP_ATTENTION = "none", "layers", "layers, attention kept"
_LENGTHS = (2048, 4096)


@dataclass(frozen=True)
class Line:
    """A quantity that grows with the tokens of a rank: `fixed + tokens * a_token`."""

    fixed: float
    a_token: float

    def at(self, tokens: float) -> float:
        return self.fixed + self.a_token * tokens

    @classmethod
    def through(cls, first: float, second: float) -> "Line":
        """The line through what was counted at the two lengths."""
        slope = (second - first) / (_LENGTHS[1] - _LENGTHS[0])
        return cls(first - slope * _LENGTHS[0], slope)


@dataclass(frozen=True)
class AttentionShape:
    """One layer's attention: query heads times head dimensions of scores and values, and its window."""

    score_and_value_dims: int
    window: int | None

    def flops(self, seq_len: int) -> float:
        """Of the forward pass over a row of one document; the backward pass has 2.5 times as many."""
        window = min(self.window or seq_len, seq_len)
        pairs = window * (window + 1) / 2 + (seq_len - window) * window
        return 2 * self.score_and_value_dims * pairs


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
    progress: Callable[[], None] = lambda: None,
) -> Simulation:
    """Run a training step of the model that `config` describes on tensors without data.

    Args:
        config: of a causal language model.
        bf16: whether the weights are fp32 and autocast computes in bf16; else all is fp32.
        ring: whether there are other ranks, whose keys, values and gradients arrive.
        progress: called after each of eight passes.

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
            return _simulate(model, bf16, ring, progress)
    except UnsupportedFeatureError:
        raise
    except Exception as error:
        raise UnsupportedFeatureError(
            "plan runs the model on tensors that have no data, which its code must allow; received "
            f"{config.model_type}: {type(error).__name__}: {error}. Measure it with hf-striped bench instead."
        ) from error


def _simulate(model: nn.Module, bf16: bool, ring: bool, progress: Callable[[], None]) -> Simulation:
    layers = next(m for m in model.base_model.modules() if isinstance(m, nn.ModuleList))
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    counts: dict[str, list[_Counter]] = {}
    for way in (NOTHING, RECOMPUTE, KEEP_ATTENTION):
        if way != NOTHING:
            policy = {"context_fn": keep_attention} if way == KEEP_ATTENTION else {}
            model.activation_checkpointing_enable({"use_reentrant": False, **policy})
        counts[way] = [_count(model, lambda n: _run_layers(model, n), n, bf16) for n in _LENGTHS]
        progress()
    head = [_count(model, lambda n: _run_head(model, n), n, bf16) for n in _LENGTHS]
    progress()
    parameters = sum(p.numel() for p in model.parameters())
    block = counts[NOTHING][0]
    return Simulation(
        parameters=parameters,
        layer_parameters=max(sizes),
        root_parameters=parameters - sum(sizes),
        layers=len(layers),
        input_bytes=model.config.get_text_config().hidden_size * 4,  # the residual stream is fp32
        layers_pass={way: _pass(*found) for way, found in counts.items()},
        head=_pass(*head),
        ring=block.ring_bytes(ring) / _LENGTHS[0],
        key_value=block.key_value / _LENGTHS[0],
        attention=tuple(block.attention),
    )


def _pass(first: "_Counter", second: "_Counter") -> Pass:
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


def _count(model: nn.Module, run: Callable[[int], Tensor], tokens: int, bf16: bool) -> "_Counter":
    counter = _Counter([*model.parameters(), *model.buffers()])
    with counter:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            result = run(tokens)
        counter.held = counter.now
        result.backward(torch.ones_like(result))
    return counter


class _Counter(TorchDispatchMode):
    """Counts the bytes of the storages that live, from the operations that make them."""

    def __init__(self, known: list[Tensor]):
        super().__init__()
        self.now = self.peak = self.held = self.flops = 0
        self.attention: list[AttentionShape] = []
        self.key_value = 0
        self._working = self._remote = 0
        gradients = [tensor.grad for tensor in known if tensor.grad is not None]
        self._known = {tensor.untyped_storage()._cdata for tensor in [*known, *gradients]}
        self._live: dict[int, int] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.hf_striped.ring_attention.default:
            self._see_attention(args)
        result = function(*args, **(kwargs or {}))
        count = flop_registry.get(getattr(function, "_overloadpacket", None))
        if count is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=result)
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                self._see(tensor.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known or key in self._live:
            return
        self._live[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.now -= self._live.pop(key, 0)

    def _see_attention(self, args: tuple) -> None:
        """What the ring works in, which its operator does not show; see ring_op.py and exchange.py."""
        query, key, value = args[:3]
        numbers = key.numel() + value.numel()
        window = args[9]
        width = query.shape[1] * (query.shape[2] + value.shape[2])
        self.attention.append(AttentionShape(width, window))
        self.key_value = max(self.key_value, numbers * key.element_size())
        # backward: dq, dk and dv of this block and of the sum, in fp32
        wide = 4 * (query.numel() + 2 * numbers)
        wide += 4 * query.numel() if query.dtype != torch.float32 else 0
        self._working = max(self._working, wide)
        # two blocks of keys and values that arrived, and the sums that travel with them in fp32
        self._remote = max(self._remote, 2 * numbers * key.element_size() + 2 * numbers * 4)

    def ring_bytes(self, ring: bool) -> int:
        return self._working + (self._remote if ring else 0)


@contextmanager
def _without_data() -> Any:
    """Within: what would read numbers of a batch does not, and experts take the way that works for all types."""
    with (
        patch("hf_striped.integrations.transformers.check_stripe", lambda *_: None),
        patch("transformers.integrations.moe._can_use_grouped_mm", lambda *_: False),
    ):
        yield
