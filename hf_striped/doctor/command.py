"""The command line of the doctor."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from hf_striped.context import ContextParallel
from hf_striped.doctor.environment import check_kernels, check_ranks, check_versions
from hf_striped.doctor.links import check_links
from hf_striped.doctor.parity import TOLERANCES, Trial, check_parity
from hf_striped.doctor.report import Report
from hf_striped.errors import ConfigurationError, StripedError
from hf_striped.integrations.accelerate import StripedParallelismConfig
from hf_striped.kernels import AUTO, KERNELS
from hf_striped.models import config_of
from hf_striped.processes import device_of, launched, run_on_ranks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", help='prove parity on it: a folder, a .gguf file, a hub name, or "tiny"'
    )
    parser.add_argument(
        "--context-parallel-size", type=int, default=None, help="default: all ranks (2 if alone)"
    )
    parser.add_argument("--seq-len", type=int, default=512, help="tokens of the row (default: 512)")
    parser.add_argument("--dtype", choices=list(TOLERANCES), default="float32")
    parser.add_argument(
        "--kernel", choices=[AUTO, *KERNELS], default=AUTO, help="the block kernel (default: auto)"
    )
    parser.add_argument("--threads", type=int, default=1, help="threads of a process")
    parser.add_argument("--json", type=Path, default=None, help="write the findings there, too")
    parser.add_argument("--time-limit", type=float, default=600.0, help="seconds, for all")


def run(options: argparse.Namespace) -> int:
    """Look, on processes of its own unless it was launched; 0 if all is well, 1 if not.

    Raises:
        ConfigurationError: options that cannot be.
    """
    ranks = int(os.environ["WORLD_SIZE"]) if launched() else options.context_parallel_size or 2
    for name in ("seq_len", "threads"):
        if getattr(options, name) < 1:
            raise ConfigurationError(
                f"--{name.replace('_', '-')} must be 1 or more; received {getattr(options, name)}."
            )
    if options.context_parallel_size not in (None, ranks):
        raise ConfigurationError(
            "The doctor's ring goes through every process; received --context-parallel-size "
            f"{options.context_parallel_size} for {ranks} process(es). Launch as many, or leave it out."
        )
    if ranks < 1:
        raise ConfigurationError(f"--context-parallel-size must be 1 or more; received {ranks}.")
    if options.seq_len < 2 * ranks:
        raise ConfigurationError(
            f"--seq-len must be at least two tokens a rank; received {options.seq_len} for {ranks} rank(s)."
        )
    if options.json is not None and not options.json.parent.is_dir():
        raise ConfigurationError(f"There is no folder {options.json.parent} for --json.")
    if options.model is not None:
        config_of(options.model)  # one that is not there is an error before any process is started
    return run_on_ranks(examine, ranks, options.threads, options.time_limit, options)


def examine(rank: int, size: int, options: argparse.Namespace) -> int:
    """All checks, on every rank; rank 0 prints, and every rank has its exit code."""
    device, report = device_of(rank), Report()
    check_versions(report, device)
    check_kernels(report, device, getattr(torch, options.dtype))
    check_ranks(report, device)
    cp = ContextParallel.from_group(dist.group.WORLD)
    check_links(report, cp, device)
    if options.model is not None:
        trial = Trial(options.model, options.seq_len, options.dtype)
        config = StripedParallelismConfig(size, kernel=options.kernel)
        Accelerator(cpu=device.type == "cpu", parallelism_config=config)
        try:
            check_parity(report, trial, cp, device)
        finally:
            AcceleratorState._reset_state()
    report.gather()
    if rank == 0:
        print(report.text(), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(report.as_dict(), indent=1) + "\n")
    return 0 if report.well else 1


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m hf_striped.doctor`, which `accelerate launch` can start on every rank."""
    parser = argparse.ArgumentParser("hf_striped.doctor", description=sys.modules[__name__].__doc__)
    add_arguments(parser)
    options = parser.parse_args(argv)
    try:
        return run(options)
    except StripedError as error:
        print(f"hf_striped.doctor: {error}", file=sys.stderr)
        return 2
