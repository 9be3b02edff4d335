"""`hf_striped.run`: an unmodified script gains context parallelism from the command line alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hf_striped.cli import main
from tests.launched import launch
from tests.models import tiny_llama
from tests.ranks import RankError
from tests.test_trl import word_tokenizer

SCRIPTS = Path(__file__).parent / "scripts"
OPTIONS = {
    "use_cpu": "true",
    "per_device_train_batch_size": "2",
    "per_device_eval_batch_size": "2",
    "max_steps": "4",
    "logging_steps": "1",
    "report_to": "none",
    "disable_tqdm": "true",
    "optim": "sgd",
    "learning_rate": "0.05",
}
FIGURES = ("losses", "eval_loss", "eval_accuracy", "perplexity", "epoch")


def arguments(folder, **changes):
    options = {**OPTIONS, "output_dir": str(folder), "result": f"{folder}/result.json", **changes}
    return [text for name, value in options.items() for text in (f"--{name}", value)]


def run_converted(ranks, world, cp_size, script, argv, folder):
    options = "--context-parallel-size", cp_size
    launch(ranks, world, "-m", "hf_striped.run", *options, script, *argv, folder=folder)


def write_script(folder, text):
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(("world", "cp_size"), [(2, 2), (4, 2)])
@pytest.mark.parametrize("streaming", ["false", "true"])
def test_an_unmodified_script_reports_the_figures_of_one_process(
    ranks, tmp_path, world, cp_size, streaming
):
    """Blocks of 19 tokens, seven evaluation rows in batches of two, accuracy of the argmax, perplexity."""
    script = str(SCRIPTS / "clm.py")
    changes = {"streaming": streaming}
    if streaming == "true":  # which one process must be told to collate by itself, too
        changes["accelerator_config"] = '{"dispatch_batches": false}'
    launch(ranks, world // cp_size, script, *arguments(tmp_path, **changes), folder=tmp_path)
    reference = json.loads((tmp_path / "result.json").read_text())
    changes.pop("accelerator_config", None)
    run_converted(ranks, world, cp_size, script, arguments(tmp_path, **changes), tmp_path)
    found = json.loads((tmp_path / "result.json").read_text())
    assert len(found["losses"]) == 4
    for name in FIGURES:
        assert found[name] == pytest.approx(reference[name], rel=1e-5), name


SFT_OPTIONS = {
    "bf16": "false",
    "gradient_checkpointing": "true",
    "packing": "true",
    "max_length": "21",
    "average_tokens_across_devices": "true",
}
SFT_FIGURES = ("loss", "mean_token_accuracy", "num_tokens", "eval_loss", "eval_mean_token_accuracy")
DOCUMENTED_LINES = {
    "        name,\n": '        name,\n        attn_implementation="striped_ring",\n',
    "    trainer.train()\n": (
        "    trainer.data_collator = hf_striped.StripedDataCollator(trainer.data_collator)\n"
        "    trainer.train()\n"
    ),
    "    trainer = SFTTrainer(\n": (
        "    training.parallelism_config = hf_striped.StripedParallelismConfig("
        "context_parallel_size=2)\n    trainer = SFTTrainer(\n"
    ),
    "import json\n": "import json\nimport hf_striped\n",
}


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("peft", [False, True])
def test_an_sft_script_reports_the_figures_of_one_process(ranks, tmp_path, by_hand, peft):
    """Converted from the command line, and by the documented lines; packed rows of 21 tokens."""
    script, model = str(SCRIPTS / "sft.py"), tmp_path / "model"
    tiny_llama("sdpa").save_pretrained(model)
    word_tokenizer().save_pretrained(model)
    options = {**SFT_OPTIONS, "model_name_or_path": str(model)}
    if peft:
        options |= {"use_peft": "true", "lora_r": "4", "lora_target_modules": ".*q_proj"}
    argv = arguments(tmp_path, **options)
    launch(ranks, 1, script, *argv, folder=tmp_path)
    reference = json.loads((tmp_path / "result.json").read_text())
    if by_hand:
        text = Path(script).read_text()
        for line, replacement in DOCUMENTED_LINES.items():
            assert text.count(line) == 1
            text = text.replace(line, replacement)
        launch(ranks, 2, write_script(tmp_path, text), *argv, folder=tmp_path)
    else:
        run_converted(ranks, 2, 2, script, argv, tmp_path)
    found = json.loads((tmp_path / "result.json").read_text())
    for name in SFT_FIGURES:
        assert found[name] == pytest.approx(reference[name], rel=1e-4), name


def test_the_command_starts_the_processes_and_returns_the_scripts_exit_code(tmp_path):
    command = [sys.executable, "-m", "hf_striped.cli", "run", "--context-parallel-size", "2"]
    argv = [str(SCRIPTS / "clm.py"), *arguments(tmp_path, fails="true")]
    done = subprocess.run([*command, *argv], capture_output=True, text=True, timeout=100)
    assert done.returncode != 0
    assert "exitcode  : 3" in done.stderr and "local_rank: 1" in done.stderr
    assert not (tmp_path / "result.json").exists()


def test_a_size_in_the_environment_that_is_no_number_is_named(monkeypatch, capsys):
    monkeypatch.setenv("HF_STRIPED_CONTEXT_PARALLEL_SIZE", "two")
    assert main(["run", str(SCRIPTS / "clm.py")]) == 2
    assert (
        "variable HF_STRIPED_CONTEXT_PARALLEL_SIZE) must be a positive integer; received 'two'"
        in (capsys.readouterr().err)
    )


def test_one_process_has_the_scripts_own_exit_code(tmp_path):
    argv = [str(SCRIPTS / "clm.py"), *arguments(tmp_path, fails="true")]
    command = [sys.executable, "-m", "hf_striped.run", *argv]
    assert subprocess.run(command, capture_output=True, timeout=100).returncode == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("print('no trainer')", "ended without building a transformers.Trainer"),
        ("from accelerate import Accelerator\nAccelerator()", "builds an Accelerator of its own"),
        (
            "from accelerate import ParallelismConfig\n"
            "from transformers import Trainer, TrainingArguments\n"
            "Trainer(args=TrainingArguments(parallelism_config=ParallelismConfig()))",
            "gives the script its parallelism config",
        ),
    ],
)
def test_a_script_that_cannot_be_converted_is_refused_on_every_rank(ranks, tmp_path, text, message):
    script = write_script(tmp_path, text)
    with pytest.raises(RankError, match=message) as caught:
        run_converted(ranks, 2, 2, script, [], tmp_path)
    assert caught.value.kinds == dict.fromkeys(range(2), "ConfigurationError")


def test_a_failing_script_shows_its_own_traceback(ranks, tmp_path):
    script = write_script(tmp_path, "def f():\n    raise KeyError('its own error')\nf()")
    with pytest.raises(RankError, match=r"script\.py.*line 2, in f") as caught:
        run_converted(ranks, 2, 2, script, [], tmp_path)
    assert caught.value.kinds == dict.fromkeys(range(2), "KeyError")
