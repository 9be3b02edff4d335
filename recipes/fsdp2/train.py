"""FSDP2 over data x context parallel ranks: parameters, gradients and optimizer state sharded over all of them."""

import argparse
import json
from itertools import chain

import torch
from datasets import Dataset, load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from hf_striped import StripedDataCollator, StripedParallelismConfig, StripedTelemetry

TINY = {"vocab_size": 259, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="meta-llama/Llama-3.1-8B", help="folder or hub name")
    parser.add_argument("--data", help="JSON lines, each with text")
    parser.add_argument("--seq-len", type=int, default=131072, help="tokens a row, over a group")
    parser.add_argument("--context-parallel-size", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=1, help="rows a group takes at a time")
    parser.add_argument("--accumulation", type=int, default=4, help="batches a step takes")
    parser.add_argument("--max-steps", type=int, default=500)
    parser.add_argument(
        "--output", default="fsdp2", help="sharded checkpoints, and the whole model"
    )
    parser.add_argument("--resume", action="store_true", help="from the last checkpoint there")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, rows of 48 bytes")
    options = parser.parse_args()
    return options if options.smoke or options.data else parser.error("name --data, or --smoke")


def cut(dataset: Dataset, seq_len: int) -> Dataset:
    """Documents joined and cut into rows; positions restart where a document does."""

    def rows(batch: dict[str, list]) -> dict[str, list]:
        documents = batch["input_ids"]
        columns = {
            "input_ids": list(chain(*documents)),
            "position_ids": list(chain(*(range(len(document)) for document in documents))),
        }
        starts = range(0, len(columns["input_ids"]) - seq_len + 1, seq_len)
        cut = {name: [all[i : i + seq_len] for i in starts] for name, all in columns.items()}
        # a row may begin inside a document, whose start it does not have: its positions count from 0
        for row in cut["position_ids"]:
            first = row.index(0) if 0 in row else len(row)
            row[:first] = range(first)
        return {**cut, "labels": cut["input_ids"]}

    return dataset.map(rows, batched=True, batch_size=1000, remove_columns=dataset.column_names)


def main() -> None:
    options = parse_arguments()
    set_seed(0)
    if options.smoke:
        options.seq_len, options.max_steps = 48, 3
        text = b"Sharded over all ranks, and striped over those of a group. " * 9
        dataset = Dataset.from_dict({"input_ids": [list(text[:n]) for n in range(40, 400, 30)]})
        config = LlamaConfig(**TINY)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="striped_ring")
    else:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        dataset = load_dataset("json", data_files=options.data, split="train")
        dataset = dataset.map(
            lambda row: {"input_ids": tokenizer(row["text"] + tokenizer.eos_token)["input_ids"]},
            remove_columns=dataset.column_names,
        )
        model = AutoModelForCausalLM.from_pretrained(
            options.model, attn_implementation="striped_ring", dtype=torch.float32
        )
    trainer = Trainer(
        model=model,
        args=TrainingArguments(  # that it is FSDP2, and how, is in gpu.yaml
            output_dir=options.output,
            parallelism_config=StripedParallelismConfig(
                options.context_parallel_size, loss_tile_size=2048, keep_attention=True
            ),
            activation_checkpointing=True,
            bf16=torch.cuda.is_available(),
            use_cpu=not torch.cuda.is_available(),
            per_device_train_batch_size=options.batch_size,
            gradient_accumulation_steps=options.accumulation,
            max_steps=options.max_steps,
            learning_rate=1e-5,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=0.02,
            logging_steps=1,
            save_steps=100,
            save_total_limit=2,
            report_to=[],
        ),
        train_dataset=cut(dataset, options.seq_len),
        data_collator=StripedDataCollator(default_data_collator),
        callbacks=[StripedTelemetry()],
    )
    trainer.train(resume_from_checkpoint=options.resume or None)
    trainer.save_model()
    if trainer.is_world_process_zero():
        history = [log for log in trainer.state.log_history if "loss" in log]
        print(json.dumps({name: [log[name] for log in history] for name in ("loss", "grad_norm")}))


if __name__ == "__main__":
    main()
