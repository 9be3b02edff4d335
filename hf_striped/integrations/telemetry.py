"""A callback that shows in the Trainer's log how fast the ring runs and what it waits for."""

from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import TrainerCallback

from hf_striped.errors import ConfigurationError
from hf_striped.integrations.callback import calling_trainer
from hf_striped.meter import ATTENTION, WAITING, Meter
from hf_striped.peak import peak_bytes, start_peak


class StripedTelemetry(TrainerCallback):
    """Adds speed, waiting, traffic and memory to each training log: `Trainer(..., callbacks=[StripedTelemetry()])`.

    What TensorBoard, W&B and `log_history` then show, over the optimizer steps since the log before:

    - `tokens_per_second_per_device`: tokens of a stripe, padding included, a second; the mean over devices.
      Data loading counts, evaluation and saving do not.
    - `attention_seconds`: seconds of a step in ring attention, waiting included; mean over devices.
    - `waiting_seconds`: seconds of a step in waiting for other ranks' messages; mean over devices.
    - `sent_gib`: GiB that a device sent to others in a step, by attention; the mean.
    - `peak_memory_gib`: the most of any device: allocated by PyTorch on CUDA, resident on a CPU.

    The events below are those of `transformers.TrainerCallback`, with its arguments: the Trainer calls them.

    Args:
        trace_folder: where each rank writes a Chrome trace, `rank-0.json` and so on, with named ring steps, for
            chrome://tracing or https://ui.perfetto.dev; None for no trace.
        trace_steps: the first and the last optimizer step of the trace, counted from 1 in this run of `train()`.

    Raises:
        ConfigurationError: not 1 <= first <= last.

    Example:
        >>> import hf_striped
        >>> callbacks = [hf_striped.StripedTelemetry("trace", trace_steps=(10, 12))]
    """

    def __init__(
        self, trace_folder: str | Path | None = None, trace_steps: tuple[int, int] = (2, 3)
    ):
        first, last = trace_steps
        if not 1 <= first <= last:
            raise ConfigurationError(
                "trace_steps must be the first and the last step to trace, counted from 1; received "
                f"{trace_steps}. Give for example (2, 3)."
            )
        self._folder = None if trace_folder is None else Path(trace_folder)
        self._trace_steps = first, last
        self._profile: Any = None
        self._meter = Meter()
        self._attached = ExitStack()
        self._device = torch.device("cpu")
        self._taken = 0  # optimizer steps of this run
        self._begin = 0.0
        self._seconds, self._tokens, self._steps = 0.0, 0, 0  # since the last log

    def on_train_begin(self, args, state, control, model: nn.Module, **kwargs: Any) -> None:
        """Start to count the model's tokens and to measure, as the first of the callbacks that take a log."""
        self._attached.close()  # of a run that failed
        self._device, self._taken = args.device, 0
        self._attached.enter_context(self._meter)
        hook = model.register_forward_pre_hook(self._count, with_kwargs=True)
        self._attached.callback(hook.remove)
        self._before_the_reports()
        self._start_anew()

    def on_step_begin(self, args, state, control, **kwargs: Any) -> None:
        """Start the trace, before its first step."""
        if self._folder is not None and self._taken + 1 == self._trace_steps[0]:
            self._profile = torch.profiler.profile()
            self._profile.start()

    def on_step_end(self, args, state, control, **kwargs: Any) -> None:
        """Count the step and its seconds; write the trace after its last step."""
        now = perf_counter()
        self._seconds, self._begin = self._seconds + now - self._begin, now
        self._steps += 1
        self._taken += 1
        if self._profile is not None and self._taken == self._trace_steps[1]:
            self._write_trace(args.process_index)

    def on_log(self, args, state, control, logs: dict[str, Any], **kwargs: Any) -> None:
        """Add the figures to a log of training steps, and measure anew; every rank takes part."""
        if "loss" not in logs or not self._steps:  # another log than that of steps
            return
        found = self._figures()
        logs.update(found)
        if state.log_history:
            state.log_history[-1].update(found)
        self._start_anew()

    def on_save(self, args, state, control, **kwargs: Any) -> None:
        """Leave the seconds of saving out."""
        self._begin = perf_counter()

    def on_evaluate(self, args, state, control, **kwargs: Any) -> None:
        """Leave the seconds of evaluation out."""
        self._begin = perf_counter()

    def on_train_end(self, args, state, control, **kwargs: Any) -> None:
        """Stop to measure; write the trace of a run that ended before its last step."""
        if self._profile is not None:  # the run was shorter than trace_steps
            self._write_trace(args.process_index)
        self._attached.close()

    def _count(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        tokens = kwargs.get("input_ids", kwargs.get("inputs_embeds"))
        if module.training and tokens is not None:
            self._tokens += tokens.shape[0] * tokens.shape[1]

    def _before_the_reports(self) -> None:
        """Callbacks take a log in turn, and reports come before a user's: move ahead of them."""
        trainer = calling_trainer()
        if trainer is not None:
            callbacks = trainer.callback_handler.callbacks
            callbacks.remove(self)
            callbacks.insert(0, self)

    def _start_anew(self) -> None:
        self._meter.reset()
        start_peak(self._device)
        self._seconds, self._tokens, self._steps = 0.0, 0, 0
        self._begin = perf_counter()

    def _figures(self) -> dict[str, float]:
        """What this log shows, the same on all ranks."""
        values = torch.tensor(
            [
                self._tokens / self._seconds,
                self._meter.seconds(ATTENTION) / self._steps,
                self._meter.seconds(WAITING) / self._steps,
                self._meter.sent / self._steps / 2**30,
                peak_bytes(self._device) / 2**30,
            ],
            dtype=torch.float64,
            device=self._device,
        )
        if dist.is_initialized() and dist.get_world_size() > 1:
            every = [torch.empty_like(values) for _ in range(dist.get_world_size())]
            dist.all_gather(every, values)
            every = torch.stack(every)
            values = torch.cat([every[:, :-1].mean(0), every[:, -1:].amax(0)])
        names = (
            "tokens_per_second_per_device",
            "attention_seconds",
            "waiting_seconds",
            "sent_gib",
            "peak_memory_gib",
        )
        return dict(zip(names, values.tolist(), strict=True))

    def _write_trace(self, rank: int) -> None:
        self._profile.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(self._folder / f"rank-{rank}.json"))
        self._profile = None
