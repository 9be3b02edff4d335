"""Draw docs/figures/stripes.png: contiguous shards against stripes, and the time of their ring steps.

python docs/figures/stripes.py

Left, who computes which pair of a short row. Right, each rank's work at each ring step of a long row, in
units of a full block (all of one rank's queries against all of another's keys). Every number is counted.

    work:      [cp_size steps, cp_size ranks]   query/key pairs
    rank_of:   [tokens]                         the rank that holds each token
"""

from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap

from hf_striped.packing import block_spans
from hf_striped.ring import ring_schedule

CP_SIZE = 4
DRAWN_TOKENS = 16
TIMED_TOKENS = 16_384
COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7"]  # Okabe-Ito: told apart by all eyes
WAITING, INK, FAINT = "#E3E3E3", "#222222", "#6E6E6E"

Pairs = Callable[[int, int, int], int]


def contiguous_pairs(tokens: int, query_rank: int, key_rank: int) -> int:
    """Causal pairs of one ring step when each rank holds one run of tokens."""
    shard = tokens // CP_SIZE
    queries = query_rank * shard + np.arange(shard)
    return int(np.clip(queries + 1 - key_rank * shard, 0, shard).sum())


def striped_pairs(tokens: int, query_rank: int, key_rank: int) -> int:
    """Causal pairs of one ring step when the tokens are striped over the ranks."""
    spans = block_spans([0, tokens], CP_SIZE, query_rank, key_rank)
    return sum(span.length * (span.length + 1) // 2 for span in spans)


def work_of(pairs: Pairs, tokens: int) -> np.ndarray:
    """Pairs that each rank computes at each ring step."""
    work = np.zeros((CP_SIZE, CP_SIZE), dtype=np.int64)
    for rank in range(CP_SIZE):
        for step in ring_schedule(CP_SIZE, rank):
            work[step.index, rank] = pairs(tokens, rank, step.key_rank)
    assert work.sum() == tokens * (tokens + 1) // 2, "every causal pair is computed once"
    return work


def draw_mask(axes: Axes, rank_of: np.ndarray) -> None:
    """The causal mask, each pair in the colour of the rank that holds its query."""
    tokens = len(rank_of)
    causal = np.tri(tokens, dtype=bool)
    cells = np.ma.masked_array(np.repeat(rank_of[:, None], tokens, axis=1), ~causal)
    edges = np.arange(tokens + 1) - 0.5
    axes.pcolormesh(
        edges,
        edges,
        cells,
        cmap=ListedColormap(COLOURS),
        vmin=0,
        vmax=CP_SIZE - 1,
        edgecolors="white",
        linewidth=0.7,
    )
    axes.set(aspect="equal", xlim=(-0.6, tokens - 0.4), ylim=(tokens - 0.4, -0.6))
    ticks = [0, tokens // 2 - 1, tokens - 1]
    axes.set_xticks(ticks)
    axes.set_yticks(ticks)
    axes.set_xlabel("key token", labelpad=1)
    axes.set_ylabel("query token", labelpad=-4)
    axes.tick_params(length=0, pad=2)
    axes.spines[:].set_visible(False)


def draw_timeline(axes: Axes, work: np.ndarray) -> None:
    """Each rank's ring steps; a step ends for all when its slowest rank is done."""
    step_time = work.max(axis=1)
    begins = np.concatenate([[0], np.cumsum(step_time)])
    for step, begin in enumerate(begins[:-1]):
        for rank in range(CP_SIZE):
            axes.barh(rank, step_time[step], left=begin, height=0.72, color=WAITING)
            axes.barh(rank, work[step, rank], left=begin, height=0.72, color=COLOURS[rank])
        middle = begin + step_time[step] / 2
        axes.text(middle, -0.62, f"step {step}", ha="center", va="bottom", color=FAINT, fontsize=9)
    for edge in begins[1:-1]:
        axes.axvline(edge, color="white", linewidth=2)
    axes.axvline(begins[-1], ymax=0.86, color=INK, linewidth=1.4)
    axes.set_yticks(range(CP_SIZE), [f"rank {rank}" for rank in range(CP_SIZE)])
    axes.set_ylim(CP_SIZE - 0.5, -1.1)
    axes.tick_params(length=0, pad=4)
    axes.spines[:].set_visible(False)


def main() -> None:
    plt.rcParams.update({"font.size": 10.5, "text.color": INK, "axes.labelcolor": INK})
    token = np.arange(DRAWN_TOKENS)
    block = (TIMED_TOKENS // CP_SIZE) ** 2
    contiguous = work_of(contiguous_pairs, TIMED_TOKENS) / block
    striped = work_of(striped_pairs, TIMED_TOKENS) / block
    times = [float(work.max(axis=1).sum()) for work in (contiguous, striped)]

    figure, rows = plt.subplots(2, 2, figsize=(9, 5.5), width_ratios=[1, 2.2], layout="constrained")
    figure.get_layout_engine().set(h_pad=0.08, w_pad=0.06)
    draw_mask(rows[0, 0], token // (DRAWN_TOKENS // CP_SIZE))
    draw_mask(rows[1, 0], token % CP_SIZE)
    rows[0, 0].set_title("Contiguous shards", fontweight="bold", loc="left")
    rows[1, 0].set_title("Stripes", fontweight="bold", loc="left")
    headlines = (
        "Each step lasts as long as its slowest rank; grey is waiting",
        f"Every rank has equal work: {times[0] / times[1]:.2f} times as fast",
    )
    for axes, work, time, headline in zip(
        rows[:, 1], (contiguous, striped), times, headlines, strict=True
    ):
        draw_timeline(axes, work)
        axes.set_title(headline, loc="left")
        axes.set_xlim(0, max(times) * 1.02)
        axes.set_xticks([])
        axes.text(time, CP_SIZE - 0.45, f"{time:.1f} blocks", ha="right", va="top", fontsize=10)
    rows[1, 1].set_xlabel(
        f"query/key pairs counted for {TIMED_TOKENS:,} tokens; "
        "1 block = one rank's queries x another's keys",
        labelpad=18,
        loc="left",
        fontsize=9,
    )
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=200, facecolor="white")


if __name__ == "__main__":
    main()
