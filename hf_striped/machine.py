"""What this machine is and which versions it runs."""

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

PACKAGES = {
    "PyTorch": "torch",
    "Transformers": "transformers",
    "Accelerate": "accelerate",
    "hf_striped": "hf_striped",
}


def describe_machine(device: torch.device) -> dict[str, Any]:
    """The device's name, the system, its cores and the versions of what computes."""
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    elif Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), name)
    return {
        "device": name,
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "versions": {
            "Python": platform.python_version(),
            **{name: version(package) for name, package in PACKAGES.items()},
        },
    }
