"""Documents, the batches they can come in, and what one process makes of each alone.

The reference runs every document by itself through sdpa's plain matrix products (eager attention
has its softmax in fp32 whatever the model's type): no packing, no padding, no mask.
A layout puts the same documents into a natural-order batch and says where each token went.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy

from tests.models import VOCABULARY


class Layout(NamedTuple):
    """A natural-order batch, and for each document the row and first column of its tokens."""

    batch: dict
    places: list[tuple[int, int]]


def random_documents(lengths: Sequence[int], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in lengths]


def dense(documents) -> Layout:
    """One document a row, equal lengths, nothing but tokens and labels."""
    tokens = torch.stack(documents)
    return Layout({"input_ids": tokens, "labels": tokens}, [(r, 0) for r in range(len(documents))])


def padded(documents, side: str = "right") -> Layout:
    """One document a row, padded to the longest, with an attention_mask."""
    width = max(map(len, documents))
    shape = len(documents), width
    batch = {
        "input_ids": torch.zeros(shape, dtype=torch.long),
        "labels": torch.full(shape, -100),
        "attention_mask": torch.zeros(shape, dtype=torch.long),
    }
    places = []
    for row, document in enumerate(documents):
        column = 0 if side == "right" else width - len(document)
        places.append((row, column))
        here = slice(column, column + len(document))
        batch["input_ids"][row, here] = batch["labels"][row, here] = document
        batch["attention_mask"][row, here] = 1
    return Layout(batch, places)


def padded_left(documents) -> Layout:
    return padded(documents, "left")


def _packed(documents) -> Layout:
    tokens = torch.cat(documents)[None]
    places, column = [], 0
    for document in documents:
        places.append((0, column))
        column += len(document)
    return Layout({"input_ids": tokens, "labels": tokens.clone()}, places)


def packed_by_positions(documents) -> Layout:
    layout = _packed(documents)
    layout.batch["position_ids"] = torch.cat([torch.arange(len(d)) for d in documents])[None]
    return layout


def packed_with_full_mask(documents) -> Layout:
    layout = packed_by_positions(documents)
    layout.batch["attention_mask"] = torch.ones_like(layout.batch["input_ids"])
    return layout


def packed_by_cu_seq_lens(documents) -> Layout:
    layout = _packed(documents)
    lengths = torch.tensor([0] + [len(d) for d in documents])
    layout.batch["cu_seq_lens_q"] = layout.batch["cu_seq_lens_k"] = lengths.cumsum(0).int()
    layout.batch["max_length_q"] = layout.batch["max_length_k"] = int(lengths.max())
    return layout


def packed_by_seq_idx(documents) -> Layout:
    layout = _packed(documents)
    layout.batch["seq_idx"] = torch.cat(
        [torch.full((len(d),), index) for index, d in enumerate(documents)]
    )[None].int()
    return layout


def one_by_one(model, documents) -> dict:
    """Logits of each document alone, the mean loss over all targets, and its gradients."""
    count = max(sum(len(document) - 1 for document in documents), 1)
    logits, loss = [], 0.0
    model.zero_grad()
    for document in documents:
        with sdpa_kernel(SDPBackend.MATH):
            own = model(input_ids=document[None], use_cache=False).logits[0]
        logits.append(own.detach())
        share = cross_entropy(own[:-1], document[1:], reduction="sum") / count
        if len(document) > 1:
            share.backward()
            loss += share.item()
    return {"logits": logits, "loss": loss, "gradients": gradients(model), "count": count}


def gradients(model) -> dict[str, torch.Tensor]:
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }
