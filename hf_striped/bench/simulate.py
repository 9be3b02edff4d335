"""The critical path of P ranks, from the real kernels of their ring steps run one after another here.

All ranks of a striped ring do the same work at a step to within a token; the slowest of those measured is the step's
time, or the transfer of the next block if that takes longer. Forward and backward passes are timed.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch

from hf_striped.bench.baselines import OneProcess
from hf_striped.bench.measure import synchronise
from hf_striped.bench.operator import Shape
from hf_striped.bench.problem import Problem
from hf_striped.kernels import choose_kernel
from hf_striped.kernels.base import ScoreRule
from hf_striped.packing import block_spans, block_window
from hf_striped.ring import ring_schedule


def simulate(
    shape: Shape,
    problem: Problem,
    size: int,
    ranks: Sequence[int],
    bandwidth: float,
    repeats: int,
    device: torch.device,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Seconds of the critical path, and of one process with the whole row.

    Args:
        shape: the layer's.
        problem: the row's documents and window.
        size: ranks of the ring.
        ranks: those whose kernels are timed.
        bandwidth: bytes a second between neighbours.
        repeats: how often each kernel and one process are timed, in turn; the least counts, which other work
            on the machine lengthens the least.
        device: where the kernels run.
    """
    local, dtype = problem.row_length // size, shape.torch_dtype
    kernel = choose_kernel("auto", device, dtype)

    def row(heads: int, length: int = local) -> torch.Tensor:
        return torch.randn(length, heads, shape.head_dim, device=device).to(dtype)

    query, dout = row(shape.heads), row(shape.heads)
    key, value = row(shape.key_heads), row(shape.key_heads)
    out, lse = torch.zeros_like(query), torch.full((local, shape.heads), 9.0, device=device)
    steps = size if problem.sliding_window is None else min(size, problem.sliding_window)
    times = torch.full((len(ranks), steps, 2), torch.inf)
    alone = _one_process(shape, problem, row, device)
    whole = torch.inf
    for _ in range(repeats):  # both in turn, so that a slow minute slows both
        for index, rank in enumerate(ranks):
            for step in ring_schedule(size, rank, steps):
                window = problem.sliding_window
                if window is not None:
                    window = block_window(window, size, rank, step.key_rank)
                spans = block_spans(problem.bounds, size, rank, step.key_rank)
                blocks = spans, ScoreRule(problem.scale, None, window)
                forward = kernel.forward(query, key, value, *blocks)
                backward = kernel.backward(dout, query, key, value, out, lse, *blocks)
                for column, pieces in enumerate((forward, backward)):
                    seconds = _seconds(partial(deque, pieces, 0), device)
                    times[index, step.index, column].clamp_(max=seconds)
            progress()
        whole = min(whole, _seconds(alone, device))
        progress()
    block = (key.numel() + value.numel()) * key.element_size()
    transfers = torch.tensor([block / bandwidth, block * (1 + 4 / key.element_size()) / bandwidth])
    kernels = times.max(0).values  # [steps, passes], of the slowest rank
    overlapped = kernels.clone()
    overlapped[:-1] = torch.maximum(kernels[:-1], transfers)
    last_hop = (
        4 * (key.numel() + value.numel()) / bandwidth
    )  # dk and dv come home; nothing hides it
    return {
        "ranks": size,
        "measured_ranks": list(ranks),
        "row_length": problem.row_length,
        "documents": len(problem.bounds) - 1,
        "sliding_window": problem.sliding_window,
        "bandwidth": bandwidth,
        "kernel_seconds": kernels.sum().item(),
        "seconds": overlapped.sum().item() + (last_hop if steps > 1 else 0.0),
        "one_process_seconds": whole,
        "kernels_of_ideal": kernels.sum().item() / (whole / size),
        "step_seconds": kernels.sum(1).tolist(),
    }


def _seconds(compute: Callable[[], Any], device: torch.device) -> float:
    start = perf_counter()
    compute()
    synchronise(device)
    return perf_counter() - start


def _one_process(
    shape: Shape, problem: Problem, row: Callable[..., torch.Tensor], device: torch.device
) -> Callable[[], None]:
    """The whole row, as PyTorch's sdpa would compute it."""
    length = problem.row_length
    query, key, value, dout = (
        row(heads, length) for heads in (shape.heads, shape.key_heads, shape.key_heads, shape.heads)
    )
    layout = OneProcess(problem)

    def compute() -> None:
        out, lse = layout.forward(query, key, value)
        layout.backward(dout, query, key, value, out, lse)

    return compute
