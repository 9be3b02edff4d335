"""A plan as a picture: memory of a rank against the length of a row."""

from pathlib import Path

from hf_striped.bench.plots import figure_class
from hf_striped.plan.choose import Choice, Cluster
from hf_striped.plan.memory import memory_of
from hf_striped.plan.simulate import Simulation


def plot(
    simulation: Simulation,
    cluster: Cluster,
    found: list[Choice],
    best: Choice | None,
    seq_len: int,
    bf16: bool,
    path: Path,
) -> None:
    """Draw each set-up at the recommended split, or else the widest, as a PNG file; needs matplotlib."""
    size = cluster.ranks if best is None else best.context_parallel_size
    lengths = [seq_len * 2.0**power for power in range(-4, 3)]
    figure = figure_class()(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for choice in (choice for choice in found if choice.context_parallel_size == size):
        setup = choice.setup
        totals = [
            memory_of(simulation, setup, length / size, cluster.ranks, bf16).total / 2**30
            for length in lengths
        ]
        width = 3 if best is not None and setup == best.setup else 1
        axes.plot(lengths, totals, marker=".", linewidth=width, label=setup.name)
    axes.axhline(cluster.room / 2**30, color="black", linestyle="--", label="room of a device")
    axes.axvline(seq_len, color="grey", linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set(yscale="log", xlabel="tokens of a row", ylabel="GiB a rank at the peak")
    axes.set_title(f"context_parallel_size={size}, {cluster.ranks} devices")
    axes.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1, 0.5))
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
