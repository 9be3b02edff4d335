"""The frozen description of a context-parallel group: all that the ring knows about the process."""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup

from hf_striped.errors import ConfigurationError


@dataclass(frozen=True)
class ContextParallel:
    """A context-parallel group as one of its ranks sees it.

    Attributes:
        size: number of ranks in the group.
        rank: this process's rank within the group.
        group: the process group; None when `size` is 1.
        ring_group: the part of the group that the ring runs on, where heads are shared as well.
        heads_group: the ranks of the group that share heads; None when there is only the ring.
    """

    size: int = 1
    rank: int = 0
    group: ProcessGroup | None = None
    ring_group: ProcessGroup | None = None
    heads_group: ProcessGroup | None = None

    @property
    def group_name(self) -> str:
        """A name that `from_group_name` resolves again in this process; empty when there is no group."""
        return self.group.group_name if self.group is not None else ""

    @classmethod
    def from_group(cls, group: ProcessGroup | None) -> "ContextParallel":
        """Describe `group`; None means a single rank.

        Raises:
            ConfigurationError: this process is not a member of the group.
        """
        if group is None:
            return cls()
        rank = dist.get_rank(group)
        if rank < 0:
            raise ConfigurationError(
                "striped_ring_attention needs a group that this process belongs to; "
                f"global rank {dist.get_rank()} is not a member of the group received. "
                "Every process calls new_group for every group, and uses the one it is a member of."
            )
        size = dist.get_world_size(group)
        return cls(size, rank, group) if size > 1 else cls()

    @classmethod
    def from_group_name(cls, name: str) -> "ContextParallel":
        """The inverse of `group_name`."""
        if not name:
            return cls()
        return cls.from_group(dist.distributed_c10d._resolve_process_group(name))

    def neighbour(self, offset: int) -> int:
        """The global rank of the process `offset` places further along the ring."""
        return dist.get_global_rank(self.group, (self.rank + offset) % self.size)
