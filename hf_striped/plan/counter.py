"""Bytes and floating-point operations, counted from the operations that run."""

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry


@dataclass(frozen=True)
class AttentionShape:
    """One layer's attention: query heads times head dimensions of scores and values, and its window or chunks."""

    score_and_value_dims: int
    window: int | None = None
    chunk_size: int | None = None

    def flops(self, seq_len: int) -> float:
        """Of the forward pass over a row of one document; the backward pass has 2.5 times as many."""
        chunk = min(self.chunk_size or seq_len, seq_len)
        chunks, rest = divmod(seq_len, chunk)
        pairs = chunks * self._pairs(chunk) + self._pairs(rest)
        return 2.0 * self.score_and_value_dims * pairs

    def _pairs(self, length: int) -> int:
        window = min(self.window or length, length)
        return window * (window + 1) // 2 + (length - window) * window


class Counter(TorchDispatchMode):
    """Counts the bytes of the storages that live, from the operations that make them."""

    def __init__(self, known: list[Tensor]):
        super().__init__()
        self.now = self.peak = self.held = self.flops = 0
        self.attention: list[AttentionShape] = []
        self.key_value = self.attention_results = 0
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
        window, chunk_size = args[9:11]
        width = query.shape[1] * (query.shape[2] + value.shape[2])
        results = query[..., 0].numel()
        self.attention_results += results * (value.shape[2] * query.element_size() + 4)
        self.attention.append(AttentionShape(width, window, chunk_size))
        self.key_value = max(self.key_value, numbers * key.element_size())
        # backward: dq, dk and dv of this block and of the sum, in fp32
        wide = 4 * (query.numel() + 2 * numbers)
        wide += 4 * query.numel() if query.dtype != torch.float32 else 0
        self._working = max(self._working, wide)
        # two blocks of keys and values that arrived, and the sums that travel with them in fp32
        self._remote = max(self._remote, 2 * numbers * key.element_size() + 2 * numbers * 4)

    def ring_bytes(self, ring: bool) -> int:
        return self._working + (self._remote if ring else 0)
