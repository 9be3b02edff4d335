"""Randomness that is one for a group where it makes batches, and each rank's own where it drops values.

All ranks of a group must make the same batches, so they share seeds. Inside the model the same seed would
give P neighbouring tokens one dropout mask.
"""

from functools import partial

import torch
from torch import nn


def drops_out(model: nn.Module) -> bool:
    """Whether a forward pass in training drops values anywhere."""
    if any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()):
        return True
    config = getattr(model, "config", None)
    rates = [value for name, value in vars(config).items() if "drop" in name] if config else []
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


class RankRandomness:
    """From here to `restore` random numbers are this rank's own; after it they are the group's again.

    Args:
        rank: the rank within the group.
    """

    def __init__(self, rank: int):
        seed = int(torch.randint(2**62, ()))  # from the group's generator, which goes on
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        torch.manual_seed(seed + rank)

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)


def seed_workers_alike(loader: torch.utils.data.DataLoader, cp_size: int) -> None:
    """Give data-loading workers seeds by group, where the Trainer gives them by rank."""
    loader = getattr(loader, "base_dataloader", loader)  # the one inside Accelerate's
    seed = loader.worker_init_fn
    if isinstance(seed, partial) and "rank" in seed.keywords:
        by_group = {**seed.keywords, "rank": seed.keywords["rank"] // cp_size}
        loader.worker_init_fn = partial(seed.func, *seed.args, **by_group)
