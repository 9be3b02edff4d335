"""The documentation builds without a warning, and what it shows runs."""

import re
import shlex
from pathlib import Path

import pytest
from sphinx.cmd.build import main as sphinx_build
from sybil import Sybil
from sybil.parsers.myst import PythonCodeBlockParser, SkipParser

import hf_striped
import hf_striped.bench.command
import hf_striped.doctor.command
import hf_striped.run
from hf_striped.cli import make_parser

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    path
    for path in (ROOT / "docs").rglob("*.md")
    if not {"_build", "generated"} & set(path.relative_to(ROOT).parts)
)
README = ROOT / "README.md"
COMMAND = re.compile(r"^(?:[A-Z_]+=\S+ )*hf-striped (.*)$", re.MULTILINE)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    code = sphinx_build(["-q", "-W", "--keep-going", str(ROOT / "docs"), str(folder)])
    return code, folder


def test_the_documentation_builds_without_a_warning(site):
    assert site[0] == 0, "sphinx-build -W docs docs/_build"


def test_the_reference_has_all_that_is_public_every_command_and_every_error(site):
    api = (site[1] / "reference" / "api.html").read_text()
    assert [n for n in hf_striped.__all__ if f'id="hf_striped.{n}"' not in api] == []
    line = (site[1] / "reference" / "command-line.html").read_text()
    for command in ("run", "bench", "bench-page", "doctor", "plan"):
        assert f"usage: hf-striped {command}" in line
    errors = (site[1] / "generated" / "errors.html").read_text()
    source = "".join(path.read_text() for path in (ROOT / "hf_striped").rglob("*.py"))
    raised = re.findall(
        r"raise (?:Configuration|Batch|UnsupportedFeature|KernelUnavailable)Error\(", source
    )
    assert errors.count("highlight-text") == len(raised) > 50


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda path: str(path.relative_to(ROOT)))
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "docs" / "figures")  # whose numbers a page may assert
    for example in Sybil([PythonCodeBlockParser(), SkipParser()]).parse(page).examples():
        example.evaluate()


def test_every_picture_is_there_and_so_is_what_draws_it():
    """A script of its name for a figure; for a benchmark's plot the results that it shows."""
    shown = {
        (page.parent / name).resolve()
        for page in [README, *PAGES]
        for name in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text())
    }
    folders = [ROOT / "docs" / name for name in ("figures", "benchmarks")]
    assert shown == {picture for folder in folders for picture in folder.glob("*.png")}
    for picture in shown:
        if picture.parent.name == "figures":
            assert picture.with_suffix(".py").exists(), picture.name
        else:
            results = [path.stem for path in picture.parent.glob("*.json")]
            assert picture.stem.startswith(tuple(results)), picture.name


def test_every_test_file_that_the_support_page_names_is_there():
    text = (ROOT / "docs" / "reference" / "support.md").read_text()
    named = set(re.findall(r"`(test_\w+\.py)`", text))
    assert named and {name for name in named if not (ROOT / "tests" / name).exists()} == set()


def commands() -> list[str]:
    """Every `hf-striped` command line of a bash block of the documentation and the README."""
    found = []
    for page in [README, *PAGES]:
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL):
            found += COMMAND.findall(block.replace("\\\n", " "))
    return sorted(set(found))


@pytest.mark.parametrize("command", commands())
def test_command_lines_are_taken_by_their_parser(command):
    make_parser().parse_args(shlex.split(command, comments=True))
