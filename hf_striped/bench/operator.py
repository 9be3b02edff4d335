"""The attention operator in all layouts, on the ranks of a process group."""

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hf_striped.bench.baselines import OneProcess
from hf_striped.bench.layouts import Layout, group_of, make_layout
from hf_striped.bench.measure import (
    Sample,
    barrier,
    matmul_flops,
    peak_memory,
    synchronise,
)
from hf_striped.bench.problem import Problem
from hf_striped.meter import WAITING, Meter


class Shape(NamedTuple):
    """Attention of one layer."""

    heads: int
    key_heads: int
    head_dim: int
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


def document_bounds(kind: str, row_length: int, mean: int = 2048, seed: int = 0) -> list[int]:
    """The bounds of one document ("dense"), or of documents of lognormal lengths ("packed")."""
    if kind == "dense":
        return [0, row_length]
    generator = torch.Generator().manual_seed(seed)
    bounds, sigma = [0], 1.0
    while bounds[-1] < row_length:
        drawn = torch.empty(()).log_normal_(0.0, sigma, generator=generator)
        length = max(1, int(drawn * mean / 2.718281828 ** (sigma**2 / 2)))
        bounds.append(min(bounds[-1] + length, row_length))
    return bounds


def run_operator(
    shape: Shape,
    problem: Problem,
    names: Sequence[str],
    repeats: int,
    device: torch.device,
    progress: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Time each layout `repeats` times, in turn; the figures of all ranks together, a layout each.

    Seconds are medians over repeats of the slowest rank; bytes are of one rank.
    """
    size = dist.get_world_size() if dist.is_initialized() else 1
    cp = group_of(size)
    generator = torch.Generator().manual_seed(0)
    whole = [
        torch.randn(problem.row_length, heads, shape.head_dim, generator=generator)
        for heads in (shape.heads, shape.key_heads, shape.key_heads, shape.heads)
    ]
    layouts = [make_layout(name, problem, cp) for name in names]
    rows = [
        [tensor[layout.tokens()].to(device, shape.torch_dtype) for tensor in whole]
        for layout in layouts
    ]
    del whole
    samples: list[list[Sample]] = [[] for _ in layouts]
    memory = []
    for layout, row in zip(layouts, rows, strict=True):  # warms up, too
        barrier()
        runs = cp.rank == 0 or not isinstance(layout, OneProcess)
        memory.append(peak_memory(lambda: _passes(layout, row, device), device) if runs else 0)  # noqa: B023
        progress()
    rate = matmul_flops(device, shape.torch_dtype)
    for _ in range(repeats):
        for layout, row, found in zip(layouts, rows, samples, strict=True):
            barrier()
            if cp.rank == 0 or not isinstance(layout, OneProcess):
                found.append(_passes(layout, row, device))
            else:
                found.append(Sample(0.0, 0.0, 0.0, 0))
            progress()
    barrier()
    rate = max(rate, matmul_flops(device, shape.torch_dtype))
    return _collect(shape, problem, layouts, samples, memory, rate, size)


def _passes(layout: Layout, row: Sequence[torch.Tensor], device: torch.device) -> Sample:
    query, key, value, dout = row
    with Meter() as meter:
        start = perf_counter()
        out, lse = layout.forward(query, key, value)
        synchronise(device)
        middle = perf_counter()
        layout.backward(dout, query, key, value, out, lse)
        synchronise(device)
        end = perf_counter()
    return Sample(middle - start, end - middle, meter.seconds(WAITING), meter.sent)


def _collect(shape, problem, layouts, samples, memory, rate, size) -> list[dict[str, Any]]:
    mine = [(found, peak) for found, peak in zip(samples, memory, strict=True)]
    every: list[Any] = [mine]
    if size > 1:
        every = [None] * size
        dist.all_gather_object(every, mine)
    figures = []
    for index, layout in enumerate(layouts):
        found = [rank[index][0] for rank in every]
        total = [max(s.forward + s.backward for s in repeat) for repeat in zip(*found, strict=True)]
        processes = 1 if isinstance(layout, OneProcess) else size
        flops = problem.pairs * shape.heads * shape.head_dim * (4 + 10)
        seconds = median(total)
        figures.append(
            {
                "layout": layout.name,
                "row_length": problem.row_length,
                "documents": len(problem.bounds) - 1,
                "sliding_window": problem.sliding_window,
                "seconds": seconds,
                "all_seconds": total,
                "forward": median(max(s.forward for s in r) for r in zip(*found, strict=True)),
                "backward": median(max(s.backward for s in r) for r in zip(*found, strict=True)),
                "waiting": median(max(s.waiting for s in r) for r in zip(*found, strict=True)),
                "sent_bytes": max(s.sent for rank in found for s in rank),
                "peak_bytes": max(rank[index][1] for rank in every),
                "flops_of_matmul": flops / seconds / processes / rate,
            }
        )
    return figures
