"""Run the script named by the first argument, with its arguments, where FSDP2 takes CPU ranks: tests/fsdp.py."""

import runpy
import sys

from tests.fsdp import fsdp_on_cpu

with fsdp_on_cpu():
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
