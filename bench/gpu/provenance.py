"""What a report is of: the device, the software, the commit."""

from __future__ import annotations

import platform
import shutil
import subprocess
from importlib import metadata
from typing import Any

from kernels.cuda.build import toolchain_versions


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
        "driver": _line_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
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
    }


def describe_commit() -> dict[str, Any]:
    """Return the commit and whether the tree differs from it; None where there is no git."""
    commit = _line_of("git", "rev-parse", "HEAD")
    changed = None if commit is None else bool(_line_of("git", "status", "--porcelain"))
    return {"commit": commit, "tree_has_changes": changed}


def _version_of(name: str) -> str | None:
    """Return an installed distribution's version; None where it is missing."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _line_of(*command: str) -> str | None:
    """Return the first line a command prints; None where it is absent or fails."""
    program = shutil.which(command[0])
    if program is None:
        return None
    done = subprocess.run([program, *command[1:]], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return None
    return (done.stdout.splitlines() or [""])[0].strip()
