"""Block attention by the packages of Dao-AILab: FlashAttention 3 (module flash_attn_interface)
where it is installed, else flash-attn 2 (2.7 or later). FlashAttention 4 (flash_attn.cute) is left
out: its backward for a given out and lse is private, and its signature still changes.

Neither has been run by the project's test suite, which has no GPU: it checks the arithmetic against a
stand-in with the packages' signatures. docs/reference/support.md says what has been run on a GPU.
"""

import inspect
from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from hf_striped.kernels.base import ScoreRule
from hf_striped.kernels.varlen import Segments, VarlenKernel, why_not_on_cuda


class FlashAttnKernel(VarlenKernel):
    name = "flash_attn"

    def why_unavailable(
        self, device: torch.device, dtype: torch.dtype, softcap: float | None
    ) -> str | None:
        if reason := why_not_on_cuda(device, dtype):
            return reason
        package, reasons = _package()
        if package is not None:
            return None
        return "; ".join([*reasons, "FlashAttention 4 (flash_attn.cute) is not supported"])

    def _forward_row(
        self, query: Tensor, key: Tensor, value: Tensor, segments: Segments, rule: ScoreRule
    ) -> tuple[Tensor, Tensor]:
        package, _ = _package()
        arguments = _arguments(query, key, value, segments, rule)
        if _is_version_3(package):
            out, lse, *_ = package._flash_attn_forward(**arguments, causal=True)
        else:
            out, lse, *_ = package._flash_attn_varlen_forward(
                **arguments, causal=True, dropout_p=0.0
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
        package, _ = _package()
        gradients = {
            name: torch.zeros_like(t)
            for name, t in zip(("dq", "dk", "dv"), (query, key, value), strict=True)
        }
        arguments = {
            **_arguments(query, key, value, segments, rule),
            **gradients,
            "dout": dout,
            "out": out,
            "softmax_lse": lse,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }
        if _is_version_3(package):
            package._flash_attn_backward(**arguments, is_causal=True)
        else:
            package._flash_attn_varlen_backward(
                **arguments, causal=True, dropout_p=0.0, alibi_slopes=None
            )
        return gradients["dq"], gradients["dk"], gradients["dv"]


def _arguments(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, rule: ScoreRule
) -> dict[str, Any]:
    """What the functions of both versions take by the same name."""
    return {
        "q": query,
        "k": key,
        "v": value,
        "cu_seqlens_q": segments.query_bounds,
        "cu_seqlens_k": segments.key_bounds,
        "max_seqlen_q": segments.longest_query,
        "max_seqlen_k": segments.longest_key,
        "softmax_scale": rule.scale,
        "window_size_left": -1 if rule.window_left is None else rule.window_left,
        "window_size_right": 0 if rule.window_left is not None else -1,
        "softcap": rule.softcap or 0.0,
    }


@cache
def _package() -> tuple[ModuleType | None, list[str]]:
    """The module to use, or why each cannot be used."""
    reasons = []
    for name in ("flash_attn_interface", "flash_attn.flash_attn_interface"):
        try:
            package = import_module(name)
        except Exception as error:  # a broken build raises anything: it is a reason, not a crash
            reasons.append(f"importing {name}: {error}")
            continue
        if lacking := _lacking(package):
            reasons.append(f"{name} is too old or too new: {lacking}")
        else:
            return package, reasons
    return None, reasons


def _lacking(package: ModuleType) -> str | None:
    """What this adapter calls and the package does not have; earlier releases take other names."""
    if _is_version_3(package):
        causal = {"_flash_attn_forward": "causal", "_flash_attn_backward": "is_causal"}
    else:
        causal = {"_flash_attn_varlen_forward": "causal", "_flash_attn_varlen_backward": "causal"}
    for name, flag in causal.items():
        if not hasattr(package, name):
            return f"it has no {name}"
        missing = {"window_size_left", "cu_seqlens_q", flag} - _parameters(getattr(package, name))
        if missing:
            return f"its {name} takes no {', '.join(sorted(missing))}"
    return None


def _parameters(function: Callable[..., Any]) -> set[str]:
    """Argument names, also of a torch custom op, which wraps the function that has them."""
    return set(inspect.signature(getattr(function, "_init_fn", function)).parameters)


def _is_version_3(package: ModuleType) -> bool:
    return not hasattr(package, "_flash_attn_varlen_forward")
