"""Two runs give bitwise equal losses, gradients and weights."""

from functools import partial

import pytest
import torch

from tests.models import token_rows
from tests.training import train


def deterministic_run(rank, world, rows, cp_size, **options):
    torch.use_deterministic_algorithms(True)  # what full_determinism=True does, too
    try:
        return train(rank, world, rows, cp_size, **options)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("config", [{"exchange": "ring"}, {"exchange": "gather"}])
def test_two_deterministic_runs_are_bitwise_equal(ranks, config):
    rows = token_rows(6, 65)
    run = partial(deterministic_run, config=config, learning_rate=0.5)
    first, second = (ranks.run(4, run, rows, 4) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert one["losses"] == other["losses"] and one["grad_norms"] == other["grad_norms"]
        for name, weight in one["weights"].items():
            assert torch.equal(weight, other["weights"][name]), name
