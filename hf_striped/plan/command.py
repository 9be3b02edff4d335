"""The command line of `hf-striped plan`."""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from hf_striped.bench.plots import figure_class
from hf_striped.errors import ConfigurationError
from hf_striped.models import config_of
from hf_striped.plan.choose import Cluster, choices, recommended, throughput_of
from hf_striped.plan.plots import plot
from hf_striped.plan.report import as_dict, report
from hf_striped.plan.simulate import simulate

_TOKENS = {"": 1, "K": 2**10, "M": 2**20}
_BYTES = {"MB": 10**6, "GB": 10**9, "MIB": 2**20, "GIB": 2**30}


def tokens(text: str) -> int:
    """A number of tokens: 4096, 128K (of 1024) or 1M (of 1024 K)."""
    return _sized(text, _TOKENS, "4096, 128K or 1M")


def size(text: str) -> int:
    """Bytes: 80GB, 80GiB, 500MB."""
    return _sized(text, _BYTES, "80GB or 79GiB")


def _sized(text: str, units: dict[str, int], examples: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in units or not float(match[1]):
        raise argparse.ArgumentTypeError(f"must be like {examples}; received {text!r}")
    return int(float(match[1]) * units[match[2].upper()])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="folder, config.json, .gguf file or hub name: only its config is read; or tiny",
    )
    parser.add_argument(
        "--seq-len", type=tokens, required=True, help="tokens of a row: 4096, 128K or 1M"
    )
    parser.add_argument("--gpus", type=int, required=True, help="devices in all")
    parser.add_argument(
        "--gpu-memory", type=size, required=True, help="of a device: 80GB (10**9 bytes) or 79GiB"
    )
    parser.add_argument("--gpus-per-machine", type=int, default=8, help="default 8")
    parser.add_argument(
        "--reserve",
        type=float,
        default=0.1,
        help="share of the memory left to the runtime and to fragmentation (default 0.1)",
    )
    parser.add_argument(
        "--dtype",
        choices=("bf16", "fp32"),
        default="bf16",
        help="what is computed in; the weights that are trained are fp32 (default bf16)",
    )
    speed = parser.add_mutually_exclusive_group()
    speed.add_argument(
        "--tflops", type=float, help="10**12 operations a second that training reaches on a device"
    )
    speed.add_argument(
        "--bench", type=Path, help="a JSON file of hf-striped bench --model MODEL, for the speed"
    )
    parser.add_argument("--json", type=Path, help="file for the whole plan")
    parser.add_argument("--plot", type=Path, help="PNG file: memory against the length of a row")


def run(options: argparse.Namespace) -> int:
    """Print the plan; 0 if something fits, 1 if nothing does."""
    _check(options)
    bench = None if options.bench is None else _read(options.bench)
    config = config_of(options.model)
    bf16 = options.dtype == "bf16"
    print("Running a step on tensors without data ...", file=sys.stderr)
    simulation = simulate(config, bf16=bf16, ring=options.gpus > 1)
    flops = None if options.tflops is None else options.tflops * 1e12
    if bench is not None:
        flops = throughput_of(simulation, bench, Path(options.model).name)
    room = options.gpu_memory * (1 - options.reserve)
    cluster = Cluster(options.gpus, options.gpus_per_machine, room, flops)
    text = config.get_text_config()
    heads = text.num_attention_heads
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    found = list(choices(simulation, cluster, options.seq_len, key_heads, bf16))
    best = recommended(found)
    print(report(options.model, simulation, cluster, options.seq_len, found, best))
    if options.json is not None:
        plan = as_dict(options.model, simulation, cluster, options.seq_len, found, best)
        options.json.write_text(json.dumps(plan, indent=1) + "\n")
    if options.plot is not None:
        plot(simulation, cluster, found, best, options.seq_len, bf16, options.plot)
    return 0 if best is not None else 1


def _check(options: argparse.Namespace) -> None:
    if options.gpus < 1 or options.gpus_per_machine < 1:
        raise ConfigurationError(
            "--gpus and --gpus-per-machine count devices, from 1; received "
            f"{options.gpus} and {options.gpus_per_machine}."
        )
    if not 0 <= options.reserve < 1:
        raise ConfigurationError(
            f"--reserve is a share of the memory, from 0 to less than 1; received {options.reserve}."
        )
    if options.tflops is not None and not options.tflops > 0:
        raise ConfigurationError(f"--tflops must be positive; received {options.tflops}.")
    for option, path in (("--json", options.json), ("--plot", options.plot)):
        if path is not None and not path.parent.is_dir():
            raise ConfigurationError(f"There is no folder {path.parent} for {option}.")
    if options.plot is not None:
        figure_class()  # an error where there is no matplotlib


def _read(path: Path) -> dict[str, Any]:
    try:
        bench = json.loads(path.read_text())
        if "training" not in bench:
            raise ValueError("it has no training steps")
        return bench
    except (OSError, ValueError, TypeError) as error:
        raise ConfigurationError(
            f"--bench must be a file of hf-striped bench --output; received {path}: {error}"
        ) from error
