"""The context-parallel group inside Accelerate: a mesh dimension, with no patch of the library.

The base field `cp_size` stays 1: above 1 Accelerate's own context parallelism would shard the batch once
more, and the Trainer would divide its count of supervised tokens by it, as if each rank held whole rows.
With 1 the Trainer adds up what each rank counts on its stripe: docs/explanation/loss.md.
"""

import os
from dataclasses import replace
from math import gcd
from typing import Any

from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.device_mesh import DeviceMesh

from hf_striped.context import ContextParallel
from hf_striped.errors import ConfigurationError
from hf_striped.exchange import EXCHANGES, RING
from hf_striped.heads import why_heads_cannot_split
from hf_striped.kernels import AUTO, KERNELS

CONTEXT_PARALLEL_SIZE_ENV = "HF_STRIPED_CONTEXT_PARALLEL_SIZE"


class StripedParallelismConfig(ParallelismConfig):
    """Spread each sequence over `context_parallel_size` processes by striped ring attention.

    Pass it as `TrainingArguments(parallelism_config=...)` or `Accelerator(parallelism_config=...)`.
    Processes beyond the context-parallel size are data parallel: the data-parallel size is worked out
    from the number of processes (as shards under FSDP2, as replicas otherwise) unless it is given.
    Each argument is an attribute of the same name.

    Args:
        context_parallel_size: processes a sequence is spread over; default the environment variable
            `HF_STRIPED_CONTEXT_PARALLEL_SIZE`, else 1.
        kernel: the block kernel, a name in `hf_striped.kernels.KERNELS`, or `"auto"`, the first fast one that
            can run.
        exchange: how keys and values reach the other ranks, `"ring"` or `"gather"`; see
            `striped_ring_attention`.
        heads_parallel_size: ranks of a group that share attention heads by an all-to-all, inside the ring of
            the others; divides `context_parallel_size`. Default: the number of machines that a group spans,
            as far as it divides the key heads (1 on one machine): `prepare_model` settles it.
        loss_tile_size: compute the loss in tiles of so many tokens, which are recomputed in the backward
            pass: logits of one tile are alive instead of the stripe's. Default: no tiles.
        keep_attention: with gradient checkpointing, keep the output and log-sum-exp of attention while the
            rest of a layer is recomputed, so that the forward ring runs once.
        **fields: Accelerate's own fields. `cp_size`, `sp_size` and `tp_size` above 1 are refused.

    Raises:
        ConfigurationError: `cp_size`, `sp_size` or `tp_size` above 1; a size that is not a positive integer;
            a `heads_parallel_size` that does not divide `context_parallel_size`; no such `kernel` or
            `exchange`; or, in a launched script, a number of processes that is no multiple of
            `context_parallel_size`.
        ValueError: a value that Accelerate refuses for a field of its own.
        TypeError: a name that is none of Accelerate's fields.

    Example:
        >>> import hf_striped
        >>> from transformers import TrainingArguments
        >>> config = hf_striped.StripedParallelismConfig(context_parallel_size=1, kernel="reference")
        >>> arguments = TrainingArguments(use_cpu=True, parallelism_config=config)
    """

    def __init__(
        self,
        context_parallel_size: int | None = None,
        *,
        kernel: str = AUTO,
        exchange: str = RING,
        heads_parallel_size: int | None = None,
        loss_tile_size: int | None = None,
        keep_attention: bool = False,
        **fields: Any,
    ):
        super().__init__(**fields)
        for field in ("cp_size", "sp_size", "tp_size"):
            if (size := getattr(self, field)) > 1:
                raise ConfigurationError(
                    f"StripedParallelismConfig cannot be combined with Accelerate's {field}; received "
                    f"{field}={size} (as an argument or from PARALLELISM_CONFIG_{field.upper()}). "
                    f"Leave {field} at 1 and set context_parallel_size alone: it splits the sequence once."
                )
        if kernel not in (AUTO, *KERNELS):
            raise ConfigurationError(
                f"kernel must be one of {[AUTO, *KERNELS]}; received {kernel!r}."
            )
        if loss_tile_size is not None:
            _check_positive(loss_tile_size, "loss_tile_size")
        if exchange not in EXCHANGES:
            raise ConfigurationError(f"exchange must be one of {EXCHANGES}; received {exchange!r}.")
        self.kernel = kernel
        self.exchange = exchange
        self.loss_tile_size = loss_tile_size
        self.keep_attention = keep_attention
        self.context_parallel_size = _positive_size(context_parallel_size)
        self._sizes["cp"] = self.context_parallel_size
        self.heads_parallel_size = heads_parallel_size
        if heads_parallel_size is not None:
            _check_positive(heads_parallel_size, "heads_parallel_size")
            if self.context_parallel_size % heads_parallel_size:
                raise ConfigurationError(
                    "heads_parallel_size must divide context_parallel_size; received "
                    f"{heads_parallel_size} and {self.context_parallel_size}."
                )
        self._context: ContextParallel | None = None
        if "WORLD_SIZE" in os.environ:  # launched: fail before a model is loaded
            self._check_process_count(int(os.environ["WORLD_SIZE"]))

    @property
    def striped(self) -> bool:
        """Whether a sequence is spread over more than one process."""
        return self.context_parallel_size > 1

    @property
    def non_dp_dim_names(self) -> list[str]:
        """The mesh dimensions whose ranks take the same rows, by name; with `cp`."""
        return [*super().non_dp_dim_names, *self._cp_dim_names]

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """The mesh dimensions that FSDP2 shards weights over, by name; with `cp`."""
        return [*super().dp_shard_cp_dim_names, *self._cp_dim_names]

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """The mesh dimensions that a loss is averaged over, by name; with `cp`."""
        return [*super().dp_cp_dim_names, *self._cp_dim_names]

    @property
    def total_size(self) -> int:
        """Number of processes in all, the product of all sizes."""
        return super().total_size * self.context_parallel_size

    @property
    def non_data_parallel_size(self) -> int:
        """Number of processes that take the same rows."""
        return super().non_data_parallel_size * self.context_parallel_size

    @property
    def _cp_dim_names(self) -> list[str]:
        return ["cp"] if self.striped else []

    def get_device_mesh(self, device_type: str | None = None):
        """The mesh of this process, made at the first call; Accelerate calls it.

        Args:
            device_type: for example `"cuda"` or `"cpu"`; may be left out once there is a mesh.

        Returns:
            The `DeviceMesh`; None for a single process.

        Raises:
            ConfigurationError: the sizes do not multiply to the number of processes.
            ValueError: no `device_type` for a new mesh, or another than that of the mesh.
        """
        if self.device_mesh is None:
            self._complete_sizes(PartialState().num_processes)
        return super().get_device_mesh(device_type)

    @property
    def context(self) -> ContextParallel | None:
        """This process's context-parallel group; None when nothing is striped, or there is no mesh yet."""
        if self._context is None and self.striped and self.device_mesh is not None:
            self._context = ContextParallel.from_group(self.device_mesh["cp"].get_group())
        return self._context

    def share_heads(self, query_heads: int, key_heads: int) -> None:
        """Make the groups of heads x ring for a model with these heads; `prepare_model` calls it on every rank.

        Args:
            query_heads: number of the model's attention heads.
            key_heads: number of its key and value heads.

        Raises:
            ConfigurationError: `heads_parallel_size` ranks cannot share them.
        """
        if self.context is None or self.context.heads_group is not None:
            return
        size = self.heads_parallel_size
        if size is None:
            local = int(os.environ.get("LOCAL_WORLD_SIZE", self.context_parallel_size))
            machines = self.context_parallel_size // gcd(self.context_parallel_size, local)
            size = gcd(machines, key_heads)
        if reason := why_heads_cannot_split(query_heads, key_heads, size):
            raise ConfigurationError(
                f"The ranks that share heads must be able to; received heads_parallel_size={size}, and {reason}. "
                "Choose another size."
            )
        if size > 1:
            ranks = self.device_mesh.mesh.reshape(-1, size, self.context_parallel_size // size)
            names = ("data", "heads", "ring")
            mesh = DeviceMesh(self.device_mesh.device_type, ranks, mesh_dim_names=names)
            groups = {f"{name}_group": mesh[name].get_group() for name in names[1:]}
            self._context = replace(self._context, **groups)

    def _check_process_count(self, num_processes: int) -> None:
        context = self.context_parallel_size
        if num_processes % context:
            launched = int(os.environ.get("WORLD_SIZE", num_processes))
            raise ConfigurationError(
                "The number of processes must be a multiple of context_parallel_size; received "
                f"{num_processes} process(es), context_parallel_size={context}. "
                + (
                    f"{launched} were launched, but Accelerate looks for GPUs: where there are none, pass "
                    "TrainingArguments(use_cpu=True) or Accelerator(cpu=True)."
                    if launched != num_processes
                    else f"Launch with `accelerate launch --num_processes {context}` (or a multiple of it); where "
                    "there are no GPUs add --multi_gpu, without which accelerate starts a single process."
                )
            )

    def _complete_sizes(self, num_processes: int) -> None:
        """Check the sizes against the number of processes, and work out the data-parallel one."""
        self._check_process_count(num_processes)
        context = self.context_parallel_size
        if self.data_parallel_size == 1:
            fsdp = AcceleratorState._shared_state.get("distributed_type") == DistributedType.FSDP
            self._set_size("dp_shard" if fsdp else "dp_replicate", num_processes // context)
        if self.total_size != num_processes:
            raise ConfigurationError(
                "dp_replicate_size x dp_shard_size x context_parallel_size must equal the number of "
                f"processes; received {self.dp_replicate_size} x {self.dp_shard_size} x {context} for "
                f"{num_processes} process(es). Leave the data-parallel sizes out, or correct them."
            )

    def _validate_accelerator(self, accelerator) -> None:
        """The sizes were checked before the mesh was built, for CPU processes too."""

    def __getstate__(self) -> dict[str, Any]:
        """Without mesh and groups, which belong to this process (the Trainer pickles its arguments)."""
        return {**vars(self), "device_mesh": None, "_context": None}


def _positive_size(size: int | None) -> int:
    source = "the argument context_parallel_size"
    if size is None:
        text = os.environ.get(CONTEXT_PARALLEL_SIZE_ENV, "1")
        source = f"the environment variable {CONTEXT_PARALLEL_SIZE_ENV}"
        size = int(text) if text.isdecimal() else text
    _check_positive(size, f"The context-parallel size (from {source})")
    return size


def _check_positive(size: Any, name: str) -> None:
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ConfigurationError(f"{name} must be a positive integer; received {size!r}.")
