"""Scripts run as `accelerate launch` runs them, but by the session's pool of ranks, which has torch loaded."""

import io
import os
import runpy
import sys
from contextlib import ExitStack, chdir, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import torch

from tests.ranks import TIME_LIMIT, RankPool


def launch(
    ranks: RankPool,
    world: int,
    *command: str | Path,
    folder: str | Path,
    environ: dict[str, str] | None = None,
    time_limit: float = TIME_LIMIT,
) -> list[str]:
    """What each rank prints in `accelerate launch --num_processes {world} {command}`, run in `folder`.

    `command` is a script and its arguments, or `-m`, a module and its arguments.

    Raises:
        RankError: what a rank raised; an exit code other than 0 is a SystemExit.
    """
    words, place = [str(word) for word in command], str(folder)
    return ranks.run(world, _run, words, place, environ or {}, time_limit=time_limit)


def _run(rank: int, world: int, words: list[str], folder: str, environ: dict[str, str]) -> str:
    is_module = words[0] == "-m"
    target, *arguments = words[1:] if is_module else words
    printed = io.StringIO()
    with ExitStack() as stack:
        stack.enter_context(chdir(folder))
        stack.enter_context(patch.dict(os.environ, environ))
        stack.enter_context(patch.object(sys, "argv", [target, *arguments]))
        stack.enter_context(redirect_stdout(printed))
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        try:
            if is_module:
                runpy.run_module(target, run_name="__main__", alter_sys=True)
            else:
                place = str(Path(target).resolve().parent)
                stack.enter_context(patch.object(sys, "path", [place, *sys.path[1:]]))
                runpy.run_path(target, run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
    return printed.getvalue()
