"""A plan as a table for a terminal, and as JSON."""

from dataclasses import asdict, fields
from typing import Any

from hf_striped.plan.choose import Choice, Cluster
from hf_striped.plan.memory import OFFLOAD, SETUPS, Memory
from hf_striped.plan.simulate import KEEP_ATTENTION, NOTHING, Simulation

_PARTS = [field.name for field in fields(Memory)]


def report(
    model: str,
    simulation: Simulation,
    cluster: Cluster,
    seq_len: int,
    found: list[Choice],
    best: Choice | None,
) -> str:
    """The table of all set-ups, at the recommended split or else the widest, and what is recommended."""
    size = cluster.ranks if best is None else best.context_parallel_size
    shown = [choice for choice in found if choice.context_parallel_size == size]
    width = max(len(setup.name) for setup in SETUPS)
    gib = 2**30
    title = (
        f"{model}: {simulation.parameters / 1e9:.2f} billion parameters, rows of {seq_len} tokens, "
        f"{cluster.ranks} devices with room for {cluster.room / gib:.1f} GiB each\n"
        f"context_parallel_size={size}: GiB a rank at the peak of a step"
    )
    head = f"{'':<{width}}" + "".join(f"{part:>12}" for part in [*_PARTS, "total"])
    lines = [title, "", f"{head}{'':>6}{'longest row':>13}"]
    if cluster.flops is not None:
        lines[-1] += f"{'s a step':>10}"
    for choice in shown:
        values = [*asdict(choice.memory).values(), choice.memory.total]
        line = f"{choice.setup.name:<{width}}" + "".join(f"{v / gib:>12.2f}" for v in values)
        line += f"{'fits' if choice.fits else 'no':>6}{choice.longest:>13}"
        lines.append(line if choice.seconds is None else f"{line}{choice.seconds:>10.2f}")
    lines += [
        "",
        f"keys and values in flight: two blocks of {simulation.key_value * seq_len / size / gib:.3f} GiB "
        "(in attention)",
    ]
    longest = max(found, key=lambda choice: choice.longest)
    lines.append(
        f"longest row: {longest.longest} tokens, by {longest.setup.name}, "
        f"context_parallel_size={longest.context_parallel_size}"
    )
    return "\n".join([*lines, "", _recommendation(best)])


def _recommendation(best: Choice | None) -> str:
    if best is None:
        return "recommended: nothing fits. Take more devices, or rows no longer than the longest above."
    setup = best.setup
    config = [f"context_parallel_size={best.context_parallel_size}"]
    if best.heads_parallel_size > 1:
        config.append(f"heads_parallel_size={best.heads_parallel_size}")
    if setup.loss_tile_size is not None:
        config.append(f"loss_tile_size={setup.loss_tile_size}")
    if setup.checkpointing == KEEP_ATTENTION:
        config.append("keep_attention=True")
    arguments = [f"parallelism_config=StripedParallelismConfig({', '.join(config)})"]
    if setup.checkpointing != NOTHING:
        arguments.append("activation_checkpointing=True")
    if setup.checkpointing == OFFLOAD:
        arguments.append('activation_checkpointing_kwargs={"offload": True}')
    lines = [
        f"recommended: {setup.name}; context parallel {best.context_parallel_size} x data parallel "
        f"{best.data_parallel_size}",
        f"    TrainingArguments({', '.join(arguments)})",
    ]
    if best.seconds is not None:
        rows = best.data_parallel_size
        lines.append(f"    {best.seconds:.2f} s a step of {rows} row(s), communication aside")
    return "\n".join(lines)


def as_dict(
    model: str,
    simulation: Simulation,
    cluster: Cluster,
    seq_len: int,
    found: list[Choice],
    best: Choice | None,
) -> dict[str, Any]:
    """The whole plan, every set-up at every split; bytes, tokens and seconds."""
    return {
        "model": model,
        "seq_len": seq_len,
        "parameters": simulation.parameters,
        "cluster": asdict(cluster),
        "choices": [{**asdict(choice), "total": choice.memory.total} for choice in found],
        "recommended": None if best is None else found.index(best),
    }
