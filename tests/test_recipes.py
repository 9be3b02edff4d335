"""Each recipe's smoke form: over a ring it prints the figures that it prints in one process."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser

from tests.launched import launch

ROOT = Path(__file__).parent.parent
RECIPES = ROOT / "recipes"
TRAINERS = [
    "accelerate-loop",
    "continued-pretraining",
    "convert-run-clm",
    "dpo",
    "long-context-evaluation",
    "lora",
    "sft-trl",
]


def smoke(ranks, world, script, cp_size, folder, *arguments, **options):
    """The figures that a recipe prints in its last line."""
    command = (*script, "--smoke", "--context-parallel-size", cp_size, *arguments)
    printed = launch(ranks, world, *command, folder=folder, **options)
    return json.loads(printed[0].splitlines()[-1])


def assert_same_figures(figures, reference):
    assert figures.keys() == reference.keys()
    for name, values in reference.items():
        assert len(values) > 0
        assert figures[name] == pytest.approx(values, rel=1e-4)


@pytest.mark.parametrize("recipe", TRAINERS)
def test_a_recipe_over_two_ranks_prints_what_it_prints_in_one_process(ranks, recipe, tmp_path):
    script = [RECIPES / recipe / "train.py"]
    alone = smoke(ranks, 1, script, 1, tmp_path)
    assert_same_figures(smoke(ranks, 2, script, 2, tmp_path), alone)


def test_the_converted_script_over_two_ranks_prints_what_it_printed_before(ranks, tmp_path):
    folder = RECIPES / "convert-run-clm"
    printed = launch(ranks, 1, folder / "before.py", "--smoke", folder=tmp_path)
    before = json.loads(printed[0].splitlines()[-1])
    assert_same_figures(smoke(ranks, 2, [folder / "train.py"], 2, tmp_path), before)


def test_the_fsdp2_recipe_over_two_groups_trains_as_one_process(ranks, tmp_path):
    script = RECIPES / "fsdp2" / "train.py"
    alone = smoke(ranks, 1, [script], 1, tmp_path / "..", "--batch-size", 2)
    environ = fsdp_environ(RECIPES / "fsdp2" / "gpu.yaml")
    sharded = [ROOT / "tests" / "scripts" / "fsdp_on_cpu.py", script]
    assert_same_figures(smoke(ranks, 4, sharded, 2, tmp_path, environ=environ), alone)


def fsdp_environ(path):
    """What `accelerate launch` tells the processes of the file's FSDP settings."""
    settings = yaml.safe_load(path.read_text())["fsdp_config"]
    return {"ACCELERATE_USE_FSDP": "true"} | {
        name.upper(): str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in settings.items()
    }


def test_the_multi_node_recipe_shares_heads_between_machines_and_goes_on_where_it_was(
    ranks, tmp_path
):
    script = [RECIPES / "multi-node" / "train.py"]
    alone, striped = tmp_path / "alone", tmp_path / "striped"
    alone.mkdir()
    striped.mkdir()
    reference = smoke(ranks, 1, script, 1, alone)
    machines = {"LOCAL_WORLD_SIZE": "2"}
    assert_same_figures(smoke(ranks, 4, script, 4, striped, environ=machines), reference)
    # as a job that was lost after its second step
    shutil.rmtree(striped / "multi-node" / "checkpoint-3")
    assert_same_figures(smoke(ranks, 4, script, 4, striped, environ=machines), reference)


@pytest.mark.parametrize(
    "path", sorted(RECIPES.rglob("*.yaml")), ids=lambda path: f"{path.parent.name}/{path.name}"
)
def test_accelerate_takes_each_configuration_file(path):
    config = load_config_from_file(str(path))
    known = set(vars(launch_command_parser().parse_args(["train.py"])))
    of_files = {"compute_environment", "distributed_type", "debug", "use_cpu", "fsdp_config"}
    assert set(config.to_dict()) <= known | of_files
    assert set(config.fsdp_config or {}) <= known
    assert config.num_processes % config.num_machines == 0


def test_a_recipe_is_short_and_tells_how_it_is_run():
    folders = sorted(path.parent for path in RECIPES.glob("*/train.py"))
    assert len(folders) >= 10
    for folder in folders:
        assert len((folder / "train.py").read_text().splitlines()) <= 120, folder.name
        readme = (folder / "README.md").read_text()
        assert "accelerate launch" in readme and "--smoke" in readme, folder.name
        assert list(folder.glob("*.yaml")), folder.name
