"""What a report is of: the device, the software, the commit."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata
from typing import Any

from bench.gpu.findings import line_of
from kernels.cuda.build import compile_ptx, link, toolchain_versions
from kernels.cuda.errors import CudaKernelError
from kernels.cuda.gate_mul import GateMulVariant

ANSWER_S = 15.0
"""What a command that is asked for a line may take: none is worth the report."""


def describe_device() -> dict[str, Any]:
    """Return name, capability, memory and driver of the current CUDA device."""
    import torch
    from cuda.bindings import driver

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    status, version = driver.cuDriverGetVersion()
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
        "driver": _smi("driver_version"),
        "clocks_sm_mem_max": _smi("clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem"),
        "power_limit": _smi("power.limit"),
        "driver_cuda_version": version if int(status) == 0 else None,
    }


def describe_software() -> dict[str, Any]:
    """Return the versions that shape the numbers."""
    import torch

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "transformers": _version_of("transformers"),
        **toolchain_versions(),
        "numpy": _version_of("numpy"),
        "grpcio": _version_of("grpcio"),
        "compiler": describe_compiler(),
    }


def describe_machine() -> dict[str, Any]:
    """Return what the host is, which launches all work."""
    from compute_plane.device import describe_device as describe_host

    cores = len(os.sched_getaffinity(0))
    host = describe_host("cpu", cores)
    return {
        "cpu": host.name,
        "cores": cores,
        "memory_bytes": host.total_memory_bytes,
        "system": platform.platform(),
    }


def describe_compiler() -> str:
    """Return "works", or in one line why the smallest kernel cannot be compiled here."""
    variant = GateMulVariant("float32")
    try:
        link(variant.name, compile_ptx(variant), (9, 0))
    except CudaKernelError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - bindings and libraries of versions that do not go together
        return line_of(error)
    return "works"


def describe_commit(told: str | None = None) -> dict[str, Any]:
    """Return the commit and whether the tree differs from it; None where no one knows.

    `told`: the commit of a checkout that was copied. It goes before git's answer, which would be of
    whatever repository the copy lies in.
    """
    if told is not None:
        return {"commit": told, "tree_has_changes": None}
    commit = _line_of("git", "rev-parse", "HEAD")
    changed = None if commit is None else bool(_line_of("git", "status", "--porcelain"))
    return {"commit": commit, "tree_has_changes": changed}


def _version_of(name: str) -> str | None:
    """Return an installed distribution's version; None where it is missing."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _smi(what: str) -> str | None:
    return _line_of("nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader")


def _line_of(*command: str) -> str | None:
    """Return the first line a command prints; None where it is absent, fails or does not end."""
    program = shutil.which(command[0])
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, *command[1:]], capture_output=True, text=True, check=False, timeout=ANSWER_S
        )
    except subprocess.TimeoutExpired:
        return None
    if done.returncode != 0:
        return None
    return (done.stdout.splitlines() or [""])[0].strip()
