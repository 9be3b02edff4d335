"""Latency and bandwidth between neighbours of the ring, by the shift that the ring itself uses."""

from time import perf_counter

import torch
import torch.distributed as dist

from hf_striped.context import ContextParallel
from hf_striped.doctor.report import OK, Report
from hf_striped.ring import start_shift

_SIZES = (64, 2**20, 2**24)  # bytes
_REPEATS = 5


def check_links(report: Report, cp: ContextParallel, device: torch.device) -> None:
    """Each rank sends to the next while it receives from the one before, all at once, as in a ring step.

    Every rank calls it; the slowest rank's figures are in each one's report.
    """
    if cp.size == 1:
        report.add("links", OK, "one rank, none")
        return
    seconds = torch.tensor([_shift_seconds(cp, device, size) for size in _SIZES])
    slowest = seconds.to(device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=cp.group)
    for size, taken in zip(_SIZES, slowest.tolist(), strict=True):
        text = f"{1e6 * taken:.0f} us"
        if size >= 2**20:
            text = f"{size / taken / 1e9:.2f} GB/s each way ({1e3 * taken:.2f} ms)"
        report.add(f"link, {_named(size)}", OK, f"{text}, the slowest neighbour")


def _shift_seconds(cp: ContextParallel, device: torch.device, size: int) -> float:
    sent = torch.ones(size, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    best = float("inf")
    for _ in range(_REPEATS + 1):  # the first makes the connections
        dist.barrier(group=cp.group)
        start = perf_counter()
        start_shift(cp, sent, received).wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, perf_counter() - start)
    return best


def _named(size: int) -> str:
    return f"{size} B" if size < 2**20 else f"{size // 2**20} MiB"
