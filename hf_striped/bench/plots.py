"""Plots of a result, as PNG files. Needs the extra `bench` (matplotlib)."""

from pathlib import Path
from typing import Any

from hf_striped.errors import ConfigurationError


def figure_class() -> type:
    """Matplotlib's `Figure`.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError(
            f"Plots need matplotlib ({error}). Install the extra: pip install 'hf_striped[bench]', or leave "
            "--plot out."
        ) from error
    return Figure


def plot(result: dict[str, Any], stem: Path) -> list[Path]:
    """Draw what `result` holds; the files written, named after `stem`."""
    Figure = figure_class()
    written = []
    if result["operator"]:
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.subplots()
        for (layout, case), points in _speeds(result["operator"]).items():
            lengths, speeds = zip(*sorted(points), strict=True)
            axes.plot(lengths, speeds, marker="o", label=f"{layout}, {case}")
        axes.set_xscale("log", base=2)
        axes.set_xlabel("tokens of the row")
        axes.set_ylabel("tokens a second, forward and backward")
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
        written.append(_save(figure, stem, "speed"))
    if result["simulated"]:
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.subplots()
        for found in result["simulated"]:
            steps = found["step_seconds"]
            share = [100 * seconds / sum(steps) for seconds in steps]
            axes.plot(range(len(share)), share, marker="o", label=f"P = {found['ranks']}")
        axes.set_xlabel("ring step")
        axes.set_ylabel("% of the time in kernels")
        axes.set_ylim(bottom=0)
        axes.legend()
        axes.grid(alpha=0.3)
        written.append(_save(figure, stem, "steps"))
    return written


def _speeds(operator: list[dict[str, Any]]) -> dict[tuple[str, str], list[tuple[int, float]]]:
    lines: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for found in operator:
        case = "dense" if found["documents"] == 1 else "packed"
        if found["sliding_window"] is not None:
            case += f", window {found['sliding_window']}"
        point = found["row_length"], found["row_length"] / found["seconds"]
        lines.setdefault((found["layout"], case), []).append(point)
    return lines


def _save(figure: Any, stem: Path, name: str) -> Path:
    path = stem.with_name(f"{stem.name}-{name}.png")
    figure.savefig(path, dpi=120, metadata={"Software": None})
    return path
