"""Block kernels, one file each, and the choice between them."""

import logging

import torch
import torch.distributed as dist

from hf_striped.errors import KernelUnavailableError
from hf_striped.kernels.base import BlockKernel
from hf_striped.kernels.cpu import CpuKernel
from hf_striped.kernels.cuda import CudaKernel
from hf_striped.kernels.flash_attn import FlashAttnKernel
from hf_striped.kernels.reference import ReferenceKernel

logger = logging.getLogger(__name__)

# in order of preference; `reference` is chosen only for what no fast kernel does (softcap)
KERNELS: dict[str, BlockKernel] = {
    kernel.name: kernel
    for kernel in (FlashAttnKernel(), CudaKernel(), CpuKernel(), ReferenceKernel())
}
AUTO = "auto"
_logged: set[str] = set()


def choose_kernel(
    name: str, device: torch.device, dtype: torch.dtype, softcap: float | None = None
) -> BlockKernel:
    """The kernel called `name`, or for "auto" the first fast one that can run.

    Raises:
        KernelUnavailableError: the kernel asked for cannot run, or with "auto" none can; says why.
    """
    if name != AUTO and name not in KERNELS:
        raise KernelUnavailableError(
            f"kernel must be one of {[AUTO, *KERNELS]}; received {name!r}."
        )
    candidates = [name]
    if name == AUTO:
        candidates = [k for k in KERNELS if k != ReferenceKernel.name or softcap is not None]
    reasons = []
    for candidate in candidates:
        reason = KERNELS[candidate].why_unavailable(device, dtype, softcap)
        if reason is None:
            if name == AUTO and not torch.compiler.is_compiling():
                _log_once(candidate)
            return KERNELS[candidate]
        reasons.append(f"{candidate}: {reason}")
    raise KernelUnavailableError(
        f"No block kernel can run: kernel={name!r}, device={device}, dtype={dtype}. "
        f"{'; '.join(reasons)}. Use a type that a fast kernel takes (bf16 or fp16 on CUDA), "
        "or ask for kernel='reference', which is plain PyTorch, exact for every type, and slow."
    )


def _log_once(kernel: str) -> None:
    rank_0 = not dist.is_initialized() or dist.get_rank() == 0
    if rank_0 and kernel not in _logged:
        _logged.add(kernel)
        logger.info("striped ring attention uses the %r kernel", kernel)
