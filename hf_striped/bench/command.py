"""The command line of the benchmark."""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from hf_striped.bench.layouts import LAYOUTS, multiple_of
from hf_striped.bench.operator import Shape, document_bounds, run_operator
from hf_striped.bench.page import page, page_of_files
from hf_striped.bench.plots import figure_class, plot
from hf_striped.bench.problem import Problem
from hf_striped.bench.simulate import simulate
from hf_striped.bench.training import run_training
from hf_striped.errors import ConfigurationError
from hf_striped.machine import describe_machine
from hf_striped.processes import device_of, run_on_ranks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2, help="processes to start, unless launched")
    parser.add_argument("--threads", type=int, default=1, help="threads of a process")
    parser.add_argument("--seq-len", type=int, nargs="*", default=[8192], help="tokens of a row")
    parser.add_argument("--layouts", nargs="*", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--key-heads", type=int, default=None, help="default: as many as --heads")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--documents", choices=["dense", "packed"], nargs="*", default=["dense"])
    parser.add_argument("--mean-length", type=int, default=2048, help="of packed documents")
    parser.add_argument("--sliding-window", type=int, default=None)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--model",
        nargs="*",
        default=[],
        help='whole steps of these: "tiny", a folder, a .gguf file',
    )
    parser.add_argument(
        "--checkpointing", action="store_true", help="whole steps with gradient checkpointing"
    )
    parser.add_argument("--simulate", type=int, nargs="*", default=[], metavar="P")
    parser.add_argument("--simulate-ranks", type=int, default=None, help="ranks to time (all)")
    parser.add_argument("--bandwidth", type=float, default=10.0, help="GB/s between neighbours")
    parser.add_argument("--output", type=Path, default=Path("bench.json"))
    parser.add_argument("--plot", action="store_true", help="draw PNG files beside --output")
    parser.add_argument("--time-limit", type=float, default=3600.0, help="seconds, for all")


def add_page_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", type=Path, nargs="+", help="JSON files of hf-striped bench")
    parser.add_argument("--output", type=Path, default=Path("benchmarks.md"))


def write_page(options: argparse.Namespace) -> int:
    """Write the page of results."""
    options.output.write_text(page_of_files(options.results, options.output.parent))
    return 0


def run(options: argparse.Namespace) -> int:
    """Measure, on processes of its own unless it was launched; the exit code."""
    _check(options)
    return run_on_ranks(_on_rank, options.ranks, options.threads, options.time_limit, options)


def _check(options: argparse.Namespace) -> None:
    ranks = int(os.environ.get("WORLD_SIZE", options.ranks))
    if options.plot:
        figure_class()
    if not options.output.parent.is_dir():
        raise ConfigurationError(f"There is no folder {options.output.parent} for --output.")
    for length in options.seq_len:
        if length % multiple_of(options.layouts, ranks):
            raise ConfigurationError(
                f"--seq-len must be a multiple of {multiple_of(options.layouts, ranks)} for {ranks} ranks and the "
                f"layouts {options.layouts}; received {length}."
            )
    for size in options.simulate:
        if any(length % size for length in options.seq_len):
            raise ConfigurationError(
                f"--seq-len must be a multiple of --simulate; received {options.seq_len}, {size}."
            )


def _on_rank(rank: int, size: int, options: argparse.Namespace) -> int:
    result = measure(options, rank, size, device_of(rank))
    if rank == 0:
        options.output.write_text(json.dumps(result, indent=1) + "\n")
        print(page([result]))
        written = plot(result, options.output.with_suffix("")) if options.plot else []
        print(f"Written: {', '.join(map(str, [options.output, *written]))}")
    return 0


def measure(
    options: argparse.Namespace, rank: int, size: int, device: torch.device
) -> dict[str, Any]:
    """All that `options` asks for, on every rank; the result is rank 0's."""
    key_heads = options.key_heads or options.heads
    shape = Shape(options.heads, key_heads, options.head_dim, options.dtype)
    problems = [
        Problem(
            document_bounds(kind, length, options.mean_length),
            options.sliding_window,
            options.head_dim**-0.5,
        )
        for length in options.seq_len
        for kind in options.documents
    ]
    steps = len(problems) * len(options.layouts) * (1 + options.repeats)
    steps += len(options.model) * len(problems) * 2 * (1 + options.repeats)
    shown = {size: options.simulate_ranks or size for size in options.simulate}
    steps += len(problems) * options.repeats * sum(n + 1 for n in shown.values())
    with tqdm(total=steps, disable=rank != 0, unit="run") as bar:
        progress: Callable[[], None] = partial(bar.update, 1)
        operator, training, simulated = [], [], []
        for problem in problems if options.layouts else ():
            operator += run_operator(
                shape, problem, options.layouts, options.repeats, device, progress
            )
        for name in options.model:
            for problem in problems:
                arguments = name, problem.bounds, options.repeats, options.dtype, device
                training.append(run_training(*arguments, options.checkpointing, progress))
        for count, timed in shown.items():
            for problem in problems if rank == 0 else ():
                ranks = [count * index // timed for index in range(timed)]
                bandwidth = options.bandwidth * 1e9
                simulated.append(
                    simulate(
                        shape, problem, count, ranks, bandwidth, options.repeats, device, progress
                    )
                )
        dist.barrier()
    return {
        "command": shlex.join(["hf-striped", "bench", *(a for a in sys.argv[1:] if a != "bench")]),
        "machine": describe_machine(device),
        "ranks": size,
        "threads": options.threads,
        "shape": shape._asdict(),
        "repeats": options.repeats,
        "operator": operator,
        "training": training,
        "simulated": simulated,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m hf_striped.bench`, which `accelerate launch` can start on every rank."""
    parser = argparse.ArgumentParser("hf_striped.bench", description=sys.modules[__name__].__doc__)
    add_arguments(parser)
    return run(parser.parse_args(argv))
