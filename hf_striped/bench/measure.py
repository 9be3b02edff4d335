"""Timing one rank's passes: interleaved over layouts, with waits, bytes and peak memory."""

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist

from hf_striped.ring import Shift


class Sample(NamedTuple):
    """One repeat on one rank: seconds, and bytes received."""

    forward: float
    backward: float
    waiting: float
    received: int


class Waits:
    """Seconds spent in waiting for shifts, and bytes that they brought."""

    def __init__(self):
        self.seconds, self.received = 0.0, 0


@contextmanager
def watched_shifts() -> Iterator[Waits]:
    """Within: the waits of all rings are timed."""
    waits, wait = Waits(), Shift.wait

    def timed(self: Shift) -> torch.Tensor:
        start = perf_counter()
        arrived = wait(self)
        waits.seconds += perf_counter() - start
        waits.received += arrived.numel() * arrived.element_size()
        return arrived

    with patch.object(Shift, "wait", timed):
        yield waits


def barrier() -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def synchronise(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory(function: Callable[[], Any], device: torch.device) -> int:
    """Bytes that `function` needs above what is held when it starts."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        return torch.cuda.max_memory_allocated(device) - before
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak starts anew
    except OSError:  # not Linux, or not allowed: the peak of the process's life
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        function()
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    before = _status("VmRSS")
    function()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(field))
    return int(line.split()[1]) * 1024


def matmul_flops(device: torch.device, dtype: torch.dtype, size: int = 1024) -> float:
    """Floating-point operations a second of a plain matmul here."""
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(5):
        start = perf_counter()
        left @ right
        synchronise(device)
        best = min(best, perf_counter() - start)
    return 2 * size**3 / best
