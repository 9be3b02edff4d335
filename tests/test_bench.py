"""The benchmark's baselines are exact, so that what is compared is the same computation."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_striped import UnsupportedFeatureError
from hf_striped.bench.calls import call_backward, call_forward
from hf_striped.bench.layouts import group_of, make_layout
from hf_striped.bench.operator import document_bounds
from hf_striped.bench.page import page, page_of_files
from hf_striped.bench.problem import Problem
from tests.tolerances import assert_gradients_equal, assert_outputs_equal

PROBLEMS = {
    "dense": Problem([0, 48], None, 0.3),
    "packed": Problem([0, 1, 7, 7, 30, 48], None, 0.3),
    "windowed": Problem([0, 48], 5, 0.3),
    "packed and windowed": Problem([0, 20, 48], 7, 0.3),
}


def rows(problem):
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(problem.row_length, heads, 16, generator=generator, dtype=torch.float64)
        for heads in (4, 2, 2, 4)
    ]


def dense_softmax(problem):
    query, key, value, dout = rows(problem)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    index = torch.arange(problem.row_length)
    document = torch.bucketize(index, torch.tensor(problem.bounds), right=True)
    distance = index[:, None] - index
    allowed = (document[:, None] == document) & (distance >= 0)
    if problem.sliding_window is not None:
        allowed &= distance < problem.sliding_window
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(2, 1)) * problem.scale
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    out = torch.einsum("hqk,khd->qhd", weights, value.repeat_interleave(2, 1))
    return int(allowed.sum()), out.detach(), torch.autograd.grad(out, leaves, dout)


def run_layout(rank, world, name, problem):
    layout = make_layout(name, problem, group_of(world))
    tokens = layout.tokens()
    query, key, value, dout = (tensor[tokens] for tensor in rows(problem))
    out, lse = layout.forward(query, key, value)
    return tokens, out, *layout.backward(dout, query, key, value, out, lse)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("name", ["striped", "contiguous", "zigzag", "all-gather"])
def test_every_layout_computes_the_same_attention(ranks, name, problem, world):
    pairs, out, gradients = dense_softmax(PROBLEMS[problem])
    assert PROBLEMS[problem].pairs == pairs
    found = list(zip(*ranks.run(world, run_layout, name, PROBLEMS[problem]), strict=True))
    order = torch.cat(found[0]).argsort()
    assert_outputs_equal(torch.cat(found[1])[order], out)
    for actual, expected in zip(found[2:], gradients, strict=True):
        assert_gradients_equal(torch.cat(actual)[order], expected)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_one_process_computes_the_same_attention(problem):
    _, out, gradients = dense_softmax(PROBLEMS[problem])
    _, actual, *found = run_layout(0, 1, "one-process", PROBLEMS[problem])
    assert_outputs_equal(actual, out)
    for gradient, expected in zip(found, gradients, strict=True):
        assert_gradients_equal(gradient, expected)


@pytest.mark.parametrize("causal", [False, True])
def test_a_gpus_operators_take_the_pieces(causal):
    """Shapes on meta tensors, against the operators' own schemas; not yet run on a GPU."""
    query = torch.empty(12, 4, 64, dtype=torch.bfloat16, device="meta")
    key = torch.empty(20, 2, 64, dtype=torch.bfloat16, device="meta")
    out, lse = call_forward(query, key, key, causal, None, 0.125)
    assert out.shape == query.shape and lse.shape == (12, 4)
    found = call_backward(out, query, key, key, out, lse, causal, None, 0.125)
    assert [gradient.shape for gradient in found] == [query.shape, key.shape, key.shape]
    with pytest.raises(UnsupportedFeatureError, match="measured on CPUs only"):
        call_forward(query, key, key, False, torch.zeros(12, 20), 0.125)


def test_documents_fill_the_row_with_the_mean_that_was_asked_for():
    bounds = document_bounds("packed", 2**20, mean=2048)
    assert bounds[0] == 0 and bounds[-1] == 2**20
    assert 2**20 / 2048 * 0.8 < len(bounds) < 2**20 / 2048 * 1.2
    assert document_bounds("dense", 64) == [0, 64]


def bench(*options):
    command = [sys.executable, "-m", "hf_striped.cli", "bench", *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_command_measures_plots_and_makes_a_page(tmp_path):
    output = tmp_path / "found.json"
    options = ("--seq-len", 64, "--repeats", 1, "--heads", 4, "--key-heads", 2, "--model", "tiny")
    done = bench(*options, "--simulate", 2, "--plot", "--output", output)
    assert done.returncode == 0, done.stderr
    result = json.loads(output.read_text())
    names = ["striped", "contiguous", "zigzag", "striped, all-gather", "one process"]
    assert [found["layout"] for found in result["operator"]] == names
    assert result["training"][0]["seq_len"] == 64 and result["simulated"][0]["ranks"] == 2
    # keys and values once forward; once backward, and their gradients home in fp32
    tokens, width = 32, 2 * 2 * 64
    for found in result["operator"][:4]:
        assert found["sent_bytes"] == 3 * tokens * width * 4
    assert {path.name for path in tmp_path.glob("*.png")} == {
        "found-speed.png",
        "found-steps.png",
    }
    made = tmp_path / "page.md"
    command = [sys.executable, "-m", "hf_striped.cli", "bench-page", output, "--output", made]
    subprocess.run(command, check=True, timeout=60)
    assert made.read_text() == page([result], [["found-speed.png", "found-steps.png"]])
    assert "hf-striped bench" in made.read_text()


def test_sizes_that_no_layout_can_take_are_refused(tmp_path):
    done = bench("--seq-len", 66, "--output", tmp_path / "found.json")
    assert done.returncode == 2
    assert "--seq-len must be a multiple of 4 for 2 ranks" in done.stderr


def test_the_benchmark_page_is_that_of_its_results():
    docs = Path(__file__).parent.parent / "docs"
    results = sorted((docs / "benchmarks").glob("*.json"))
    assert results and (docs / "benchmarks.md").read_text() == page_of_files(results, docs), (
        "hf-striped bench-page docs/benchmarks/*.json --output docs/benchmarks.md"
    )
