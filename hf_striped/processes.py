"""Processes of one's own on this machine, for commands that are not started by `accelerate launch`."""

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.multiprocessing.spawn import ProcessExitedException

from hf_striped.errors import ConfigurationError


def launched() -> bool:
    """Whether a launcher started this process as one of several."""
    return "WORLD_SIZE" in os.environ


def run_on_ranks(
    function: Callable[..., int], ranks: int, threads: int, time_limit: float, *arguments: Any
) -> int:
    """Run `function(rank, ranks, *arguments)` on `ranks` new processes, or here if this process was launched.

    Args:
        function: of a module, so that a new process can import it; returns an exit code.
        ranks: processes to start; the launcher's count is used instead where there is one.
        threads: of each process.
        time_limit: seconds, for all of it, after which the processes are killed.

    Returns:
        0, or the first exit code that is not.

    Raises:
        ConfigurationError: it did not end in time.
        torch.multiprocessing.ProcessRaisedException: what a process raised; the others are stopped.
    """
    if launched():
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return _on_rank(rank, function, size, threads, time_limit, arguments)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port()))
    os.environ["OMP_NUM_THREADS"] = str(threads)
    processes = torch.multiprocessing.start_processes(
        _start,
        args=(function, ranks, threads, time_limit, arguments),
        nprocs=ranks,
        join=False,
        start_method="spawn",
    )
    deadline = monotonic() + time_limit
    try:
        while not processes.join(
            timeout=max(0.0, deadline - monotonic())
        ):  # one has ended, or none
            if monotonic() >= deadline:
                for process in processes.processes:
                    process.kill()
                raise ConfigurationError(
                    f"The processes were to end within --time-limit {time_limit:g} s, and did not. "
                    "Give them more time, or less to do."
                )
    except ProcessExitedException as ended:
        return ended.exit_code
    return 0


def device_of(rank: int) -> torch.device:
    """The GPU of a rank where there is one (shared where there are fewer), else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", rank))
    return torch.device("cuda", local % torch.cuda.device_count())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _start(
    rank: int,
    function: Callable[..., int],
    ranks: int,
    threads: int,
    time_limit: float,
    arguments: tuple,
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
    )
    if code := _on_rank(rank, function, ranks, threads, time_limit, arguments):
        raise SystemExit(code)


def _on_rank(
    rank: int,
    function: Callable[..., int],
    size: int,
    threads: int,
    time_limit: float,
    arguments: tuple,
) -> int:
    torch.set_num_threads(threads)
    device = device_of(rank)
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    several = device.type == "cuda" and torch.cuda.device_count() >= local_size
    if device.type == "cuda":
        torch.cuda.set_device(device)
    limit = timedelta(seconds=time_limit)
    if dist.is_initialized():  # by whoever launched this
        return function(rank, size, *arguments)
    dist.init_process_group("nccl" if several else "gloo", timeout=limit)
    try:
        return function(rank, size, *arguments)
    finally:
        dist.destroy_process_group()
