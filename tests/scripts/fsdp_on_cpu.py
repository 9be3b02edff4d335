"""Run the script named by the first argument, with its arguments, where FSDP2 takes CPU ranks: tests/fsdp.py."""

import runpy
import sys
from unittest.mock import patch

import torch.distributed.fsdp as fsdp

from tests.fsdp import fsdp_on_cpu

with fsdp_on_cpu(), patch.object(fsdp, "fully_shard", wraps=fsdp.fully_shard) as shard:
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
if not shard.called:
    sys.exit("FSDP2 has sharded nothing")
