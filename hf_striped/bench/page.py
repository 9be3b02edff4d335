"""A page for readers, made of results: the same results give the same page."""

import json
import os
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

HEAD = """# Benchmarks

Made by `hf-striped bench-page` from the JSON files of `hf-striped bench`. Every ratio compares times of one run, taken in turn. *Contiguous* and *zigzag* are
rings with the same transport, kernel calls, merge and backward pass as *striped*, over other layouts; *all-gather* is striped
with `exchange="gather"`; *one process* is PyTorch's scaled dot product attention over the whole row on one rank's threads. The rings
cut triangles into rectangles as the `cpu` kernel does, one process does not: a part of its ratio is the kernel's.
*Waiting* is for messages between neighbours; the simulated kernels are the fastest of several runs.
Nothing on this page was run on a GPU unless its machine says so.
"""


def page(results: Sequence[dict[str, Any]], pictures: Sequence[Sequence[str]] = ()) -> str:
    """Markdown of the results, in the order given, each with its pictures (paths as the page writes them)."""
    text = HEAD
    for result, paths in zip_longest(results, pictures, fillvalue=()):
        lines = [*_sections(result), *(f"![{Path(path).stem}]({path})" for path in paths)]
        text += "".join(f"\n{line}\n" for line in lines)
    return text


def page_of_files(paths: Sequence[Path], folder: Path) -> str:
    """The page of JSON files, with the PNG files that `--plot` drew beside them, as seen from `folder`."""
    results = [json.loads(path.read_text()) for path in paths]
    pictures = [
        [os.path.relpath(drawn, folder) for drawn in sorted(path.parent.glob(f"{path.stem}-*.png"))]
        for path in paths
    ]
    return page(results, pictures)


def _sections(result: dict[str, Any]) -> Iterator[str]:
    machine = result["machine"]
    yield (
        f"## {machine['device']}, {result['ranks']} ranks x {result['threads']} thread(s)\n\n"
        f"{machine['system']}, {machine['cores']} cores. "
        + ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        + f".\n\n```bash\n{result['command']}\n```"
    )
    if result["operator"]:
        yield _operator_table(result)
    if result["training"]:
        yield _training_table(result["training"])
    if result["simulated"]:
        yield _simulated_table(result["simulated"])


def _operator_table(result: dict[str, Any]) -> str:
    shape = result["shape"]
    lines = [
        f"### Attention, forward and backward: {shape['heads']} heads ({shape['key_heads']} of keys) x "
        f"{shape['head_dim']}, {shape['dtype']}, median of {result['repeats']}\n",
        "| tokens | documents | window | layout | forward | backward | seconds | of contiguous | of zigzag | of one process | "
        "% of matmul speed | waiting | sent MiB | peak MiB |",
        "|--:|--:|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for found in result["operator"]:
        others = {
            other["layout"]: other["seconds"]
            for other in result["operator"]
            if _case(other) == _case(found)
        }
        ratios = [
            f"{others[name] / found['seconds']:.2f}x" if name in others else ""
            for name in ("contiguous", "zigzag", "one process")
        ]
        lines.append(
            f"| {found['row_length']} | {found['documents']} | {found['sliding_window'] or ''} | "
            f"{found['layout']} | {found['forward']:.3f} | {found['backward']:.3f} | {found['seconds']:.3f} | {' | '.join(ratios)} | "
            f"{100 * found['flops_of_matmul']:.0f} | {found['waiting']:.3f} | "
            f"{found['sent_bytes'] / 2**20:.1f} | {found['peak_bytes'] / 2**20:.0f} |"
        )
    return "\n".join(lines)


def _case(found: dict[str, Any]) -> tuple:
    return found["row_length"], found["documents"], found["sliding_window"]


def _training_table(training: list[dict[str, Any]]) -> str:
    lines = [
        "### A whole training step\n",
        "| model | parameters | tokens | documents | ranks | checkpointing | striped | one process | speedup | peak MiB of a rank | of one process |",
        "|---|--:|--:|--:|--:|---|--:|--:|--:|--:|--:|",
    ]
    for found in training:
        seconds, peak = found["seconds"], found["peak_bytes"]
        lines.append(
            f"| {found['model']} | {found['parameters'] / 1e6:.1f} M | {found['seq_len']} | {found['documents']} | {found['ranks']} | "
            f"{'yes' if found['checkpointing'] else 'no'} | {seconds['striped']:.2f} s | {seconds['one process']:.2f} s | {found['speedup']:.2f}x | "
            f"{peak['striped'] / 2**20:.0f} | {peak['one process'] / 2**20:.0f} |"
        )
    return "\n".join(lines)


def _simulated_table(simulated: list[dict[str, Any]]) -> str:
    lines = [
        "### Simulated rings: the kernels of all ranks one after another, added up as the critical path\n",
        "| ranks | measured | tokens | window | kernels | with transfers | at GB/s | one process | kernels / (one process / P) |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for found in simulated:
        lines.append(
            f"| {found['ranks']} | {len(found['measured_ranks'])} | {found['row_length']} | "
            f"{found['sliding_window'] or ''} | {found['kernel_seconds']:.3f} s | {found['seconds']:.3f} s | "
            f"{found['bandwidth'] / 1e9:g} | {found['one_process_seconds']:.3f} s | {found['kernels_of_ideal']:.3f} |"
        )
    return "\n".join(lines)
