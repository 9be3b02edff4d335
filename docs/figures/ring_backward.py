"""Draw docs/figures/ring_backward.png: whose keys each rank holds, and where their dk, dv are.

python docs/figures/ring_backward.py

The moves of `RingExchange`, played with sets of query ranks in the place of sums of gradients.

    home:  [cp_size] sets      shares summed up at home
    sums:  [cp_size] sets      shares in the sum that each rank holds for the keys of the step
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from hf_striped.ring import ring_schedule

CP_SIZE = 4
COLOURS = ["#9CC8E8", "#F6D08A", "#93D4BF", "#E9C4DA"]  # Okabe-Ito, lightened to carry text
INK, FAINT = "#222222", "#8A8A8A"
Cell = tuple[int, set[int]]  # the keys' rank, and the query ranks whose shares the sum has


def play() -> list[list[Cell]]:
    """The cell of each rank after each step, and at the end the sums at home."""
    schedules = [list(ring_schedule(CP_SIZE, rank)) for rank in range(CP_SIZE)]
    home: list[set[int]] = [set() for _ in range(CP_SIZE)]
    arriving: list[set[int]] = [set() for _ in range(CP_SIZE)]
    columns = []
    for steps in zip(*schedules, strict=True):
        sums = [{rank} | arriving[rank] for rank in range(CP_SIZE)]
        columns.append([(step.key_rank, sums[rank]) for rank, step in enumerate(steps)])
        if steps[0].index == 0:
            home = sums
            continue
        hop = 1 if steps[0].index + 1 < CP_SIZE else -steps[0].index
        arriving = [sums[(rank - hop) % CP_SIZE] for rank in range(CP_SIZE)]
    assert not any(home[rank] & arriving[rank] for rank in range(CP_SIZE)), "each share once"
    columns.append([(rank, home[rank] | arriving[rank]) for rank in range(CP_SIZE)])
    assert all(shares == set(range(CP_SIZE)) for _, shares in columns[-1])
    return columns


def draw_cell(axes: Axes, x: float, y: int, cell: Cell, title: str) -> None:
    key_rank, shares = cell
    axes.add_patch(plt.Rectangle((x - 0.36, y - 0.36), 0.72, 0.72, color=COLOURS[key_rank]))
    axes.text(x, y - 0.16, title, ha="center", va="center", fontsize=9.5)
    for rank in range(CP_SIZE):
        place = x + 0.15 * (rank - (CP_SIZE - 1) / 2), y + 0.15
        full = rank in shares
        box = {"boxstyle": "square,pad=0.22", "fc": INK if full else "white", "ec": INK, "lw": 0.6}
        axes.text(*place, rank, ha="center", va="center", fontsize=8, bbox=box,
                  color="white" if full else FAINT)  # fmt: skip


def main() -> None:
    figure, axes = plt.subplots(figsize=(9, 5.2), layout="constrained")
    columns = play()
    for x, column in enumerate(columns):
        last = x == CP_SIZE
        for rank, cell in enumerate(column):
            draw_cell(axes, x, rank, cell, f"dk, dv of {rank}" if last else f"k, v of {cell[0]}")
        arrow = {"arrowstyle": "->", "color": INK if x else FAINT, "ls": "-" if x else ":"}
        for y in [] if last else range(-1, CP_SIZE):
            axes.annotate("", (x + 0.64, y + 0.64), (x + 0.37, y + 0.37), arrowprops=arrow)
        head = "home" if last else f"step {x}"
        axes.text(x, -0.72, head, ha="center", va="bottom", fontweight="bold")
    axes.set_yticks(range(CP_SIZE), [f"rank {rank}" for rank in range(CP_SIZE)])
    axes.set(xlim=(-0.5, CP_SIZE + 0.5), ylim=(CP_SIZE - 0.3, -0.95), xticks=[])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=120, facecolor="white")


if __name__ == "__main__":
    main()
