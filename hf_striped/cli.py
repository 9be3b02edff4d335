"""The command line: `hf-striped COMMAND`."""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence

import torch

import hf_striped.run
from hf_striped.bench.command import add_arguments as add_bench_arguments
from hf_striped.bench.command import add_page_arguments, write_page
from hf_striped.bench.command import run as run_bench
from hf_striped.doctor.command import add_arguments as add_doctor_arguments
from hf_striped.doctor.command import run as run_doctor
from hf_striped.errors import StripedError
from hf_striped.integrations.accelerate import CONTEXT_PARALLEL_SIZE_ENV, StripedParallelismConfig
from hf_striped.plan.command import add_arguments as add_plan_arguments
from hf_striped.plan.command import run as run_plan


def launch(options: argparse.Namespace) -> int:
    """Start the processes by `accelerate launch`, each of which runs the script; its exit code."""
    size = options.context_parallel_size
    if size is not None or CONTEXT_PARALLEL_SIZE_ENV in os.environ:
        size = StripedParallelismConfig(size).context_parallel_size  # a wrong one is an error here
    count = options.num_processes or size or torch.cuda.device_count()
    if not count:
        print(
            "hf-striped run: say how many processes to start, with --context-parallel-size or --num-processes; "
            "there is no GPU to count.",
            file=sys.stderr,
        )
        return 2
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(count)]
    if count > 1:
        command += ["--multi_gpu"]  # how accelerate starts several processes, on CPUs too
    command += ["--num_machines", "1", "--main_process_port", "0", "--dynamo_backend", "no"]
    command += ["--mixed_precision", "no", "-m", "hf_striped.run", "--kernel", options.kernel]
    if options.context_parallel_size is not None:
        command += ["--context-parallel-size", str(options.context_parallel_size)]
    return subprocess.run([*command, options.script, *options.arguments], check=False).returncode


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands; each sets `main`, which takes the options and returns an exit code."""
    parser = argparse.ArgumentParser(
        "hf-striped", description="Exact long-context training by Striped Attention."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser(
        "run",
        help="run an unmodified Trainer script with context parallelism",
        description="Start processes on this machine that run an unmodified Trainer script with context "
        "parallelism. For several machines, FSDP or other settings of Accelerate: "
        "accelerate launch [...] -m hf_striped.run [--context-parallel-size P] SCRIPT ARGS...",
    )
    run.add_argument(
        "--num-processes",
        type=int,
        default=None,
        help="processes to start (default: the context-parallel size, else one a GPU)",
    )
    hf_striped.run.add_arguments(run)
    run.set_defaults(main=launch)
    bench = commands.add_parser(
        "bench",
        help="measure striped attention against other layouts on this machine",
        description="Times forward and backward passes, whole training steps and simulated rings, in turn. Starts its "
        "own processes; on several machines or GPUs: accelerate launch [...] -m hf_striped.bench ...",
    )
    add_bench_arguments(bench)
    bench.set_defaults(main=run_bench)
    doctor = commands.add_parser(
        "doctor",
        help="check this environment, and a model's parity with one process",
        description="Checks versions, kernels, ranks and the links between them; given a model, compares loss and "
        "gradient norm of one process and of the ring. Starts its own processes, unless launched: accelerate "
        "launch [...] -m hf_striped.doctor MODEL. Exit code 0: all is well; 1: not; 2: it could not look.",
    )
    add_doctor_arguments(doctor)
    doctor.set_defaults(main=run_doctor)
    plan = commands.add_parser(
        "plan",
        help="what a model's training needs of memory and time, from its config",
        description="Counts the bytes of a training step on tensors without data, for every split of the devices and "
        "every way to save memory, and recommends one. Exit code 0: something fits; 1: nothing does; 2: it could "
        "not be planned.",
    )
    add_plan_arguments(plan)
    plan.set_defaults(main=run_plan)
    page = commands.add_parser("bench-page", help="make a page of the results of bench")
    add_page_arguments(page)
    page.set_defaults(main=write_page)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options = make_parser().parse_args(argv)
    try:
        return options.main(options)
    except StripedError as error:
        print(f"hf-striped {options.command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
