"""Several machines: heads are shared inside the ring, rows are streamed, a stopped job goes on where it was."""

import argparse
import json
from pathlib import Path

import torch
from datasets import Dataset, load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorWithFlattening,
    LlamaConfig,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

from hf_striped import StripedDataCollator, StripedParallelismConfig, StripedTelemetry

TINY = {"vocab_size": 259, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="meta-llama/Llama-3.1-8B", help="folder or hub name")
    parser.add_argument("--data", help="JSON lines files or a pattern of them, each line with text")
    parser.add_argument("--seq-len", type=int, default=1048576, help="longer documents are cut")
    parser.add_argument("--context-parallel-size", type=int, default=16)
    parser.add_argument("--heads-parallel-size", type=int, help="default: machines a group spans")
    parser.add_argument("--batch-size", type=int, default=1, help="documents packed into a row")
    parser.add_argument("--max-steps", type=int, default=1000, help="a stream has no length")
    parser.add_argument("--save-steps", type=int, default=50, help="what a lost machine costs")
    parser.add_argument("--output", default="multi-node", help="a folder that all machines see")
    parser.add_argument("--smoke", action="store_true", help="a tiny model and made-up documents")
    options = parser.parse_args()
    return options if options.smoke or options.data else parser.error("name --data, or --smoke")


def main() -> None:
    options = parse_arguments()
    set_seed(0)
    if options.smoke:
        options.max_steps, options.save_steps = 3, 2
        text = b"A ring over machines, and heads inside of each. " * 4
        rows = Dataset.from_dict({"input_ids": [list(text[:n]) for n in range(30, 180, 11)]})
        stream = rows.to_iterable_dataset()
        config = LlamaConfig(**TINY)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="striped_ring")
    else:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        stream = load_dataset("json", data_files=options.data, split="train", streaming=True)
        stream = stream.shuffle(seed=0, buffer_size=1000).map(
            lambda row: {"input_ids": tokenizer(row["text"])["input_ids"][: options.seq_len]},
            remove_columns=stream.column_names,
        )
        model = AutoModelForCausalLM.from_pretrained(
            options.model, attn_implementation="striped_ring", dtype=torch.float32
        )
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=options.output,
            parallelism_config=StripedParallelismConfig(
                options.context_parallel_size,
                heads_parallel_size=options.heads_parallel_size,
                loss_tile_size=2048,
                keep_attention=True,
            ),
            activation_checkpointing=True,
            bf16=torch.cuda.is_available(),
            use_cpu=not torch.cuda.is_available(),
            per_device_train_batch_size=options.batch_size,
            max_steps=options.max_steps,
            learning_rate=1e-5,
            logging_steps=1,
            save_steps=options.save_steps,
            save_total_limit=2,
            accelerator_config={"dispatch_batches": False},  # each rank reads the stream
            ddp_timeout=1800,  # seconds: a machine that is lost ends the job, which then resumes
            report_to=[],
        ),
        train_dataset=stream,
        data_collator=StripedDataCollator(DataCollatorWithFlattening()),
        callbacks=[StripedTelemetry()],
    )
    # a job that a scheduler starts again finds its last checkpoint by itself
    last = get_last_checkpoint(options.output) if Path(options.output).is_dir() else None
    trainer.train(resume_from_checkpoint=last)
    trainer.save_model()
    if trainer.is_world_process_zero():
        history = [log for log in trainer.state.log_history if "loss" in log]
        print(json.dumps({name: [log[name] for log in history] for name in ("loss", "grad_norm")}))


if __name__ == "__main__":
    main()
