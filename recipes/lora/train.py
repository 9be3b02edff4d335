"""LoRA on one machine: adapters that learn to answer from long prompts, with the loss on the answers alone."""

import argparse
import json

import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorWithFlattening,
    LlamaConfig,
    Trainer,
    TrainingArguments,
    set_seed,
)

from hf_striped import StripedDataCollator, StripedParallelismConfig

TINY = {"vocab_size": 259, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="meta-llama/Llama-3.1-8B-Instruct")
    parser.add_argument("--data", help='JSON lines, each {"prompt": "..", "completion": ".."}')
    parser.add_argument(
        "--seq-len", type=int, default=131072, help="longer prompts lose their start"
    )
    parser.add_argument("--context-parallel-size", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=1, help="examples packed into a row")
    parser.add_argument("--epochs", type=float, default=1)
    parser.add_argument("--rank", type=int, default=16, help="the rank of the adapters")
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--output", default="lora", help="where the adapter is saved")
    parser.add_argument("--smoke", action="store_true", help="a tiny model and made-up examples")
    options = parser.parse_args()
    return options if options.smoke or options.data else parser.error("name --data, or --smoke")


def example(prompt: list[int], completion: list[int], seq_len: int) -> dict[str, list[int]]:
    prompt = prompt[-(seq_len - len(completion)) :]
    return {
        "input_ids": prompt + completion,
        "labels": [-100] * len(prompt) + completion,
    }


def main() -> None:
    options = parse_arguments()
    set_seed(0)
    if options.smoke:
        config = LlamaConfig(**TINY)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="striped_ring")
        lengths = [17, 40, 5, 31, 64, 12, 23, 50]
        rows = [
            example(list(b"A prompt with a haystack. " * 3)[:length], list(b"Found."), 60)
            for length in lengths
        ]
    else:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        dataset = load_dataset("json", data_files=options.data, split="train")
        rows = [
            example(
                tokenizer(row["prompt"])["input_ids"],
                tokenizer(row["completion"], add_special_tokens=False)["input_ids"]
                + [tokenizer.eos_token_id],
                options.seq_len,
            )
            for row in dataset
        ]
        dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
        model = AutoModelForCausalLM.from_pretrained(
            options.model, attn_implementation="striped_ring", dtype=dtype
        )
    model.enable_input_require_grads()  # checkpointing needs a gradient at the first layer's input
    adapters = LoraConfig(r=options.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, adapters)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=options.output,
            parallelism_config=StripedParallelismConfig(
                options.context_parallel_size, loss_tile_size=2048, keep_attention=True
            ),
            activation_checkpointing=True,
            bf16=torch.cuda.is_available(),
            use_cpu=not torch.cuda.is_available(),
            per_device_train_batch_size=options.batch_size,
            num_train_epochs=options.epochs,
            learning_rate=options.learning_rate,
            logging_steps=1,
            report_to=[],
        ),
        train_dataset=rows,
        data_collator=StripedDataCollator(DataCollatorWithFlattening()),
    )
    trainer.train()
    trainer.save_model()  # the adapter alone: PeftModel.from_pretrained(base, folder) loads it
    if trainer.is_world_process_zero():
        history = [log for log in trainer.state.log_history if "loss" in log]
        print(json.dumps({name: [log[name] for log in history] for name in ("loss", "grad_norm")}))


if __name__ == "__main__":
    main()
