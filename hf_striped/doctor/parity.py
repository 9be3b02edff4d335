"""The same batch in one process and over the ring: loss and gradient norm side by side.

The row is packed: documents of uneven lengths, none a multiple of the number of ranks. One process sees each
token attend within its document alone, by Transformers' own "sdpa".
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_striped.context import ContextParallel
from hf_striped.doctor.report import NOTE, OK, WRONG, Report
from hf_striped.errors import StripedError
from hf_striped.integrations.collator import stripe_batch
from hf_striped.integrations.model import prepare_model
from hf_striped.integrations.transformers import ATTENTION_NAME
from hf_striped.models import has_weights, model_of, trained_model_of

# relative, of loss and gradient norm; Transformers computes the loss in float32 at best
TOLERANCES = {"float64": 1e-6, "float32": 1e-5, "bfloat16": 2e-2, "float16": 1e-2}


@dataclass(frozen=True)
class Trial:
    """What to compare: a model by name, and the tokens of the row."""

    model: str
    seq_len: int
    dtype: str


@dataclass(frozen=True)
class Step:
    """What a forward and a backward pass give."""

    loss: float
    gradient_norm: float


def check_parity(report: Report, trial: Trial, cp: ContextParallel, device: torch.device) -> None:
    """Compare `trial` in one process and over the ring. Every rank calls it; rank 0's report has the result."""
    dtype = getattr(torch, trial.dtype)
    weights = has_weights(trial.model)
    make = trained_model_of if weights else model_of
    report.add("model", OK if weights else NOTE, f"{trial.model}, {_weights_text(weights)}")
    try:
        model = prepare_model(make(trial.model, ATTENTION_NAME, dtype)).eval().to(device)
        row = packed_row(model.config.get_text_config().vocab_size, trial.seq_len)
        ring = ring_step(model, row, cp, device)
    except StripedError as refusal:  # the same on every rank
        report.add("ring", WRONG, f"refused: {refusal}")
        return
    del model
    alone = None
    if cp.rank == 0:
        alone = one_process_step(make(trial.model, "sdpa", dtype).eval().to(device), row, device)
    dist.barrier()
    if alone is not None:
        compare(report, alone, ring, TOLERANCES[trial.dtype], cp.size)


def compare(report: Report, alone: Step, ring: Step, tolerance: float, size: int) -> None:
    """Add loss and gradient norm of both, and whether they are the same."""
    for name, one, many in (
        ("loss", alone.loss, ring.loss),
        ("gradient norm", alone.gradient_norm, ring.gradient_norm),
    ):
        difference = abs(many - one) / max(abs(one), torch.finfo(torch.float64).tiny)
        same = difference <= tolerance  # false for nan, too
        text = f"one process {one:.8g}, {size} rank(s) {many:.8g}, relative difference {difference:.1e}"
        report.add(name, OK if same else WRONG, f"{text} (tolerance {tolerance:g})")


def packed_row(vocabulary: int, seq_len: int) -> dict[str, Tensor]:
    """One row `[1, seq_len]` of random tokens in documents of uneven lengths."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (1, seq_len), generator=generator)
    cuts = sorted({seq_len // 7, seq_len // 3 + 1, 2 * seq_len // 3 + 1} - {0, seq_len})
    bounds = [0, *(cut for cut in cuts if cut < seq_len), seq_len]
    lengths = [end - begin for begin, end in pairwise(bounds)]
    labels = tokens.clone()
    labels[0, bounds[:-1]] = -100  # no document's first token is predicted from another document
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return {"input_ids": tokens, "labels": labels, "position_ids": positions}


def ring_step(
    model: nn.Module, row: dict[str, Tensor], cp: ContextParallel, device: torch.device
) -> Step:
    """Every rank's stripe of the row; loss and gradients are summed over the ranks."""
    batch, _ = stripe_batch(row, cp.size, cp.rank)
    loss = _backward(model, batch, supervised(row), device)
    dist.all_reduce(loss, group=cp.group)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    for gradient in gradients:
        dist.all_reduce(gradient, group=cp.group)
    return Step(loss.item(), _norm(gradients))


def one_process_step(model: nn.Module, row: dict[str, Tensor], device: torch.device) -> Step:
    """The whole row, here."""
    loss = _backward(model, row, supervised(row), device)
    return Step(loss.item(), _norm([p.grad for p in model.parameters() if p.grad is not None]))


def supervised(row: dict[str, Tensor]) -> int:
    """Tokens of the row that are predicted."""
    return int((row["labels"] != -100).sum())


def _backward(
    model: nn.Module, batch: dict[str, Tensor], count: int, device: torch.device
) -> Tensor:
    batch = {key: value.to(device) for key, value in batch.items()}
    loss = model(**batch, use_cache=False, num_items_in_batch=count).loss
    loss.backward()
    return loss.detach().double()


def _norm(gradients: list[Tensor]) -> float:
    return sum(gradient.double().square().sum().item() for gradient in gradients) ** 0.5


def _weights_text(weights: bool) -> str:
    return "its own weights" if weights else "random weights: it has none of its own"
