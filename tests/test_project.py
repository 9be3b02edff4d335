"""The project itself: style, layers, public names, and the wheel that users install."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import hf_striped

ROOT = Path(__file__).parent.parent


def run(*command, cwd=ROOT):
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("arguments", [("check",), ("format", "--check")])
def test_ruff_finds_nothing(arguments):
    run(sys.executable, "-m", "ruff", *arguments, ".")


def test_imports_point_down():
    run(str(Path(sys.executable).parent / "lint-imports"))


def test_the_wheel_works_outside_the_source_tree(tmp_path):
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path))
    (wheel,) = tmp_path.glob("*.whl")
    target = tmp_path / "site"
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", target, str(wheel))
    script = (
        f"import sys; sys.path.insert(0, {str(target)!r}); import hf_striped; "
        "from transformers import AttentionInterface; print(hf_striped.__file__); "
        "assert 'striped_ring' in AttentionInterface()._global_mapping"
    )
    assert str(target) in run(sys.executable, "-c", script, cwd=tmp_path)
    assert (target / "hf_striped" / "py.typed").exists()


def test_all_names_exactly_the_public_members():
    members = {
        name
        for name, value in vars(hf_striped).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert members == set(hf_striped.__all__)
    for name in hf_striped.__all__:
        assert inspect.getdoc(getattr(hf_striped, name)), name


def test_no_file_of_the_package_outgrows_one_concept():
    lengths = {path: len(path.read_text().splitlines()) for path in ROOT.glob("hf_striped/**/*.py")}
    assert {path: count for path, count in lengths.items() if count > 250} == {}
