"""A model's forward and backward pass on stripes, compared with one process."""

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.nn.functional import cross_entropy

from hf_striped import StripedDataCollator, StripedParallelismConfig, unstripe
from tests.documents import gradients, one_by_one
from tests.tolerances import assert_gradients_equal, assert_outputs_equal


def already_batched(features):
    """A base collator for features that are one natural-order batch."""
    return features[0]


def striped_pass(rank, world, build_model, batch, count, checkpointing=False):
    """On a rank: this stripe's logits, its share of the loss, and the group's gradients."""
    Accelerator(cpu=True, parallelism_config=StripedParallelismConfig(world))
    model = build_model("striped_ring")
    if checkpointing:
        model.gradient_checkpointing_enable()
    striped = StripedDataCollator(already_batched)([batch])
    labels = striped.pop("labels")
    targets = striped.pop("shift_labels")
    assert torch.equal(labels, targets)
    logits = model(**striped, use_cache=False).logits
    loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / count
    loss.backward()
    found = gradients(model)
    if world > 1:
        for gradient in found.values():
            dist.all_reduce(gradient)
    return {"logits": logits.detach(), "loss": loss.item(), "gradients": found}


def assert_equal_to_one_process(
    ranks, cp_size, build_model, documents, layout, checkpointing=False
):
    """The batch `layout(documents)` on stripes gives each document what it gets alone."""
    expected = one_by_one(build_model("sdpa"), documents)
    batch, places = layout(documents)
    results = ranks.run(cp_size, striped_pass, build_model, batch, expected["count"], checkpointing)
    logits = unstripe([result["logits"] for result in results], dim=1)
    for document, own, (row, column) in zip(documents, expected["logits"], places, strict=True):
        assert_outputs_equal(logits[row, column : column + len(document)], own)
    loss = torch.tensor(sum(result["loss"] for result in results), dtype=logits.dtype)
    assert_outputs_equal(loss, torch.tensor(expected["loss"], dtype=logits.dtype))
    assert logits.isfinite().all()
    for result in results:
        for name, gradient in expected["gradients"].items():
            assert_gradients_equal(result["gradients"][name], gradient)
