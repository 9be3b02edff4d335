"""Run an unmodified training script with context parallelism.

    accelerate launch --num_processes 4 -m hf_striped.run --context-parallel-size 4 SCRIPT ARGS...

Every Trainer that the script builds gets what the README's changed lines give it: the parallelism config,
striped attention, a collator of stripes, and `StripedTrainerMixin`. `Trainer.__init__` is wrapped while the
script runs, so that subclasses in whatever library are converted too.
"""

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any
from unittest.mock import patch

import accelerate
from torch import nn
from transformers import Trainer, TrainingArguments

from hf_striped.errors import ConfigurationError
from hf_striped.integrations.accelerate import CONTEXT_PARALLEL_SIZE_ENV, StripedParallelismConfig
from hf_striped.integrations.collator import StripedDataCollator
from hf_striped.integrations.trainer import StripedTrainerMixin
from hf_striped.integrations.transformers import ATTENTION_NAME
from hf_striped.kernels import AUTO, KERNELS

_plain_init = Trainer.__init__
_parameters = signature(_plain_init)


class ConvertedTrainerMixin(StripedTrainerMixin):
    """What the class of a converted Trainer derives from."""

    def call_model_init(self, trial: Any = None) -> nn.Module:
        model = super().call_model_init(trial)
        model.set_attn_implementation(ATTENTION_NAME)
        return model


class Conversion:
    """What happens to each Trainer of a script.

    Attributes:
        config: the parallelism config that each gets.
        trainers: how many were built.
    """

    def __init__(self, config: StripedParallelismConfig):
        self.config = config
        self.trainers = 0

    def build(self, trainer: Trainer, *positional: Any, **named: Any) -> None:
        """`Trainer.__init__`, with the pieces that stripes need."""
        call = _parameters.bind(trainer, *positional, **named)
        given = call.arguments
        if given.get("args") is None:
            given["args"] = TrainingArguments("tmp_trainer")
        self._convert_arguments(given["args"])
        if isinstance(given.get("model"), nn.Module):
            given["model"].set_attn_implementation(ATTENTION_NAME)
        cls = type(trainer)
        if not issubclass(cls, StripedTrainerMixin):
            trainer.__class__ = type(cls.__name__, (ConvertedTrainerMixin, cls), {})
        _plain_init(*call.args, **call.kwargs)
        trainer.take_over_label_smoothing()
        if not isinstance(trainer.data_collator, StripedDataCollator):
            trainer.data_collator = StripedDataCollator(trainer.data_collator)
        self.trainers += 1

    def _convert_arguments(self, arguments: TrainingArguments) -> None:
        if arguments.parallelism_config not in (None, self.config):
            raise ConfigurationError(
                "hf_striped.run gives the script its parallelism config; received a script with "
                f"{arguments.parallelism_config!r}. Run it without hf_striped.run, or take its "
                "parallelism_config out."
            )
        arguments.parallelism_config = self.config
        if arguments.accelerator_config.dispatch_batches is None:
            arguments.accelerator_config.dispatch_batches = False  # each rank collates its own


class RefusedAccelerator:
    """What a script finds in Accelerate: a loop of its own cannot be converted from outside."""

    def __init__(self, *args: Any, **kwargs: Any):
        raise ConfigurationError(
            "hf_striped.run converts scripts that train with a Trainer; received one that builds an Accelerator "
            "of its own. Convert its loop by hand: StripedParallelismConfig, StripedDataCollator and prepare_model."
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of a converted run; the script and its own arguments come last."""
    parser.add_argument(
        "--context-parallel-size",
        type=int,
        default=None,
        help=f"processes a sequence is spread over (default: ${CONTEXT_PARALLEL_SIZE_ENV}, else all)",
    )
    parser.add_argument(
        "--kernel", choices=[AUTO, *KERNELS], default=AUTO, help="the block kernel (default: auto)"
    )
    parser.add_argument("script", help="the training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")


def run_script(script: str, arguments: Sequence[str], config: StripedParallelismConfig) -> None:
    """Run `script` as `python script arguments...` would, its Trainers converted.

    Raises:
        ConfigurationError: there is no such script, or it ended without building a Trainer.
        Whatever the script raises, SystemExit included.
    """
    if not Path(script).is_file():
        raise ConfigurationError(f"There is no script {script!r}.")
    conversion = Conversion(config)

    def converted_init(self: Trainer, *positional: Any, **named: Any) -> None:
        conversion.build(self, *positional, **named)

    with ExitStack() as stack:
        for replaced in (
            patch.object(Trainer, "__init__", wraps(_plain_init)(converted_init)),
            patch.object(accelerate, "Accelerator", RefusedAccelerator),
            patch.object(sys, "argv", [script, *arguments]),
            patch.object(sys, "path", [str(Path(script).resolve().parent), *sys.path[1:]]),
        ):
            stack.enter_context(replaced)
        runpy.run_path(script, run_name="__main__")
    if not conversion.trainers:
        raise ConfigurationError(
            f"{script} ended without building a transformers.Trainer, so nothing was striped. "
            "hf_striped.run converts scripts that train with a Trainer."
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "hf_striped.run", description="Run an unmodified Trainer script with context parallelism."
    )
    add_arguments(parser)
    options = parser.parse_args(argv)
    size = options.context_parallel_size
    if size is None and CONTEXT_PARALLEL_SIZE_ENV not in os.environ:
        size = int(os.environ.get("WORLD_SIZE", "1"))
    config = StripedParallelismConfig(size, kernel=options.kernel)
    run_script(options.script, options.arguments, config)


if __name__ == "__main__":
    main()
