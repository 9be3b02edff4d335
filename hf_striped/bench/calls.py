"""One call of a flash attention kernel on one piece: what the compared layouts are made of.

query, dout, out: [queries, heads, head_dim]     key, value: [keys, key_heads, head_dim]
lse:              [queries, heads]
"""

import torch
from torch import Tensor

from hf_striped.errors import UnsupportedFeatureError
from hf_striped.kernels import cpu, cuda


def call_forward(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of a piece."""
    if query.device.type == "cpu":
        return cpu.call_forward(query, key, value, causal, mask, scale)
    _refuse(mask)
    bounds = _bounds(query), _bounds(key), len(query), len(key)
    out, lse, *_ = cuda.aten_forward(query, key, value, *bounds, 0.0, causal, False, scale=scale)
    return out, lse.T


def call_backward(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of a piece's query, key and value, given the global `out` and `lse`."""
    if query.device.type == "cpu":
        return cpu.call_backward(dout, query, key, value, out, lse, causal, mask, scale)
    _refuse(mask)
    bounds = _bounds(query), _bounds(key), len(query), len(key)
    rows = (t.contiguous() for t in (dout, query, key, value, out, lse.T))
    rng_state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    unused = torch.empty(0, device=query.device)
    return cuda.aten_backward(*rows, *bounds, 0.0, causal, rng_state, unused, scale=scale)


def _bounds(tensor: Tensor) -> Tensor:
    return torch.tensor([0, len(tensor)], dtype=torch.int32, device=tensor.device)


def _refuse(mask: Tensor | None) -> None:
    if mask is not None:
        raise UnsupportedFeatureError(
            "Windows of the compared layouts are measured on CPUs only; received one on a GPU. Leave out "
            "--sliding-window, or ask for --layouts striped."
        )
