"""The layouts that are compared: each a forward and a backward pass over one rank's rows.

query, key, value, dout: [local_tokens, heads, head_dim]
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hf_striped.bench.baselines import Chunked, OneProcess
from hf_striped.bench.problem import Problem
from hf_striped.context import ContextParallel
from hf_striped.exchange import GATHER, RING
from hf_striped.ring_op import ring_attention, ring_attention_backward


class Layout(Protocol):
    """One way to spread a row over the ranks."""

    name: str

    def tokens(self) -> Tensor:
        """The global indices of this rank's tokens, in local order."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """`out` and `lse` `[local_tokens, heads]`."""

    def backward(
        self, dout: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of query, key and value."""


class Striped:
    """The product: token g on rank g mod P. With `exchange="gather"`, all keys and values gathered."""

    def __init__(self, problem: Problem, cp: ContextParallel, exchange: str = RING):
        self.name = "striped" if exchange == RING else "striped, all-gather"
        self._problem, self._cp = problem, cp
        bounds = torch.tensor(problem.bounds, dtype=torch.int32)
        rule = problem.scale, problem.sliding_window, None, None
        self._settings = (bounds, cp.group_name, "auto", exchange, *rule)

    def tokens(self) -> Tensor:
        return torch.arange(self._cp.rank, self._problem.row_length, self._cp.size)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return ring_attention(query, key, value, None, *self._settings)

    def backward(
        self, dout: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return ring_attention_backward(dout, query, key, value, out, lse, *self._settings)


def make_layout(name: str, problem: Problem, cp: ContextParallel) -> Layout:
    """The layout called `name`."""
    if name == "one-process":
        return OneProcess(problem)
    if name in ("striped", "all-gather"):
        return Striped(problem, cp, RING if name == "striped" else GATHER)
    return Chunked(name, problem, cp)


LAYOUTS = ("striped", "contiguous", "zigzag", "all-gather", "one-process")


def multiple_of(names: Sequence[str], size: int) -> int:
    """What a row's length must be a multiple of."""
    return 2 * size if "zigzag" in names else size


def group_of(size: int) -> ContextParallel:
    """The group of all ranks."""
    return ContextParallel.from_group(dist.group.WORLD if size > 1 else None)
