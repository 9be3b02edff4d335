"""Fine-tune on conversations with TRL's SFTTrainer: packed rows, loss on the assistant's words alone."""

import argparse
import json

import torch
from datasets import Dataset, load_dataset
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from hf_striped import StripedDataCollator, StripedParallelismConfig

TINY = {"vocab_size": 259, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}

# the model's own template may not mark what the assistant says; this is ChatML with the marks
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-1.7B-Instruct")
    parser.add_argument(
        "--data", help='JSON lines, each {"messages": [{"role": .., "content": ..}]}'
    )
    parser.add_argument("--seq-len", type=int, default=65536, help="tokens a packed row")
    parser.add_argument("--context-parallel-size", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=1, help="rows a group takes at a time")
    parser.add_argument("--epochs", type=float, default=1)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--output", default="sft")
    parser.add_argument(
        "--smoke", action="store_true", help="a tiny model and made-up conversations"
    )
    options = parser.parse_args()
    return options if options.smoke or options.data else parser.error("name --data, or --smoke")


def smoke_set_up() -> tuple[LlamaConfig, PreTrainedTokenizerFast, Dataset]:
    """A tokenizer of bytes, the shape of a tiny model, and twelve conversations of uneven lengths."""
    special = ["<pad>", "<|im_start|>", "<|im_end|>"]
    bytes_alone = ByteLevelBPETokenizer()
    bytes_alone.train_from_iterator([], vocab_size=259, special_tokens=special)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_alone._tokenizer, pad_token="<pad>", eos_token="<|im_end|>"
    )
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"Count to {number}."},
                {"role": "assistant", "content": " ".join(map(str, range(1, number + 1)))},
            ]
        }
        for number in range(1, 25, 2)
    ]
    shape = LlamaConfig(**TINY)
    return shape, tokenizer, Dataset.from_list(rows)


def main() -> None:
    options = parse_arguments()
    torch.manual_seed(0)
    if options.smoke:
        options.seq_len = 160
        shape, tokenizer, dataset = smoke_set_up()
        model = AutoModelForCausalLM.from_config(shape, attn_implementation="striped_ring")
    else:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        dataset = load_dataset("json", data_files=options.data, split="train")
        model = AutoModelForCausalLM.from_pretrained(
            options.model, attn_implementation="striped_ring", dtype=torch.float32
        )
    tokenizer.chat_template = CHATML
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=options.output,
            parallelism_config=StripedParallelismConfig(
                options.context_parallel_size, loss_tile_size=2048, keep_attention=True
            ),
            packing=True,
            max_length=options.seq_len,
            assistant_only_loss=True,
            activation_checkpointing=True,
            bf16=torch.cuda.is_available(),
            use_cpu=not torch.cuda.is_available(),
            per_device_train_batch_size=options.batch_size,
            num_train_epochs=options.epochs,
            learning_rate=options.learning_rate,
            logging_steps=1,
            report_to=[],
        ),
        train_dataset=dataset,
        processing_class=tokenizer,
    )
    trainer.data_collator = StripedDataCollator(trainer.data_collator)  # it makes its own to pack
    trainer.train()
    trainer.save_model()
    if trainer.is_world_process_zero():
        history = [log for log in trainer.state.log_history if "loss" in log]
        names = ("loss", "grad_norm", "mean_token_accuracy", "num_tokens")
        print(json.dumps({name: [log[name] for log in history] for name in names}))


if __name__ == "__main__":
    main()
