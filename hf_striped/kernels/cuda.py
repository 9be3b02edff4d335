"""Block attention by PyTorch's own flash attention for CUDA: no extra package.

The project's test suite has no GPU: it checks the arguments against the operators' schemas and the
arithmetic against a stand-in. docs/reference/support.md says what has been run on a GPU.
"""

import torch
from torch import Tensor

from hf_striped.kernels.base import ScoreRule
from hf_striped.kernels.varlen import Segments, VarlenKernel, why_not_on_cuda

aten_forward = torch.ops.aten._flash_attention_forward
aten_backward = torch.ops.aten._flash_attention_backward


class CudaKernel(VarlenKernel):
    name = "cuda"

    def why_unavailable(
        self, device: torch.device, dtype: torch.dtype, softcap: float | None
    ) -> str | None:
        if reason := why_not_on_cuda(device, dtype):
            return reason
        if not torch.backends.cuda.is_flash_attention_available():
            return "this build of PyTorch has no flash attention"
        if softcap is not None:
            return "PyTorch's flash attention has no softcap"
        return None

    def _forward_row(
        self, query: Tensor, key: Tensor, value: Tensor, segments: Segments, rule: ScoreRule
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = aten_forward(
            query, key, value, *segments, 0.0, True, False, scale=rule.scale, **_window(rule)
        )
        return out, lse

    def _backward_row(
        self,
        dout: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        segments: Segments,
        rule: ScoreRule,
    ) -> tuple[Tensor, Tensor, Tensor]:
        rng_state = torch.zeros(2, dtype=torch.uint64, device=query.device)  # for dropout: none
        unused = torch.empty(0, device=query.device)
        rows = (dout, query, key, value, out, lse)
        return aten_backward(
            *rows, *segments, 0.0, True, rng_state, unused, scale=rule.scale, **_window(rule)
        )


def _window(rule: ScoreRule) -> dict[str, int]:
    if rule.window_left is None:
        return {}
    return {"window_size_left": rule.window_left, "window_size_right": 0}
