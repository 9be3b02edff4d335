"""One pool of gloo rank processes for the whole session, which is sent functions to run.

A job names a top-level function; ranks 0..world-1 form a fresh process group, call it as
`function(rank, world, *args)`, and their results come back in rank order. Each job has a time limit:
a hang is a failure, and the pool is started afresh for the next job.
"""

import multiprocessing
import os
import shutil
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from time import monotonic
from typing import Any

MAX_RANKS = 4
TIME_LIMIT = 60.0


class RankError(AssertionError):
    """What the ranks raised, by rank; `kinds` are the types of their exceptions."""

    def __init__(self, failures: dict[int, tuple[str, str]]):
        super().__init__("\n".join(f"--- rank {r}\n{text}" for r, (_, text) in failures.items()))
        self.kinds = {rank: kind for rank, (kind, _) in failures.items()}


class RankPool:
    """Up to `MAX_RANKS` processes, started when first needed."""

    def __init__(self):
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.preload"])
        self._ranks: list[tuple[Any, Any]] = []
        self._folder = tempfile.mkdtemp(prefix="ranks-")
        self._jobs = 0

    def run(
        self, world: int, function: Callable, *args: Any, time_limit: float = TIME_LIMIT
    ) -> list[Any]:
        """Run `function(rank, world, *args)` on `world` ranks; their results in rank order.

        Raises:
            RankError: what any rank raised.
            TimeoutError: a rank did not answer within `time_limit` seconds.
        """
        while len(self._ranks) < MAX_RANKS:
            self._start_rank()
        self._jobs += 1
        init_file = os.path.join(self._folder, f"job-{self._jobs}")
        pipes = {self._ranks[rank][1]: rank for rank in range(world)}
        for pipe, rank in pipes.items():
            pipe.send((rank, world, init_file, function, args))
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = monotonic() + time_limit
        while len(answers) < world:
            ready = wait([p for p, r in pipes.items() if r not in answers], deadline - monotonic())
            failed = any(not ok for ok, _ in answers.values())
            if not ready:
                self.close()
                if failed:  # the others wait for the rank that failed
                    break
                missing = sorted(set(range(world)) - set(answers))
                raise TimeoutError(f"ranks {missing} gave no answer within {time_limit} s")
            for pipe in ready:
                answers[pipes[pipe]] = pipe.recv()
        failures = {rank: answer for rank, (ok, answer) in sorted(answers.items()) if not ok}
        if failures:
            raise RankError(failures)
        return [answers[rank][1] for rank in range(world)]

    def _start_rank(self) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs,))  # may have workers
        process.start()
        theirs.close()
        self._ranks.append((process, ours))

    def close(self) -> None:
        for process, pipe in self._ranks:
            pipe.close()
            process.kill()
            process.join()
        self._ranks.clear()

    def remove(self) -> None:
        self.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _serve(pipe) -> None:
    """The life of a rank process: jobs until the pipe closes."""
    while True:
        try:
            rank, world, init_file, function, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = True, _run_job(rank, world, init_file, function, args)
        except BaseException as error:
            answer = False, (type(error).__name__, traceback.format_exc())
        pipe.send(answer)


def _run_job(rank: int, world: int, init_file: str, function: Callable, args: tuple) -> Any:
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from accelerate.state import AcceleratorState, GradientState, PartialState

    torch.set_num_threads(1)
    torch.manual_seed(0)
    # what `accelerate launch --cpu` sets for a process
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",
        ACCELERATE_USE_CPU="true",
    )
    dist.init_process_group(
        "gloo",
        init_method=f"file://{init_file}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=TIME_LIMIT),
    )
    try:
        dist.barrier()  # all are connected before one may fail and leave
        return function(rank, world, *args)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState._reset_state()
        GradientState._reset_state()
        if dist.is_initialized():
            dist.destroy_process_group()
