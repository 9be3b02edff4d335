"""Every causal language model type of the installed Transformers works on stripes or is refused."""

import pytest

from tests.model_matrix import PAGE, outcome, row
from tests.model_zoo import model_types


@pytest.mark.parametrize("model_type", model_types())
def test_a_model_type_does_what_the_models_page_says(ranks, model_type):
    assert row(model_type, outcome(ranks, model_type)) in PAGE.read_text().splitlines(), (
        "docs/reference/models.md is stale: python -m tests.model_matrix"
    )


def test_the_models_page_has_each_type_once_and_no_other():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert sorted(line.split("`")[1] for line in rows) == sorted(model_types())
