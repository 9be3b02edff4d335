"""Draw docs/figures/online_softmax.png: one query's softmax, merged block by block.

python docs/figures/online_softmax.py

Every bar comes from the merge itself: with the identity as values, the output is the weights.

    scores:  [keys]      of one query against every key
    out:     [1, keys]   the weights after each ring step
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from torch import Tensor

from hf_striped.lse import merge_partial_
from hf_striped.ring import ring_schedule

CP_SIZE, TOKENS, QUERY = 4, 16, 14
COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7"]  # Okabe-Ito: told apart by all eyes
INK, FAINT = "#222222", "#6E6E6E"


def merged_steps(scores: Tensor) -> list[tuple[int, Tensor, float, float]]:
    """Of each ring step: the keys' rank, the weights so far, the block's lse, the lse so far."""
    values, seen = torch.eye(TOKENS), torch.arange(TOKENS) <= QUERY
    out, lse = torch.zeros(1, 1, TOKENS), torch.full((1, 1), -torch.inf)
    steps = []
    for step in ring_schedule(CP_SIZE, QUERY % CP_SIZE):
        keys = seen & (torch.arange(TOKENS) % CP_SIZE == step.key_rank)
        block_lse = scores[keys].logsumexp(0).view(1, 1)
        block_out = (scores[keys].softmax(0) @ values[keys]).view(1, 1, -1)
        merge_partial_(out, lse, block_out, block_lse)
        steps.append((step.key_rank, out.clone().flatten(), block_lse.item(), lse.item()))
    whole = scores.where(seen, -torch.inf)
    torch.testing.assert_close(steps[-1][1], whole.softmax(0))
    assert abs(steps[-1][3] - whole.logsumexp(0)) < 1e-5
    return steps


def draw_bars(axes: Axes, heights: Tensor, title: str) -> None:
    keys = range(TOKENS)
    axes.bar(keys, heights, width=0.82, color=[COLOURS[key % CP_SIZE] for key in keys])
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xticks([0, 7, QUERY])
    axes.set_xlim(-0.8, TOKENS - 0.2)
    axes.tick_params(length=0, pad=2, labelsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlabel("key", labelpad=0)


def main() -> None:
    plt.rcParams.update({"font.size": 10, "text.color": INK, "axes.labelcolor": INK})
    scores = torch.randn(TOKENS, generator=torch.Generator().manual_seed(2))
    steps = merged_steps(scores)
    figure, (first, *others) = plt.subplots(1, 5, figsize=(12, 3), layout="constrained")
    draw_bars(first, scores.where(torch.arange(TOKENS) <= QUERY, 0), f"scores of query {QUERY}\n")
    first.axhline(0, color=FAINT, linewidth=0.8)
    for index, (axes, (rank, weights, block_lse, lse)) in enumerate(
        zip(others, steps, strict=True)
    ):
        name = f"step {index}: + keys of rank {rank}\n"
        draw_bars(axes, weights, f"{name}lse {block_lse:.2f} joins; now {lse:.2f}")
        axes.hlines(steps[-1][1], *(torch.arange(TOKENS) + d for d in (-0.45, 0.45)), color=INK)
        axes.set_ylim(0, 1.08 * max(w.max() for _, w, _, _ in steps))
    others[0].set_ylabel("weight (lines: whole softmax)")
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=130, facecolor="white")


if __name__ == "__main__":
    main()
