"""DPO (arXiv 2305.18290) on long sequences: a loss over stripes, by LoRA, so that one model is both."""

import argparse
import json
from functools import partial

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from torch.distributed.nn.functional import all_reduce
from torch.nn.functional import cross_entropy, logsigmoid
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from hf_striped import StripedDataCollator, StripedParallelismConfig, prepare_model

TINY = {"vocab_size": 259, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-1.7B-Instruct")
    parser.add_argument("--data", help="JSON lines of prompt, chosen and rejected, all texts")
    parser.add_argument("--seq-len", type=int, default=32768, help="long prompts lose their start")
    parser.add_argument("--context-parallel-size", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=1, help="pairs a group takes at a time")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--output", default="dpo", help="where the adapter is saved")
    parser.add_argument("--smoke", action="store_true", help="a tiny model and made-up pairs")
    options = parser.parse_args()
    return options if options.smoke or options.data else parser.error("name --data, or --smoke")


def load(options: argparse.Namespace):
    """The model, and pairs of tokenised prompt, chosen and rejected answer."""
    if options.smoke:
        config = LlamaConfig(**TINY)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="striped_ring")
        prompts = [b"What is the answer? " * (1 + n % 3) for n in range(6)]
        return model, [(list(p), list(b"Forty-two."), list(b"I do not know.")) for p in prompts], 0
    tokenizer, pairs = AutoTokenizer.from_pretrained(options.model), []
    load_model = partial(AutoModelForCausalLM.from_pretrained, dtype=torch.float32)
    model = load_model(options.model, attn_implementation="striped_ring")
    for row in load_dataset("json", data_files=options.data, split="train"):
        answers = [
            tokenizer(row[side], add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
            for side in ("chosen", "rejected")
        ]
        prompt = tokenizer(row["prompt"])["input_ids"]
        pairs.append((prompt[max(map(len, answers)) - options.seq_len :], *answers))
    return model, pairs, tokenizer.pad_token_id or 0


def collate(pairs: list[tuple], pad_token_id: int) -> dict[str, torch.Tensor]:
    """Right-padded rows, chosen and rejected in turn; the loss counts the answers alone."""
    rows = [(prompt, answer) for prompt, *answers in pairs for answer in answers]
    length = max(len(prompt) + len(answer) for prompt, answer in rows)
    rows = [(p, a, length - len(p) - len(a)) for p, a in rows]
    return {
        "input_ids": torch.tensor([p + a + [pad_token_id] * fill for p, a, fill in rows]),
        "labels": torch.tensor([[-100] * len(p) + a + [-100] * fill for p, a, fill in rows]),
        "attention_mask": torch.tensor([[1] * (length - fill) + [0] * fill for *_, fill in rows]),
    }


def log_probabilities(model, batch: dict, group) -> torch.Tensor:
    """Summed log-probability of each row's answer `[rows]`: this stripe's, added up over the group."""
    targets = batch["shift_labels"]
    inputs = {name: batch[name] for name in batch if name not in ("labels", "shift_labels")}
    logits = model(**inputs, use_cache=False).logits.float()
    stripe = -cross_entropy(logits.mT, targets, ignore_index=-100, reduction="none").sum(-1)
    return stripe if group is None else all_reduce(stripe, group=group)


def main() -> None:
    options = parse_arguments()
    cuda, size = torch.cuda.is_available(), options.context_parallel_size
    parallelism = {"parallelism_config": StripedParallelismConfig(size)}
    accelerator = Accelerator(cpu=not cuda, mixed_precision="bf16" if cuda else "no", **parallelism)
    set_seed(0)
    group = accelerator.torch_device_mesh["cp"].get_group() if size > 1 else None
    base, pairs, pad_token_id = load(options)
    base.gradient_checkpointing_enable({"use_reentrant": False})
    base.enable_input_require_grads()
    adapted = get_peft_model(base, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    prepare_model(adapted)
    collator = StripedDataCollator(lambda rows: collate(rows, pad_token_id))
    loader = DataLoader(pairs, options.batch_size, shuffle=True, collate_fn=collator)
    trained = [weight for weight in adapted.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.learning_rate)
    model, optimizer, loader = accelerator.prepare(adapted, optimizer, loader)
    figures = {"loss": [], "accuracy": [], "grad_norm": []}
    for _ in range(options.epochs):
        for batch in loader:
            with torch.no_grad(), adapted.disable_adapter():
                reference = log_probabilities(adapted, batch, group)
            margin = log_probabilities(model, batch, group) - reference
            chosen, rejected = margin.view(-1, 2).unbind(-1)
            # all_reduce adds up the gradients of the ranks' equal losses: the mean DDP takes is right
            loss = -logsigmoid(options.beta * (chosen - rejected)).mean()
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            accuracy = (chosen > rejected).float().mean()
            for name, value in zip(figures, (loss.detach(), accuracy, norm), strict=True):
                figures[name].append(accelerator.reduce(value, "mean").item())
            accelerator.print({name: round(values[-1], 4) for name, values in figures.items()})
    if accelerator.is_main_process:
        adapted.save_pretrained(options.output)
    accelerator.print(json.dumps(figures))


if __name__ == "__main__":
    main()
