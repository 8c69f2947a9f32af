"""The CUDA devices of this machine: how many can be used, and what they say of themselves."""

from __future__ import annotations

import warnings

import torch

from compute_plane.device import DeviceDescription


def why_no_cuda() -> str | None:
    """Return in one line why there is no CUDA device to use; None if there is one."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns where it could not start the driver
        if torch.cuda.is_available():
            return None
    return f"torch {torch.__version__} finds no CUDA device that it can use"


def num_devices() -> int:
    """Return how many CUDA devices there are."""
    return int(torch.cuda.device_count())


def describe_cuda(device: torch.device, num_threads: int) -> DeviceDescription:
    """Return what a CUDA device says of itself."""
    properties = torch.cuda.get_device_properties(device)
    return DeviceDescription(
        kind="cuda",
        name=str(properties.name),
        capability=f"{properties.major}.{properties.minor}",
        total_memory_bytes=int(properties.total_memory),
        num_threads=num_threads,
    )
