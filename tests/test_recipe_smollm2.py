"""The SmolLM2 recipe in a short form, as its README runs it: accelerate launch, two processes."""

import os
import re
import subprocess
import sys
from pathlib import Path

RECIPE = Path(__file__).parent.parent / "recipes" / "smollm2" / "train.py"
LAUNCH = "--multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no"


def launch(*arguments, time_limit=200):
    command = [str(Path(sys.executable).parent / "accelerate"), "launch", *LAUNCH.split()]
    return subprocess.run(
        [*command, "--main_process_port", "0", str(RECIPE), *map(str, arguments)],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        capture_output=True,
        text=True,
        timeout=time_limit,
        check=False,
    )


def test_smollm2_takes_the_same_first_step_over_two_ranks_and_learns(tmp_path):
    done = launch("--seq-len", 512, "--rows", 1, "--steps", 3, "--output", tmp_path / "model")
    assert done.returncode == 0, done.stderr[-3000:]
    rows = dict(re.findall(r"^ *(loss|gradient norm|peak memory) +(.*)$", done.stdout, re.M))
    for name in ("loss", "gradient norm"):
        alone, striped, difference = map(float, rows[name].split())
        assert alone == striped != 0 or difference < 1e-4
    assert "the same step" in done.stdout and "GiB" in rows["peak memory"]
    losses = [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", done.stdout)]
    assert losses[-1] < losses[-2] < losses[-3]
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_a_text_folder_without_documents_is_named(tmp_path):
    done = launch("--text-folder", tmp_path, "--no-check", "--seq-len", 64)
    assert done.returncode != 0
    assert f"too few in {tmp_path} match '*.py'" in done.stderr


def test_three_ranks_a_sequence_on_two_processes_is_refused():
    done = launch("--context-parallel-size", 3)
    assert done.returncode != 0
    assert "received 2 process(es), context_parallel_size=3" in done.stderr
