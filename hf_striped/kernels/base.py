"""What a block kernel is: exact causal attention of one query shard against one key/value shard.

    query: [tokens, query_heads, head_dim]
    key:   [tokens, key_heads, head_dim]          query_heads is a multiple of key_heads
    value: [tokens, key_heads, value_head_dim]
    lse:   [tokens, query_heads] natural log, fp32 (fp64 for fp64 inputs)

A kernel computes only the spans it is given and yields them piece by piece, so that the caller
merges each while it is warm; tokens outside every span take no part.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_striped.packing import Span


class ScoreRule(NamedTuple):
    """How the scores of a block are formed: cap * tanh(scale * q.k / cap), within a window.

    Attributes:
        scale: factor of the products.
        softcap: the cap, or None for none.
        window_left: how many keys before its own a query of a span sees, or None for all.
    """

    scale: float
    softcap: float | None = None
    window_left: int | None = None


class BlockOutput(NamedTuple):
    """The normalised output and log-sum-exp of a run of queries."""

    queries: slice
    out: Tensor
    lse: Tensor


class BlockGradients(NamedTuple):
    """A block's share of the gradients, for a run of queries and a run of keys."""

    queries: slice
    keys: slice
    dquery: Tensor
    dkey: Tensor
    dvalue: Tensor


class BlockKernel(Protocol):
    """One implementation of block attention."""

    name: str

    def why_unavailable(
        self, device: torch.device, dtype: torch.dtype, softcap: float | None
    ) -> str | None:
        """Why this kernel cannot run for these tensors here, or None if it can."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, spans: Sequence[Span], rule: ScoreRule
    ) -> Iterator[BlockOutput]:
        """Attention of each span, normalised over the keys of this block alone."""

    def backward(
        self,
        dout: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        spans: Sequence[Span],
        rule: ScoreRule,
    ) -> Iterator[BlockGradients]:
        """The block's exact share of the gradients, given the *global* `out` and `lse`."""


def widen(tensor: Tensor, width: int) -> Tensor:
    """Zero columns change no score and no other column: how differing head_dims share one kernel."""
    return tensor if tensor.shape[-1] == width else pad(tensor, (0, width - tensor.shape[-1]))
