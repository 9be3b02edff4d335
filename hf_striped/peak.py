"""Peak memory of a device: bytes that PyTorch allocated on CUDA, resident memory of this process on a CPU."""

import resource

import torch


def start_peak(device: torch.device) -> int:
    """Let the peak start anew; bytes held now.

    Where a system keeps only the peak of the process's life, that peak counts as held.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:  # not Linux, or not allowed
        return _peak_of_life()
    return _status("VmRSS")


def peak_bytes(device: torch.device) -> int:
    """The most bytes held since `start_peak`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        return _status("VmHWM")
    except OSError:
        return _peak_of_life()


def _status(field: str) -> int:
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(field))
    return int(line.split()[1]) * 1024


def _peak_of_life() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
