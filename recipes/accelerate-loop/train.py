"""A training loop of your own with Accelerate, no Trainer: packed rows, accumulation, exact token means."""

import argparse
import json
import math
import sysconfig
from contextlib import nullcontext
from itertools import islice
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorWithFlattening,
    LlamaConfig,
    get_cosine_schedule_with_warmup,
)

from hf_striped import StripedDataCollator, StripedParallelismConfig, prepare_model

TINY = {"vocab_size": 259, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-360M", help="folder or hub name")
    parser.add_argument("--text", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    parser.add_argument("--pattern", default="*.py", help="which files of --text are documents")
    parser.add_argument(
        "--max-document", type=int, default=32768, help="tokens; longer ones are cut"
    )
    parser.add_argument("--context-parallel-size", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=4, help="documents packed into a row")
    parser.add_argument("--accumulation", type=int, default=2, help="rows a step takes")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--output", default="loop", help="where state and model are saved")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, eight short documents")
    return parser.parse_args()


def load(options: argparse.Namespace) -> tuple[torch.nn.Module, list[dict]]:
    """The model, and documents as dictionaries of `input_ids`."""
    files = sorted(options.text.glob(options.pattern))[: 8 if options.smoke else None]
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    if options.smoke:
        options.epochs = 3
        config = LlamaConfig(**TINY)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="striped_ring")
        documents = [list(text.encode())[: 30 + 7 * i] for i, text in enumerate(texts)]
    else:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        documents = [tokenizer(text)["input_ids"][: options.max_document] for text in texts]
        model = AutoModelForCausalLM.from_pretrained(
            options.model, attn_implementation="striped_ring", dtype=torch.float32
        )
    return model, [{"input_ids": document} for document in documents if len(document) > 1]


def main() -> None:
    options = parse_arguments()
    cuda = torch.cuda.is_available()
    accelerator = Accelerator(
        cpu=not cuda,
        mixed_precision="bf16" if cuda else "no",
        parallelism_config=StripedParallelismConfig(
            options.context_parallel_size, loss_tile_size=2048
        ),
    )
    set_seed(0)
    model, documents = load(options)
    prepare_model(model)  # once: checks its layers, and gives it what the config asks for
    loader = DataLoader(
        documents,
        batch_size=options.batch_size,
        shuffle=True,
        collate_fn=StripedDataCollator(DataCollatorWithFlattening()),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps = options.epochs * math.ceil(len(loader) / options.accumulation)
    schedule = get_cosine_schedule_with_warmup(optimizer, 1, steps)
    figures = {"loss": [], "grad_norm": []}
    model.train()
    for _ in range(options.epochs):
        batches = iter(loader)
        while window := list(islice(batches, options.accumulation)):
            # each rank counts the targets of its stripes: their sum is the step's
            counted = sum((batch["shift_labels"] != -100).sum() for batch in window)
            targets = accelerator.reduce(counted, "sum")
            total = torch.zeros((), device=accelerator.device)
            for number, batch in enumerate(window, 1):
                last = number == len(window)
                with nullcontext() if last else accelerator.no_sync(model):
                    loss = model(**batch, use_cache=False, num_items_in_batch=targets).loss
                    total += loss.detach()
                    accelerator.backward(loss * accelerator.num_processes)  # DDP takes the mean
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            figures["loss"].append(accelerator.reduce(total, "sum").item())
            figures["grad_norm"].append(norm.item())
            accelerator.print({name: round(values[-1], 4) for name, values in figures.items()})
    accelerator.save_state(options.output)
    accelerator.print(json.dumps(figures))


if __name__ == "__main__":
    main()
