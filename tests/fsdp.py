"""FSDP2 on CPU ranks, for tests only.

Accelerate takes its FSDP branch only for accelerator devices. Inside `fsdp_on_cpu` its process state
reports a multi-device type over the CPU ranks; sharding and gradients then are torch's own, on gloo.
"""

from contextlib import contextmanager
from unittest.mock import patch

from accelerate.state import PartialState
from accelerate.utils import DistributedType

from tests.training import train

FSDP2 = {
    "fsdp": True,
    "fsdp_config": {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
    },
}


@contextmanager
def fsdp_on_cpu():
    start = PartialState.__init__

    def started(self, *args, **kwargs):
        start(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    with patch.object(PartialState, "__init__", started):
        yield


def train_fsdp2(rank, world, rows, cp_size, **options):
    with fsdp_on_cpu():
        return train(rank, world, rows, cp_size, **{**FSDP2, **options})
