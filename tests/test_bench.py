"""The benchmark's baselines are exact, so that what is compared is the same computation."""

import pytest
import torch

from hf_striped.bench.layouts import Problem, group_of, make_layout
from hf_striped.bench.operator import document_bounds
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


def test_documents_fill_the_row_with_the_mean_that_was_asked_for():
    bounds = document_bounds("packed", 2**20, mean=2048)
    assert bounds[0] == 0 and bounds[-1] == 2**20
    assert 2**20 / 2048 * 0.8 < len(bounds) < 2**20 / 2048 * 1.2
    assert document_bounds("dense", 64) == [0, 64]
