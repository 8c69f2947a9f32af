"""The CUDA devices of this machine: whether one can be used, and what it says of itself."""

from __future__ import annotations

import warnings
from typing import Final

import torch

from compute_plane.device import DeviceDescription
from compute_plane.errors import DeviceUnavailableError

HINT: Final = "--device cpu computes on the processor"


def why_no_cuda() -> str | None:
    """Return in one line why there is no CUDA device to use; None if there is one."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns where it could not start the driver
        if torch.cuda.is_available():
            return None
    return f"torch {torch.__version__} finds no CUDA driver or no device"


def require_cuda() -> None:
    """Raise DeviceUnavailableError unless the executor can run on a CUDA device."""
    reason = why_no_cuda()
    if reason is not None:
        raise DeviceUnavailableError(f"device: cuda: {reason}; {HINT}", field="device")


def describe_cuda(device: torch.device, num_threads: int) -> DeviceDescription:
    """Return what a CUDA device says of itself."""
    properties = torch.cuda.get_device_properties(device)
    return DeviceDescription(
        kind="cuda",
        name=str(properties.name),
        capability=f"sm_{properties.major}{properties.minor}",
        total_memory_bytes=int(properties.total_memory),
        num_threads=num_threads,
    )
