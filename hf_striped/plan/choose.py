"""Which way to train: the split of the ranks and the set-up, and how long a step takes."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import Any

from hf_striped.errors import ConfigurationError
from hf_striped.plan.memory import DDP, OFFLOAD, SETUPS, Memory, Setup, longest, memory_of
from hf_striped.plan.simulate import KEEP_ATTENTION, NOTHING, RECOMPUTE, Simulation


@dataclass(frozen=True)
class Cluster:
    """The devices, and what one can do.

    Attributes:
        ranks: devices in all.
        ranks_a_machine: devices that share fast links.
        room: bytes of a device that training may use.
        flops: of one device a second, as training reaches them; None if unknown.
    """

    ranks: int
    ranks_a_machine: int
    room: float
    flops: float | None = None


@dataclass(frozen=True)
class Choice:
    """One way to train on rows of `seq_len` tokens.

    Attributes:
        heads_parallel_size: ranks of the context-parallel group that share heads.
        data_parallel_size: groups, each with rows of its own.
        fits: whether the memory is within the device's room.
        longest: the most tokens of a row this set-up takes with this split.
        seconds: of one step, without communication that is not hidden; None without a throughput.
    """

    setup: Setup
    context_parallel_size: int
    heads_parallel_size: int
    data_parallel_size: int
    memory: Memory
    fits: bool
    longest: int
    seconds: float | None


def choices(
    simulation: Simulation, cluster: Cluster, seq_len: int, key_heads: int, bf16: bool
) -> Iterator[Choice]:
    """Every set-up at every context-parallel size, small groups, which send least, first."""
    for size in (size for size in range(1, cluster.ranks + 1) if cluster.ranks % size == 0):
        machines = size // gcd(size, cluster.ranks_a_machine)
        for setup in SETUPS:
            memory = memory_of(simulation, setup, seq_len / size, cluster.ranks, bf16)
            tokens = longest(simulation, setup, cluster.ranks, cluster.room, bf16)
            yield Choice(
                setup=setup,
                context_parallel_size=size,
                heads_parallel_size=gcd(machines, key_heads),
                data_parallel_size=cluster.ranks // size,
                memory=memory,
                fits=memory.total <= cluster.room,
                longest=tokens * size,
                seconds=seconds_of(simulation, setup, cluster.flops, seq_len, size),
            )


def recommended(found: list[Choice]) -> Choice | None:
    """Of the choices that fit the one that recomputes least, then with the smallest group, then the fastest set-up."""
    order = {setup: place for place, setup in enumerate(SETUPS)}
    fitting = [choice for choice in found if choice.fits]
    return min(
        fitting,
        key=lambda choice: (
            _recomputed(choice.setup),
            choice.context_parallel_size,
            order[choice.setup],
        ),
        default=None,
    )


def _recomputed(setup: Setup) -> int:
    """The place of the checkpointing among all, the cheapest first."""
    return [other.checkpointing for other in SETUPS].index(setup.checkpointing)


def flops_of(simulation: Simulation, setup: Setup, seq_len: int, size: int) -> float:
    """Floating-point operations of one rank in a step on a row of one document; a multiply-add is two."""
    tokens = seq_len / size
    layers = simulation.layers_pass[
        RECOMPUTE if setup.checkpointing == OFFLOAD else setup.checkpointing
    ]
    attention = sum(shape.flops(seq_len) for shape in simulation.attention) / size
    again = 0.0 if setup.checkpointing in (NOTHING, KEEP_ATTENTION) else attention
    head = simulation.head.flops.at(tokens) * (1 if setup.loss_tile_size is None else 4 / 3)
    return layers.flops.at(tokens) + head + 3.5 * attention + again


def seconds_of(
    simulation: Simulation, setup: Setup, flops: float | None, seq_len: int, size: int
) -> float | None:
    """Seconds of a step at `flops` floating-point operations a second and device."""
    return None if flops is None else flops_of(simulation, setup, seq_len, size) / flops


def throughput_of(simulation: Simulation, bench: dict[str, Any], model: str) -> float:
    """Floating-point operations a second and device that `hf-striped bench --model` measured for the model.

    Raises:
        ConfigurationError: the result has no training step of this model.
    """
    steps = [step for step in bench["training"] if step["model"] == model]
    if not steps:
        measured = sorted({step["model"] for step in bench["training"]})
        raise ConfigurationError(
            f"--bench must hold a training step of {model!r}; it holds {measured or 'none'}. Make it with "
            f"hf-striped bench --layouts --model {model} --seq-len ..., or pass --tflops."
        )
    step = max(steps, key=lambda step: step["seq_len"])
    setup = Setup(DDP, RECOMPUTE if step["checkpointing"] else NOTHING, None)
    return flops_of(simulation, setup, step["seq_len"], step["ranks"]) / step["seconds"]["striped"]
