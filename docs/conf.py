"""How the documentation is built: sphinx-build -W docs docs/_build."""

import argparse
import sys
from importlib.metadata import version as version_of
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

project = "hf_striped"
author = "the hf_striped authors"
copyright = author
release = version = version_of("hf_striped")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_member_order = "bysource"
default_role = "code"  # docstrings write `name` for code, as the pages do
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True
html_theme = "furo"
html_title = "hf_striped"
html_show_copyright = False


def write_pages(app) -> None:
    """What is made from the source: every command's --help, and every error's message."""
    from errors_page import errors_page

    from hf_striped.cli import make_parser

    parser = make_parser()
    commands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    pages = [parser.format_help(), *(sub.format_help() for sub in commands.choices.values())]
    source = Path(app.srcdir)
    generated = source / "generated"
    generated.mkdir(exist_ok=True)
    (generated / "command-line.txt").write_text("\n\n".join(pages))
    (generated / "errors.md").write_text(errors_page(source.parent / "hf_striped"))


def setup(app) -> None:
    app.connect("builder-inited", write_pages)
