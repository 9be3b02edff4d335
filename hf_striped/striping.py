"""Which rank holds which token: token `g` lives on rank `g % cp_size`, at local index `g // cp_size`.

The smallest case, two ranks and four tokens:

    global   0 1 2 3          rank 0 holds 0 2          rank 1 holds 1 3

Rank 0's queries 0, 2 see of rank 1's keys 1, 3 only (2, 1): the diagonal is excluded.
Rank 1's queries 1, 3 see of rank 0's keys 0, 2 the pairs (1, 0), (3, 0), (3, 2): included.
Every rank has equal causal work at every ring step. Derivation: docs/explanation/striping.md.
"""

from collections.abc import Sequence

from torch import Tensor
from torch import stack as torch_stack

from hf_striped.errors import BatchError, ConfigurationError


def check_cp_size_and_rank(cp_size: int, cp_rank: int) -> None:
    """Raise `ConfigurationError` unless `0 <= cp_rank < cp_size`."""
    if cp_size < 1 or not 0 <= cp_rank < cp_size:
        raise ConfigurationError(
            "A context-parallel rank must satisfy 0 <= cp_rank < cp_size; "
            f"received cp_rank={cp_rank}, cp_size={cp_size}. "
            "Pass the rank within the context-parallel group, not the global rank."
        )


def stripe(tensor: Tensor, dim: int, cp_size: int, cp_rank: int) -> Tensor:
    """The tokens of `tensor` that live on `cp_rank`, as a view.

    Args:
        tensor: any shape and type; `tensor.shape[dim]` is the global sequence length, a multiple of `cp_size`.
        dim: the sequence dimension; negative ones count from the last.
        cp_size: number of ranks in the context-parallel group, at least 1.
        cp_rank: this rank's index in that group, from 0.

    Returns:
        A view of shape `tensor.shape` with `dim` divided by `cp_size`.

    Raises:
        BatchError: `tensor` has no dimension `dim`, or its length is not a multiple of `cp_size`.
        ConfigurationError: not `0 <= cp_rank < cp_size`.

    Source: Striped Attention, arXiv 2311.09431, section 3.

    Example:
        >>> import torch, hf_striped
        >>> [hf_striped.stripe(torch.arange(8), 0, cp_size=2, cp_rank=rank).tolist() for rank in range(2)]
        [[0, 2, 4, 6], [1, 3, 5, 7]]
    """
    check_cp_size_and_rank(cp_size, cp_rank)
    _check_dim(tensor, dim)
    length = tensor.shape[dim]
    if length % cp_size:
        raise BatchError(
            f"A striped dimension must be a multiple of cp_size; received length {length} at dim {dim}, "
            f"cp_size={cp_size}. Pad it by {-length % cp_size} tokens that form a document of their own, "
            "or let StripedDataCollator do so."
        )
    index = [slice(None)] * tensor.ndim
    index[dim] = slice(cp_rank, None, cp_size)
    return tensor[tuple(index)]


def unstripe(shards: Sequence[Tensor], dim: int) -> Tensor:
    """Put the shards of all ranks, in rank order, back into natural token order: the inverse of `stripe`.

    Args:
        shards: one tensor a rank, all of one shape; of P shards `shards[r]` holds the tokens
            `r, r + P, r + 2P, ...`.
        dim: the sequence dimension; negative ones count from the last.

    Returns:
        A new tensor of the shards' shape, with `dim` P times as long.

    Raises:
        BatchError: no shard, shards of different shapes, or shards without a dimension `dim`.

    Source: Striped Attention, arXiv 2311.09431, section 3.

    Example:
        >>> import torch, hf_striped
        >>> shards = [torch.tensor([[0, 2]]), torch.tensor([[1, 3]])]
        >>> hf_striped.unstripe(shards, dim=1)
        tensor([[0, 1, 2, 3]])
    """
    shapes = [tuple(shard.shape) for shard in shards]
    if not shards or len(set(shapes)) != 1:
        raise BatchError(
            f"unstripe needs one shard a rank, all of equal shape; received {shapes}. "
            "Gather the shards of every rank of the context-parallel group, in rank order."
        )
    _check_dim(shards[0], dim)
    dim = dim % shards[0].ndim
    return torch_stack(tuple(shards), dim=dim + 1).flatten(dim, dim + 1)


def _check_dim(tensor: Tensor, dim: int) -> None:
    if not -tensor.ndim <= dim < tensor.ndim:
        raise BatchError(
            f"The sequence dimension must be one of the tensor's; received dim={dim} and shape "
            f"{tuple(tensor.shape)}. Pass the dimension that counts tokens."
        )
