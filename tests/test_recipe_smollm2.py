"""The SmolLM2 recipe in its smoke form, with the commands of its run.sh: a real `accelerate launch` of two processes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from tests.launched import launch
from tests.ranks import RankError

RECIPE = Path(__file__).parent.parent / "recipes" / "smollm2"
TRAIN = RECIPE / "train.py"


@pytest.fixture
def small_model(packaged_tokenizer, tmp_path):
    """A folder with a model of SmolLM2's kind and vocabulary, and its tokenizer: the package's takes a minute to load."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**shape, **heads, vocab_size=len(packaged_tokenizer))
    LlamaForCausalLM(config).save_pretrained(tmp_path / "small")
    packaged_tokenizer.save_pretrained(tmp_path / "small")
    return tmp_path / "small"


def test_two_ranks_take_the_first_step_of_one_process_and_learn(ranks, small_model, tmp_path):
    alone, striped, model = (tmp_path / name for name in ("alone.json", "ranks.json", "model"))
    arguments = ["--model", small_model, "--smoke", "--learning-rate", 0.01]
    launch(ranks, 1, TRAIN, *arguments, "--alone", "--figures", alone, folder=tmp_path)
    accelerate = [Path(sys.executable).parent / "accelerate", "launch", "--main_process_port", "0"]
    command = [*accelerate, "--config_file", RECIPE / "cpu.yaml", TRAIN, *arguments]
    done = run(*command, "--output", model, "--figures", striped)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", done.stdout)]
    assert losses[1] < losses[0]
    assert (model / "model.safetensors").exists()
    compared = run(sys.executable, RECIPE / "compare.py", alone, striped)
    assert compared.returncode == 0 and "\nthe same step" in compared.stdout, compared.stdout

    figures = json.loads(striped.read_text())
    striped.write_text(json.dumps({**figures, "loss": figures["loss"] * 1.001}))
    compared = run(sys.executable, RECIPE / "compare.py", alone, striped)
    assert compared.returncode == 1 and "NOT THE SAME STEP" in compared.stdout


def test_the_packaged_model_is_loaded_as_it_was_trained(ranks, tmp_path):
    figures = tmp_path / "figures.json"
    command = [TRAIN, "--smoke", "--alone", "--figures", figures]
    launch(ranks, 1, *command, folder=tmp_path, time_limit=180)
    assert (
        json.loads(figures.read_text())["loss"] < 3.5
    )  # one without weights: log of the vocabulary, 10.8


def run(*command):
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return subprocess.run(
        list(map(str, command)),
        env=environ,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_a_text_folder_without_documents_is_named(ranks, tmp_path):
    with pytest.raises(RankError, match=rf"too few in {tmp_path} match '\*\.py'"):
        launch(ranks, 1, TRAIN, "--alone", "--text-folder", tmp_path, folder=tmp_path)


def test_three_ranks_a_sequence_on_two_processes_is_refused(ranks, tmp_path):
    with pytest.raises(RankError, match=r"received 2 process\(es\), context_parallel_size=3"):
        launch(ranks, 2, TRAIN, "--context-parallel-size", 3, folder=tmp_path)
