"""A whole training step of a model, striped over the ranks and in one process, in turn."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_striped.bench.measure import barrier, peak_memory, synchronise
from hf_striped.integrations.accelerate import StripedParallelismConfig
from hf_striped.integrations.collator import stripe_batch
from hf_striped.integrations.model import prepare_model
from hf_striped.integrations.transformers import ATTENTION_NAME
from hf_striped.models import model_of


def run_training(
    name: str,
    bounds: Sequence[int],
    repeats: int,
    dtype: str,
    device: torch.device,
    checkpointing: bool = False,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Seconds of a step, forward, backward and SGD, over all ranks and in one process.

    Args:
        name: the model's; see `hf_striped.models.config_of`.
        bounds: of the documents of the one row, from 0 to its length, a multiple of the number of ranks.
        repeats: steps that are timed, after one that warms up.
        dtype: of the weights.
        device: this rank's.
        checkpointing: whether both models recompute their layers in the backward pass.
    """
    size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if size > 1 else 0
    Accelerator(cpu=device.type == "cpu", parallelism_config=StripedParallelismConfig(size))
    striped = prepare_model(model_of(name, ATTENTION_NAME, getattr(torch, dtype)).to(device))
    step = DistributedDataParallel(striped) if size > 1 else striped
    alone = model_of(name, "sdpa", getattr(torch, dtype)).to(device) if rank == 0 else None
    for model in (striped, alone) if checkpointing else ():
        if model is not None:
            model.gradient_checkpointing_enable({"use_reentrant": False})
    row = {"input_ids": torch.randint(striped.config.vocab_size, (1, bounds[-1]))}
    row["labels"] = row["input_ids"]
    row["position_ids"] = torch.cat([torch.arange(e - b) for b, e in pairwise(bounds)])[None]
    batch, _ = stripe_batch(row, size, rank)
    batch = {key: value.to(device) for key, value in batch.items()}
    if len(bounds) == 2:  # sdpa is given no mask for one document, and a faster kernel runs
        del row["position_ids"]
    whole = {**{key: value.to(device) for key, value in row.items()}, "use_cache": False}
    runs = {"striped": (step, {**batch, "use_cache": False}), "one process": (alone, whole)}
    seconds: dict[str, list[float]] = {label: [] for label in runs}
    memory, losses = {}, {}
    for repeat in range(repeats + 1):
        for label, (model, inputs) in runs.items():
            barrier()
            start = perf_counter()
            if model is not None:
                take = _step(model, inputs, device, losses, label)
                if repeat == 0:
                    memory[label] = peak_memory(take, device)
                else:
                    take()
            barrier()
            if repeat:
                seconds[label].append(perf_counter() - start)
            progress()
    medians = {label: median(found) for label, found in seconds.items()}
    return {
        "model": Path(name).name,
        "parameters": sum(p.numel() for p in striped.parameters()),
        "seq_len": bounds[-1],
        "documents": len(bounds) - 1,
        "ranks": size,
        "checkpointing": checkpointing,
        "seconds": medians,
        "all_seconds": seconds,
        "peak_bytes": memory,
        "speedup": medians["one process"] / medians["striped"],
    }


def _step(
    model: nn.Module, inputs: dict[str, Any], device: torch.device, losses: dict, label: str
) -> Callable[[], None]:
    def take() -> None:
        loss = model(**inputs).loss
        loss.backward()
        losses[label] = loss.detach()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 1e-6 * parameter.grad
                parameter.grad = None
        synchronise(device)

    return take
