"""Block attention in plain PyTorch, to be checked by reading. Any device, type, window or softcap.

It works through tiles of queries, so that it holds the scores of a tile and never of a sequence.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hf_striped.kernels.base import BlockGradients, BlockOutput, ScoreRule
from hf_striped.kernels.tiles import tiles
from hf_striped.packing import Span

TILE = 256


class ReferenceKernel:
    name = "reference"

    def why_unavailable(
        self, device: torch.device, dtype: torch.dtype, softcap: float | None
    ) -> str | None:
        return None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, spans: Sequence[Span], rule: ScoreRule
    ) -> Iterator[BlockOutput]:
        for span in spans:
            for tile in tiles(span, rule.window_left, TILE, query.device):
                scores = _scores(query[tile.queries], key[tile.keys], rule)
                scores = scores.masked_fill(tile.mask, -torch.inf)  # [heads, queries, keys]
                lse = scores.logsumexp(-1)
                values = _for_query_heads(value[tile.keys], query.shape[1])
                out = torch.einsum("hqk,khd->qhd", (scores - lse.unsqueeze(-1)).exp(), values)
                yield BlockOutput(tile.queries, out, lse.T)

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
        heads = query.shape[1]
        for span in spans:
            for tile in tiles(span, rule.window_left, TILE, query.device):
                q, k, v = query[tile.queries], key[tile.keys], value[tile.keys]
                do, o = _wide(dout[tile.queries]), _wide(out[tile.queries])
                scores = _scores(q, k, rule)
                weights = (scores - lse[tile.queries].T.unsqueeze(-1)).exp()
                weights = weights.masked_fill(tile.mask, 0.0)
                dvalue = torch.einsum("hqk,qhd->khd", weights, do)
                dweights = torch.einsum("qhd,khd->hqk", do, _for_query_heads(v, heads))
                delta = (do * o).sum(-1).T.unsqueeze(-1)  # [heads, queries, 1]
                dscores = weights * (dweights - delta) * rule.scale
                if rule.softcap is not None:
                    dscores *= 1 - (scores / rule.softcap).square()
                dquery = torch.einsum("hqk,khd->qhd", dscores, _for_query_heads(k, heads))
                dkey = torch.einsum("hqk,qhd->khd", dscores, _wide(q))
                yield BlockGradients(
                    tile.queries,
                    tile.keys,
                    dquery,
                    _sum_per_key_head(dkey, k.shape[1]),
                    _sum_per_key_head(dvalue, v.shape[1]),
                )


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _for_query_heads(tensor: Tensor, query_heads: int) -> Tensor:
    return _wide(tensor).repeat_interleave(query_heads // tensor.shape[1], dim=1)


def _sum_per_key_head(gradient: Tensor, key_heads: int) -> Tensor:
    return gradient.unflatten(1, (key_heads, -1)).sum(2)


def _scores(query: Tensor, key: Tensor, rule: ScoreRule) -> Tensor:
    keys = _for_query_heads(key, query.shape[1])
    scores = torch.einsum("qhd,khd->hqk", _wide(query), keys) * rule.scale
    return scores if rule.softcap is None else rule.softcap * (scores / rule.softcap).tanh()
