"""A fine-tuning script of the usual kind with TRL, which knows nothing of stripes."""

import json
from dataclasses import dataclass, field

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import ModelConfig, SFTConfig, SFTTrainer, TrlParser, get_peft_config


@dataclass
class ScriptArguments:
    result: str = field(metadata={"help": "where the figures go, as JSON"})


def main():
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig))
    script, training, model_config = parser.parse_args_and_config()
    name = model_config.model_name_or_path
    model = AutoModelForCausalLM.from_pretrained(
        name,
        dtype="float32",
    )
    tokenizer = AutoTokenizer.from_pretrained(name)
    texts = [" ".join(f"w{3 + i * k % 59}" for i in range(3, 4 + k % 13)) for k in range(1, 25)]
    rows = Dataset.from_list([{"text": text} for text in texts])
    trainer = SFTTrainer(
        model=model,
        args=training,
        train_dataset=rows.select(range(17)),
        eval_dataset=rows.select(range(17, 24)),
        processing_class=tokenizer,
        peft_config=get_peft_config(model_config),
    )
    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model(training.output_dir)
    if trainer.is_world_process_zero():
        history = [entry for entry in trainer.state.log_history if "loss" in entry]
        names = ("loss", "mean_token_accuracy", "num_tokens")
        trained = {name: [entry[name] for entry in history] for name in names}
        with open(script.result, "w") as file:
            json.dump({**metrics, **trained}, file)


if __name__ == "__main__":
    main()
