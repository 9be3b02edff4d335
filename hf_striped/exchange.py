"""How keys and values reach the other ranks, and how their gradients come home.

    ring    one block at a time from neighbour to neighbour, in flight while the one before is used; dk and dv
            travel on with their keys. At most two remote blocks are alive.
    gather  all blocks at once, and the sums of dk and dv scattered at the end, in the memory of all blocks:
            for links on which waiting for P messages one after another costs more than that.

A forward pass takes `blocks`; a backward pass takes `blocks` and gives each block's gradients to `add`.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from hf_striped.context import ContextParallel
from hf_striped.meter import WAITING, count_sent, measured
from hf_striped.ring import (
    RingStep,
    Shift,
    pack_pair,
    ring_schedule,
    rotate_key_value,
    start_shift,
    unpack_pair,
)

RING, GATHER = "ring", "gather"
EXCHANGES = (RING, GATHER)


class RingExchange:
    """Neighbour to neighbour.

    Args:
        cp: the context-parallel group.
        key: this rank's keys `[local_tokens, key_heads, head_dim]`.
        value: this rank's values `[local_tokens, key_heads, value_head_dim]`.
        steps: ring steps that hold a pair, from 1 (this rank's own keys) to `cp.size`.
    """

    def __init__(self, cp: ContextParallel, key: Tensor, value: Tensor, steps: int):
        self._cp, self._key, self._value, self._steps = cp, key, value, steps
        self._home: Tensor | None = None
        self._block: Tensor | None = None
        self._incoming: Shift | None = None

    def blocks(self) -> Iterator[tuple[RingStep, Tensor, Tensor]]:
        """Each step with its keys and values, this rank's own first."""
        return rotate_key_value(self._cp, self._key, self._value, self._steps)

    def start_gradients(self, dtype: torch.dtype) -> None:
        """Before the first block of a backward pass: gradients are summed up in `dtype`."""
        self._home = self._key.new_zeros(self._key.numel() + self._value.numel(), dtype=dtype)

    def gradients_of(self, step: RingStep) -> tuple[Tensor, Tensor]:
        """Zeros in the shapes of the step's keys and values, to add its gradients to."""
        self._block = self._home if step.index == 0 else torch.zeros_like(self._home)
        return unpack_pair(self._block, self._key, self._value)

    def send_gradients(self, step: RingStep) -> None:
        """After the step: its gradients travel on with those that came before, from the last step home."""
        if step.index == 0:
            return
        if self._incoming is not None:
            self._block += self._incoming.wait()
            self._incoming = None  # its buffers go before the next ones come
        last = step.index == self._steps - 1
        self._incoming = start_shift(self._cp, self._block, distance=-step.index if last else 1)

    def collect_gradients(self) -> tuple[Tensor, Tensor]:
        """After the last step: dk and dv of this rank's own keys and values."""
        if self._incoming is not None:
            self._home += self._incoming.wait()
        return unpack_pair(self._home, self._key, self._value)


class GatherExchange(RingExchange):
    """All blocks at once; the same steps in the same order."""

    def blocks(self) -> Iterator[tuple[RingStep, Tensor, Tensor]]:
        own = pack_pair(self._key, self._value)
        every = own.new_empty((self._cp.size, own.numel()))
        count_sent(own, self._cp.size - 1)
        with measured("ring gather", own.device, WAITING):
            dist.all_gather_single(every.view(-1), own, group=self._cp.group)
        for step in ring_schedule(self._cp.size, self._cp.rank, self._steps):
            yield step, *unpack_pair(every[step.key_rank], self._key, self._value)

    def start_gradients(self, dtype: torch.dtype) -> None:
        numel = self._key.numel() + self._value.numel()
        self._home = self._key.new_zeros((self._cp.size, numel), dtype=dtype)

    def gradients_of(self, step: RingStep) -> tuple[Tensor, Tensor]:
        return unpack_pair(self._home[step.key_rank], self._key, self._value)

    def send_gradients(self, step: RingStep) -> None:
        pass

    def collect_gradients(self) -> tuple[Tensor, Tensor]:
        own = self._home.new_empty(self._home.shape[1])
        count_sent(own, self._cp.size - 1)
        with measured("ring scatter", own.device, WAITING):
            dist.reduce_scatter_single(own, self._home.view(-1), group=self._cp.group)
        return unpack_pair(own, self._key, self._value)


def make_exchange(
    name: str, cp: ContextParallel, key: Tensor, value: Tensor, steps: int
) -> RingExchange:
    """The exchange called `name`; a single step exchanges nothing."""
    exchange = GatherExchange if name == GATHER and steps > 1 else RingExchange
    return exchange(cp, key, value, steps)
