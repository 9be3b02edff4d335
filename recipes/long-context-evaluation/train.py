"""Evaluate over long contexts: perplexity by position in a document, and a needle in a haystack by depth."""

import argparse
import json
import sysconfig
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from hf_striped import StripedDataCollator, StripedParallelismConfig, prepare_model

TINY = {"vocab_size": 259, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}
PARTS = ("\nThe pass key is {key}.\n", "\nThe pass key is", " {key}.")
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-1.7B", help="folder or hub name")
    parser.add_argument("--text", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    parser.add_argument("--pattern", default="*.py", help="which files of --text make the hay")
    parser.add_argument("--seq-len", type=int, default=131072, help="the length of each context")
    parser.add_argument("--contexts", type=int, default=8, help="for perplexity, and each depth")
    parser.add_argument("--bins", type=int, default=8, help="of positions, equally wide")
    parser.add_argument("--context-parallel-size", type=int, default=8)
    parser.add_argument("--smoke", action="store_true", help="a tiny model, contexts of 200 bytes")
    return parser.parse_args()


def rows_of(options: argparse.Namespace, text: str, tokenize) -> list[dict]:
    """Contexts to score: first those for perplexity, then for each of them one with a needle a depth."""
    tokens, size = tokenize(text), options.seq_len
    if len(tokens) < options.contexts * size:
        asked = f"{options.contexts} contexts of {size} tokens, from a text of {len(tokens)}"
        raise SystemExit(f"Too little text: {asked}. Name more by --text, or lower --contexts.")
    pieces = [tokens[i * size : (i + 1) * size] for i in range(options.contexts)]
    rows = [(piece, piece) for piece in pieces]
    for number, piece in enumerate(pieces):
        key = 10000 + 7919 * number % 90000
        needle, question, answer = (tokenize(part.format(key=key)) for part in PARTS)
        hay = piece[: size - len(needle) - len(question) - len(answer)]
        for at in (int(depth * len(hay)) for depth in DEPTHS):
            prompt = hay[:at] + needle + hay[at:] + question
            rows.append((prompt + answer, [-100] * len(prompt) + answer))
    return [{"number": n, "input_ids": row[0], "labels": row[1]} for n, row in enumerate(rows)]


def collate(rows: list[dict]) -> dict:
    """One context a batch; its number is passed through."""
    tensors = {name: torch.tensor([rows[0][name]]) for name in ("input_ids", "labels")}
    return {**tensors, "number": rows[0]["number"]}


def evaluate(
    options: argparse.Namespace, accelerator: Accelerator, model, rows: list[dict]
) -> dict:
    """Perplexity of each bin of positions, and the share of needles found at each depth."""
    loader = DataLoader(rows, batch_size=1, collate_fn=StripedDataCollator(collate))
    lost, counted = torch.zeros(2, options.bins, dtype=torch.float64, device=accelerator.device)
    missed = torch.zeros(len(rows), device=accelerator.device)
    for batch in accelerator.prepare(loader):
        number, _, targets = (batch.pop(name) for name in ("number", "labels", "shift_labels"))
        with torch.no_grad():
            logits = model(**batch, use_cache=False).logits
        real = targets != -100
        if number < options.contexts:
            losses = cross_entropy(logits[real].float(), targets[real], reduction="none").double()
            bins = batch["position_ids"][real] * options.bins // options.seq_len
            lost.index_add_(0, bins, losses)
            counted.index_add_(0, bins, torch.ones_like(losses))
        missed[number] += (logits[real].argmax(-1) != targets[real]).sum()
    # every rank has scored the tokens of its stripes: added up, they are all tokens of all contexts
    lost, counted, missed = (
        accelerator.reduce(figure, "sum") for figure in (lost, counted, missed)
    )
    found = (missed[options.contexts :] == 0).view(options.contexts, len(DEPTHS)).double().mean(0)
    return {"perplexity": (lost / counted).exp().tolist(), "needles": found.tolist()}


def main() -> None:
    options = parse_arguments()
    cuda = torch.cuda.is_available()
    accelerator = Accelerator(
        cpu=not cuda,
        parallelism_config=StripedParallelismConfig(options.context_parallel_size),
        dataloader_config=DataLoaderConfiguration(even_batches=False),  # nothing is scored twice
    )
    set_seed(0)
    files = sorted(options.text.glob(options.pattern))[: 1 if options.smoke else None]
    text = "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
    if options.smoke:
        options.seq_len, options.contexts = 200, 3
        rows = rows_of(options, text, lambda text: list(text.encode()))
        config = LlamaConfig(**TINY)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="striped_ring")
    else:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        rows = rows_of(options, text, lambda text: tokenizer.encode(text, add_special_tokens=False))
        model = AutoModelForCausalLM.from_pretrained(
            options.model, attn_implementation="striped_ring", dtype="auto" if cuda else "float32"
        )
    model = prepare_model(model).to(accelerator.device).eval()
    figures = evaluate(options, accelerator, model, rows)
    width = options.seq_len // options.bins
    for number, perplexity in enumerate(figures["perplexity"]):
        accelerator.print(f"perplexity from token {number * width:>8}: {perplexity:10.3f}")
    for depth, share in zip(DEPTHS, figures["needles"], strict=True):
        accelerator.print(f"needles found at depth {depth:4.0%}: {share:6.0%}")
    accelerator.print(json.dumps(figures))


if __name__ == "__main__":
    main()
