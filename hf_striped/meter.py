"""What the ring does when: named ranges for profilers, and sums for whoever asks.

    ring attention          a pass of one layer, forward or backward
      ring step 2 of 4 ...  the kernels of one step
      ring wait             until what was in flight has arrived

Without a profiler and without a meter a range costs about a microsecond. Of work on CUDA a meter keeps events of the
stream, which wait for nothing until they are read.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch.profiler import record_function

ATTENTION, WAITING = "attention", "waiting"

_meters: list["Meter"] = []  # passes run on threads of autograd, which share nothing else


class Meter:
    """Within `with Meter() as meter:` the rings of this process are measured.

    Attributes:
        sent: bytes that this rank handed to other ranks.
    """

    def __init__(self):
        self.sent = 0
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, Any, Any]] = []

    def __enter__(self) -> "Meter":
        _meters.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _meters.remove(self)

    def seconds(self, kind: str) -> float:
        """Seconds of ranges of a kind: `ATTENTION` (which includes waiting) or `WAITING`.

        On CUDA these are seconds of the stream, for which this waits.
        """
        for name, start, end in self._events:
            end.synchronize()
            self._add(name, start.elapsed_time(end) / 1000)
        self._events.clear()
        return self._seconds.get(kind, 0.0)

    def reset(self) -> None:
        """Start anew from nothing."""
        self.sent = 0
        self._seconds.clear()
        self._events.clear()

    def _add(self, kind: str, seconds: float) -> None:
        self._seconds[kind] = self._seconds.get(kind, 0.0) + seconds

    def _range(self, kind: str, start: Any, end: Any) -> None:
        if isinstance(start, float):
            self._add(kind, end - start)
        else:
            self._events.append((kind, start, end))


@contextmanager
def measured(name: str, device: torch.device, *kinds: str) -> Iterator[None]:
    """A range of work on `device`, called `name` in a profile; meters count its time for each of `kinds`."""
    with record_function(name):
        start = _now(device) if kinds and _meters else None
        yield
        if start is not None:
            end = _now(device)
            for meter in _meters:
                for kind in kinds:
                    meter._range(kind, start, end)


def count_sent(tensor: torch.Tensor, copies: int = 1) -> None:
    """Tell the meters that `tensor` goes to `copies` other ranks."""
    for meter in _meters:
        meter.sent += copies * tensor.numel() * tensor.element_size()


def _now(device: torch.device) -> Any:
    """Seconds on a CPU, an event of the current stream on CUDA."""
    if device.type != "cuda":
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event
