"""Train a causal language model on blocks of text, with metrics: a script of the usual kind."""

import argparse
import json
import math
import sysconfig
from itertools import chain
from pathlib import Path

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from hf_striped import StripedDataCollator, StripedParallelismConfig, StripedTrainer


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M", help="folder or hub name")
    parser.add_argument("--text", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    parser.add_argument("--pattern", default="*.py", help="which files of --text are documents")
    parser.add_argument("--block-size", type=int, default=8192)
    parser.add_argument("--context-parallel-size", type=int, default=8)
    parser.add_argument("--output", default="clm")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, blocks of 100 bytes")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    set_seed(0)
    files = sorted(options.text.glob(options.pattern))[: 4 if options.smoke else None]
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    tiny = LlamaConfig(vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    if options.smoke:
        options.block_size = 100
        tokens = [list(text.encode())[:500] for text in texts]
        model = AutoModelForCausalLM.from_config(tiny, attn_implementation="striped_ring")
    else:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        tokens = [tokenizer(text)["input_ids"] for text in texts]
        model = AutoModelForCausalLM.from_pretrained(
            options.model, dtype=torch.float32, attn_implementation="striped_ring"
        )

    def group_texts(examples: dict[str, list]) -> dict[str, list]:
        """All texts joined and cut into blocks; the remainder is dropped."""
        joined = list(chain(*examples["input_ids"]))
        starts = range(0, len(joined) - options.block_size + 1, options.block_size)
        blocks = [joined[i : i + options.block_size] for i in starts]
        return {"input_ids": blocks, "labels": blocks}

    grouped = Dataset.from_dict({"input_ids": tokens}).map(group_texts, batched=True)
    splits = grouped.train_test_split(0.25, seed=0)

    def preprocess_logits_for_metrics(logits, labels):
        return logits.argmax(-1)

    def compute_metrics(predictions):
        hits = predictions.predictions[:, :-1] == predictions.label_ids[:, 1:]
        return {"accuracy": float(hits.mean())}

    trainer = StripedTrainer(
        model=model,
        args=TrainingArguments(
            output_dir=options.output,
            per_device_train_batch_size=2,
            num_train_epochs=1,
            learning_rate=5e-5,
            logging_steps=1,
            use_cpu=not torch.cuda.is_available(),
            bf16=torch.cuda.is_available(),
            report_to=[],
            parallelism_config=StripedParallelismConfig(options.context_parallel_size),
        ),
        train_dataset=splits["train"],
        eval_dataset=splits["test"],
        data_collator=StripedDataCollator(default_data_collator),
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=preprocess_logits_for_metrics,
    )
    trainer.train()
    trainer.save_model()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        found = [metrics["eval_loss"], math.exp(metrics["eval_loss"]), metrics["eval_accuracy"]]
        print(json.dumps({"loss": losses, "eval_loss, perplexity, accuracy": found}))


if __name__ == "__main__":
    main()
