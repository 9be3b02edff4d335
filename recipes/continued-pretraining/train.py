"""Continue the pre-training of a causal language model on long documents, packed whole into rows."""

import argparse
import json
import sysconfig
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from hf_striped import StripedDataCollator, StripedParallelismConfig

TINY = {"vocab_size": 259, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-1.7B", help="folder or hub name")
    parser.add_argument("--text", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    parser.add_argument("--pattern", default="*.py", help="which files of --text are documents")
    parser.add_argument("--seq-len", type=int, default=131072, help="tokens a row, over all ranks")
    parser.add_argument("--context-parallel-size", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=1, help="rows a group takes at a time")
    parser.add_argument("--epochs", type=float, default=1)
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--output", default="continued", help="checkpoints and the final model")
    parser.add_argument("--resume", action="store_true", help="from the last checkpoint there")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, rows of 256 bytes")
    return parser.parse_args()


def pack(documents: list[list[int]], seq_len: int) -> list[dict]:
    """Documents, the longest first, each into the fullest row with room; only longer ones are cut."""
    pieces = [doc[i : i + seq_len] for doc in documents for i in range(0, len(doc), seq_len)]
    rows, room = [], []
    for piece in sorted(pieces, key=len, reverse=True):
        fits = [row for row in range(len(rows)) if room[row] >= len(piece)]
        row = min(fits, key=room.__getitem__, default=len(rows))
        if row == len(rows):
            rows.append([])
            room.append(seq_len)
        rows[row].append(piece)
        room[row] -= len(piece)
    return [row_of(row, seq_len) for row in rows]


def row_of(documents: list[list[int]], seq_len: int) -> dict:
    """One row; what is left of it is a document of its own, without labels."""
    tokens = [token for document in documents for token in document]
    lengths = [*map(len, documents), fill := seq_len - len(tokens)]
    return {
        "input_ids": tokens + [0] * fill,
        "labels": tokens + [-100] * fill,
        "position_ids": [position for length in lengths for position in range(length)],
    }


def main() -> None:
    options = parse_arguments()
    set_seed(0)
    files = sorted(options.text.glob(options.pattern))[: 6 if options.smoke else None]
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    if options.smoke:
        options.seq_len = 256
        documents = [list(text.encode())[:200] for text in texts]
        config = LlamaConfig(**TINY)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="striped_ring")
    else:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        documents = [tokenizer(text + tokenizer.eos_token)["input_ids"] for text in texts]
        model = AutoModelForCausalLM.from_pretrained(
            options.model, attn_implementation="striped_ring", dtype=torch.float32
        )
    rows = pack(documents, options.seq_len)
    held_out = rows[: max(1, len(rows) // 50)]
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
            per_device_eval_batch_size=1,
            num_train_epochs=options.epochs,
            learning_rate=options.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=0.03,
            logging_steps=1,
            save_steps=200,
            eval_strategy="epoch",
            report_to=[],
        ),
        train_dataset=rows[len(held_out) :],
        eval_dataset=held_out,
        data_collator=StripedDataCollator(default_data_collator),
    )
    trainer.train(resume_from_checkpoint=options.resume or None)
    trainer.save_model()
    if trainer.is_world_process_zero():
        names = ("loss", "grad_norm", "eval_loss")
        logs = trainer.state.log_history
        print(json.dumps({name: [log[name] for log in logs if name in log] for name in names}))


if __name__ == "__main__":
    main()
