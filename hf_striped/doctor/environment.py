"""Versions, kernels and ranks."""

import os
import socket
from importlib.metadata import PackageNotFoundError, requires, version

import torch
import torch.distributed as dist
from packaging.requirements import Requirement

from hf_striped.doctor.report import NOTE, OK, WRONG, Report
from hf_striped.kernels import KERNELS
from hf_striped.machine import describe_machine


def check_versions(report: Report, device: torch.device) -> None:
    """The machine, and each package that hf_striped needs against what it asks for."""
    machine = describe_machine(device)
    cores = f"{machine['cores']} cores, {machine['system']}"
    report.add("machine", OK, f"{machine['device']}; {cores}")
    report.add("Python", OK, machine["versions"]["Python"])
    report.add("hf_striped", OK, machine["versions"]["hf_striped"])
    for line in requires("hf_striped") or ():
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue  # of an extra
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            report.add(requirement.name, WRONG, f"not installed; hf_striped needs {requirement}")
            continue
        fits = requirement.specifier.contains(found, prereleases=True)
        text = found if fits else f"{found}; hf_striped needs {requirement}: pip install -U it"
        report.add(requirement.name, OK if fits else WRONG, text)


def check_kernels(report: Report, device: torch.device, dtype: torch.dtype) -> None:
    """Which block kernels can run for `dtype` on `device`, and why the others cannot."""
    usable = 0
    for name, kernel in KERNELS.items():
        reason = kernel.why_unavailable(device, dtype, None)
        usable += reason is None
        report.add(f"kernel {name}", OK if reason is None else NOTE, reason or "can run")
    if not usable:
        report.add("kernels", WRONG, f"none can run for {dtype} on {device}")


def check_ranks(report: Report, device: torch.device) -> None:
    """Where each rank is, and whether all have the same versions. Every rank calls it."""
    size = dist.get_world_size()
    versions: list = [None] * size
    dist.all_gather_object(versions, describe_machine(device)["versions"])
    for rank, found in enumerate(versions):
        if found != versions[0]:
            report.add("versions", WRONG, f"rank {rank} has {found}, rank 0 {versions[0]}")
    places: list = [None] * size
    host = socket.gethostname()
    place = f"{host}, {device}" if device.type == "cuda" else f"{host}, {device} ({os.getpid()})"
    dist.all_gather_object(places, place)
    threads = torch.get_num_threads()
    report.add("backend", OK, f"{dist.get_backend()}, {size} rank(s), {threads} thread(s) each")
    for rank, found in enumerate(places):
        report.add(f"rank {rank}", OK, found)
    if device.type == "cuda" and len(set(places)) < size:
        report.add("devices", NOTE, "several ranks share a GPU: exact, and of no use for speed")
