"""Block attention in plain PyTorch, to be checked by reading. Any device, any floating type.

It materialises the scores of one span: for tests and for types that no fast kernel takes.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hf_striped.kernels.base import BlockGradients, BlockOutput
from hf_striped.packing import Span


class ReferenceKernel:
    name = "reference"

    def why_unavailable(self, device: torch.device, dtype: torch.dtype) -> str | None:
        return None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, spans: Sequence[Span], scale: float
    ) -> Iterator[BlockOutput]:
        for span in spans:
            scores = _causal_scores(query[span.queries], key[span.keys], scale)  # [heads, n, n]
            lse = scores.logsumexp(-1)
            values = _for_query_heads(value[span.keys], query.shape[1])
            out = torch.einsum("hqk,khd->qhd", (scores - lse.unsqueeze(-1)).exp(), values)
            yield BlockOutput(span.queries, out, lse.T)

    def backward(
        self,
        dout: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        spans: Sequence[Span],
        scale: float,
    ) -> Iterator[BlockGradients]:
        heads = query.shape[1]
        for span in spans:
            q, k, v = query[span.queries], key[span.keys], value[span.keys]
            do, o = _wide(dout[span.queries]), _wide(out[span.queries])
            probabilities = (_causal_scores(q, k, scale) - lse[span.queries].T.unsqueeze(-1)).exp()
            dvalue = torch.einsum("hqk,qhd->khd", probabilities, do)
            dprobabilities = torch.einsum("qhd,khd->hqk", do, _for_query_heads(v, heads))
            delta = (do * o).sum(-1).T.unsqueeze(-1)  # [heads, n, 1]
            dscores = probabilities * (dprobabilities - delta) * scale
            dquery = torch.einsum("hqk,khd->qhd", dscores, _for_query_heads(k, heads))
            dkey = torch.einsum("hqk,qhd->khd", dscores, _wide(q))
            yield BlockGradients(
                span.queries,
                span.keys,
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


def _causal_scores(query: Tensor, key: Tensor, scale: float) -> Tensor:
    keys = _for_query_heads(key, query.shape[1])
    scores = torch.einsum("qhd,khd->hqk", _wide(query), keys) * scale
    allowed = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).tril()
    return scores.masked_fill(~allowed, -torch.inf)
