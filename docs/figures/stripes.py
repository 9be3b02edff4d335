"""Draw docs/figures/stripes.png: who holds which token, and what each ring step costs each rank.

python docs/figures/stripes.py
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap

from hf_striped.packing import block_spans

RANKS, TOKENS = 4, 16
COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7"]  # Okabe and Ito: safe for colour-blind eyes
LOCAL = TOKENS // RANKS


def striped_work(rank: int, step: int) -> int:
    """Query/key pairs that `rank` computes at `step`."""
    spans = block_spans([0, TOKENS], RANKS, rank, (rank - step) % RANKS)
    return sum(span.length * (span.length + 1) // 2 for span in spans)


def contiguous_work(rank: int, step: int) -> int:
    """The same for shards of neighbouring tokens: all pairs, half of them, or none."""
    key_rank = (rank - step) % RANKS
    if key_rank == rank:
        return LOCAL * (LOCAL + 1) // 2
    return LOCAL * LOCAL if key_rank < rank else 0


def draw_mask(axes, holder, title: str) -> None:
    """The causal mask, each query's row in the colour of the rank that holds it."""
    cells = np.full((TOKENS, TOKENS), -1)
    for query in range(TOKENS):
        cells[query, : query + 1] = holder(query)
    axes.imshow(cells, cmap=ListedColormap(["#f2f2f2", *COLOURS]), vmin=-1, vmax=RANKS - 1)
    axes.set_xticks(np.arange(-0.5, TOKENS), minor=True)
    axes.set_yticks(np.arange(-0.5, TOKENS), minor=True)
    axes.grid(which="minor", color="white", linewidth=1)
    axes.tick_params(which="both", length=0)
    axes.set_xticks([0, TOKENS - 1])
    axes.set_yticks([0, TOKENS - 1])
    axes.set_xlabel("key", labelpad=-8)
    axes.set_ylabel("query", labelpad=-8)
    axes.set_title(title, fontsize=12, loc="left")


def draw_work(axes, work) -> None:
    """Bars of each rank's pairs at each step; a line over a step's slowest rank, which sets its time."""
    total = 0
    for step in range(RANKS):
        pairs = [work(rank, step) for rank in range(RANKS)]
        slowest = max(pairs)
        total += slowest
        for rank, count in enumerate(pairs):
            axes.bar(step + (rank - 1.5) * 0.19, count, 0.17, color=COLOURS[rank])
        axes.hlines(slowest, step - 0.42, step + 0.42, color="#222222", linewidth=1.5)
    axes.set_xticks(range(RANKS), [f"step {step}" for step in range(RANKS)])
    axes.set_ylim(0, LOCAL * LOCAL * 1.25)
    axes.set_ylabel("pairs")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="x", length=0)
    axes.set_title(f"slowest rank of each step, summed: {total} pairs", fontsize=10, loc="left")


def main() -> None:
    figure, axes = plt.subplots(
        2, 2, figsize=(9, 6.2), height_ratios=[2.1, 1], layout="constrained"
    )
    draw_mask(
        axes[0, 0], lambda token: token // LOCAL, "Contiguous shards: the last rank has most work"
    )
    draw_mask(axes[0, 1], lambda token: token % RANKS, "Stripes: equal work, to within one token")
    draw_work(axes[1, 0], contiguous_work)
    draw_work(axes[1, 1], striped_work)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS]
    figure.legend(
        handles,
        [f"rank {rank}" for rank in range(RANKS)],
        ncols=RANKS,
        loc="outside lower center",
        frameon=False,
    )
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    main()
