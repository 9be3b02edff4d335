"""Every causal language model type of the installed Transformers works on stripes or is refused."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.model_matrix import PAGE, WORKS, build, outcome, row
from tests.model_zoo import model_types
from tests.models import VOCABULARY

WORKING = [name for name in model_types() if row(name, WORKS) in PAGE.read_text().splitlines()]


@pytest.mark.parametrize("model_type", model_types())
def test_a_model_type_does_what_the_models_page_says(ranks, model_type):
    assert row(model_type, outcome(ranks, model_type)) in PAGE.read_text().splitlines(), (
        "docs/reference/models.md is stale: python -m tests.model_matrix"
    )


def test_the_models_page_has_each_type_once_and_no_other():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert sorted(line.split("`")[1] for line in rows) == sorted(model_types())


@pytest.mark.parametrize("model_type", WORKING)
def test_a_model_that_works_takes_its_loss_from_shift_labels_and_the_count(model_type):
    model = build(model_type, "eager", prepare=False).eval()
    tokens, labels = torch.randint(3, VOCABULARY, (2, 1, 12))
    labels[0, 5] = -100
    with torch.no_grad():
        output = model(
            input_ids=tokens,
            labels=labels,
            shift_labels=labels,
            num_items_in_batch=22,
            use_cache=False,
        )
    expected = cross_entropy(output.logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(output.loss.float(), expected / 22, atol=1e-4, rtol=0)
