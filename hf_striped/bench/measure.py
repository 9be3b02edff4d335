"""Timing one rank's passes: interleaved over layouts, with waits, bytes and peak memory."""

from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hf_striped.peak import peak_bytes, start_peak


class Sample(NamedTuple):
    """One repeat on one rank: seconds, and bytes sent."""

    forward: float
    backward: float
    waiting: float
    sent: int


def barrier() -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def synchronise(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory(function: Callable[[], Any], device: torch.device) -> int:
    """Bytes that `function` needs above what is held when it starts."""
    before = start_peak(device)
    function()
    return peak_bytes(device) - before


def matmul_flops(device: torch.device, dtype: torch.dtype, size: int = 2048) -> float:
    """Floating-point operations a second of a plain matmul here: the fastest of five, after one that warms up."""
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(6):
        start = perf_counter()
        left @ right
        synchronise(device)
        best = min(best, perf_counter() - start)
    return 2 * size**3 / best
