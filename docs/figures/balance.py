"""Draw docs/figures/balance.png: each rank's work at each ring step, in three layouts.

python docs/figures/balance.py

Counted by brute force. A unit is the fair share of a rank and step: all pairs over P².

    allowed: [tokens, tokens]   whether a query sees a key
    work:    [steps, ranks]     pairs
"""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from hf_striped.bench.pieces import contiguous_chunks, tokens_of, zigzag_chunks
from hf_striped.ring import ring_schedule

CP_SIZE, TOKENS, WINDOW = 4, 2048, 256
DOCUMENTS = [900, 60, 300, 20, 8, 480, 280]
TOKEN, DOCUMENT = np.arange(TOKENS), np.repeat(np.arange(len(DOCUMENTS)), DOCUMENTS)
CAUSAL = TOKEN[:, None] >= TOKEN
ROWS = {
    "dense, causal": CAUSAL,
    f"window of {WINDOW}": CAUSAL & (TOKEN[:, None] - TOKEN < WINDOW),
    "packed documents": CAUSAL & (DOCUMENT[:, None] == DOCUMENT),
}
LAYOUTS = ("contiguous", "zigzag", "stripes")


def places_of(layout: str, tokens: int, cp_size: int) -> np.ndarray:
    """The tokens of each rank, `[cp_size, local_seq]`."""
    if layout == "stripes":
        return np.arange(tokens).reshape(-1, cp_size).T
    chunks = {"contiguous": contiguous_chunks, "zigzag": zigzag_chunks}[layout]
    return np.stack([tokens_of(chunks(tokens, cp_size, rank)).numpy() for rank in range(cp_size)])


def work_of(layout: str, allowed: np.ndarray, cp_size: int = CP_SIZE, tile: int = 1) -> np.ndarray:
    """Pairs that each rank computes at each step; every tile with an allowed pair counts whole."""
    places = places_of(layout, len(allowed), cp_size)
    work = np.zeros((cp_size, cp_size), dtype=np.int64)
    for rank in range(cp_size):
        for step in ring_schedule(cp_size, rank):
            block = allowed[np.ix_(places[rank], places[step.key_rank])]
            if tile > 1:
                block = block.reshape(len(block) // tile, tile, -1, tile).any(axis=(1, 3))
            work[step.index, rank] = block.sum() * tile * tile
    assert tile > 1 or work.sum() == allowed.sum(), "every pair is computed once"
    return work


def cost(work: np.ndarray, allowed: np.ndarray) -> tuple[float, float]:
    """Over a fair share of all pairs: the busiest rank's work, and the sum of each step's most."""
    fair = allowed.sum() / len(work)
    return work.sum(axis=0).max() / fair, work.max(axis=1).sum() / fair


def main() -> None:
    plt.switch_backend("Agg")
    plt.rcParams["font.size"] = 9
    figure, grid = plt.subplots(3, 3, figsize=(8, 5.2), layout="constrained")
    for axes_row, (name, allowed) in zip(grid, ROWS.items(), strict=True):
        for axes, layout in zip(axes_row, LAYOUTS, strict=True):
            work = work_of(layout, allowed)
            units = work.T / (allowed.sum() / CP_SIZE**2)
            axes.imshow(units, cmap="Blues", vmin=0, vmax=3, aspect="auto")
            for (rank, step), x in np.ndenumerate(units):
                color = "w" if x > 1.9 else "k"
                axes.text(step, rank, f"{x:.2f}", color=color, ha="center", va="center")
            took = " to ".join(dict.fromkeys(f"{bound:.2f}" for bound in cost(work, allowed)))
            axes.set_title(f"{layout}: {took}", loc="left")
            axes.set_xticks(range(CP_SIZE), [f"step {step}" for step in range(CP_SIZE)])
            axes.set_yticks(range(CP_SIZE), [f"rank {rank}" for rank in range(CP_SIZE)])
            axes.tick_params(length=0)
        axes_row[0].set_ylabel(name, fontweight="bold")
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=72, facecolor="white")


if __name__ == "__main__":
    main()
