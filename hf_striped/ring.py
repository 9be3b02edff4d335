"""The ring: which rank's keys each step uses, and the moving of buffers between neighbours.

At step i rank r works on the keys of rank (r - i) mod P, which it received from rank r - 1.
The next step's buffer is in flight while this step computes.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hf_striped.context import ContextParallel
from hf_striped.meter import WAITING, count_sent, measured


class RingStep(NamedTuple):
    """Step `index` of the ring uses the keys and values of `key_rank`."""

    index: int
    key_rank: int


def ring_schedule(size: int, rank: int, steps: int | None = None) -> Iterator[RingStep]:
    """The first `steps` steps (default all) of `rank` in a ring of `size` ranks, its own keys first."""
    for index in range(size if steps is None else steps):
        yield RingStep(index, (rank - index) % size)


class Shift:
    """One tensor on its way along the ring while another arrives from as far the other way."""

    def __init__(self, cp: ContextParallel, sent: Tensor, received: Tensor, distance: int):
        self._tensors = (sent, received)  # alive until both transfers have ended
        count_sent(sent)
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, cp.neighbour(+distance), cp.group),
                dist.P2POp(dist.irecv, received, cp.neighbour(-distance), cp.group),
            ]
        )

    def wait(self) -> Tensor:
        """Wait for both transfers; returns the tensor that arrived."""
        with measured("ring wait", self._tensors[1].device, WAITING):
            for work in self._works:
                work.wait()
        return self._tensors[1]


def start_shift(
    cp: ContextParallel, tensor: Tensor, received: Tensor | None = None, distance: int = 1
) -> Shift:
    """Send `tensor` `distance` ranks on, and receive one of its shape from `distance` ranks back.

    Neither tensor may be written before `Shift.wait`.
    """
    return Shift(cp, tensor, torch.empty_like(tensor) if received is None else received, distance)


def pack_pair(first: Tensor, second: Tensor) -> Tensor:
    """Copy two tensors into one flat buffer, so that they travel as one message."""
    return torch.cat([first.reshape(-1), second.reshape(-1)])


def unpack_pair(buffer: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Views of `buffer` in the shapes of the two tensors that were packed."""
    return buffer[: first.numel()].view(first.shape), buffer[first.numel() :].view(second.shape)


def rotate_key_value(
    cp: ContextParallel, key: Tensor, value: Tensor, steps: int
) -> Iterator[tuple[RingStep, Tensor, Tensor]]:
    """Yield the keys and values of `steps` ranks in ring order, the next in flight while one is used.

    At most two remote blocks are alive: the one that is used and the one that arrives.

    Args:
        cp: the context-parallel group.
        key: this rank's keys `[local_tokens, key_heads, head_dim]`.
        value: this rank's values `[local_tokens, key_heads, value_head_dim]`.
        steps: ring steps that hold a pair, from 1 (this rank's own keys) to `cp.size`.
    """
    if steps == 1:
        yield RingStep(0, cp.rank), key, value
        return
    buffer = pack_pair(key, value)
    spare: Tensor | None = None
    for step in ring_schedule(cp.size, cp.rank, steps):
        shift = start_shift(cp, buffer, spare) if step.index + 1 < steps else None
        yield step, *unpack_pair(buffer, key, value)
        if shift is not None:
            buffer, spare = shift.wait(), buffer
