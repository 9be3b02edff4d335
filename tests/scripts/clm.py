"""A training script of the usual kind, which knows nothing of stripes: blocks of text, metrics, perplexity."""

import json
import math
import sys
from dataclasses import dataclass, field
from itertools import chain

from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    HfArgumentParser,
    LlamaConfig,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


@dataclass
class ScriptArguments:
    result: str = field(metadata={"help": "where the figures go, as JSON"})
    block_size: int = 19
    streaming: bool = False
    fails: bool = False


def main():
    script, training = HfArgumentParser(
        (ScriptArguments, TrainingArguments)
    ).parse_args_into_dataclasses()
    if script.fails:
        sys.exit(3)
    set_seed(training.seed)
    text = "the quick brown fox jumps over the lazy dog and the dog sleeps on. " * 12
    tokens = [list(line.encode()) for line in text.split(". ")]

    def group_texts(examples):
        joined = list(chain(*examples["input_ids"]))
        length = len(joined) // script.block_size * script.block_size
        blocks = [joined[i : i + script.block_size] for i in range(0, length, script.block_size)]
        return {"input_ids": blocks, "labels": [list(block) for block in blocks]}

    grouped = Dataset.from_dict({"input_ids": tokens}).map(
        group_texts, batched=True, remove_columns=["input_ids"]
    )
    train, evaluation = grouped.select(range(20)), grouped.select(range(20, 27))
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = AutoModelForCausalLM.from_config(config)

    def preprocess_logits_for_metrics(logits, labels):
        return logits.argmax(dim=-1)

    def compute_metrics(predictions):
        labels = predictions.label_ids[:, 1:].reshape(-1)
        predicted = predictions.predictions[:, :-1].reshape(-1)
        return {"accuracy": float((labels == predicted).mean())}

    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=train.to_iterable_dataset() if script.streaming else train,
        eval_dataset=evaluation,
        data_collator=default_data_collator,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=preprocess_logits_for_metrics,
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model()
    metrics = trainer.evaluate()
    metrics["perplexity"] = math.exp(metrics["eval_loss"])
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        with open(script.result, "w") as file:
            json.dump({"losses": losses, **metrics}, file)


if __name__ == "__main__":
    main()
