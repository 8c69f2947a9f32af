"""The device a plane computes on: chosen by the configuration, described for people and tools."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from compute_plane.config import ComputePlaneConfig
from compute_plane.errors import DeviceUnavailableError
from planes.extras import the_extra

CPUINFO: Final = Path("/proc/cpuinfo")
CUDA_DRIVER: Final = "libcuda.so.1"
HINT: Final = "--device cpu computes on the processor"

log = structlog.get_logger()

SHOWN_FEATURES: Final = (
    "avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8",
    "asimd", "asimddp", "i8mm", "bf16", "sve",
)  # fmt: skip
"""Instruction sets that matter to kernels, as /proc/cpuinfo spells them."""


@dataclass(frozen=True, slots=True)
class DeviceDescription:
    """`kind`: "cpu", "cuda" or "simulated". `capability`: of a CPU, its instruction sets."""

    kind: str
    name: str
    capability: str
    total_memory_bytes: int
    num_threads: int


@dataclass(frozen=True, slots=True)
class Placement:
    """What the configuration comes to: which executor, on which device, computing in what.

    `device`: "cpu", "simulated", "cuda" or "cuda:N", the first device if no N. `dtype`: as
    configured; the executor resolves `auto`.
    """

    executor: str
    device: str
    dtype: str

    @property
    def pool_device(self) -> str:
        """The device whose memory the executor's pool lies in, as far as is known."""
        return self.device if self.executor == "cuda" else "cpu"


def choose_placement(config: ComputePlaneConfig) -> Placement:
    """Resolve `auto` and refuse what is not there. Raises DeviceUnavailableError.

    A custom executor brings its own device and number format: it is told what was asked for.
    """
    is_custom = ":" in config.executor
    names_cuda = config.device.startswith("cuda")
    if is_custom:
        device = "cpu" if config.device == "auto" else config.device
        return Placement(config.executor, device, config.dtype)
    if names_cuda and config.executor not in ("auto", "cuda"):
        raise DeviceUnavailableError(
            f"device: the executor {config.executor} does not run on cuda; "
            "use --executor auto or cuda",
            field="device",
        )
    if config.executor == "simulated":
        return Placement("simulated", "simulated", "none")
    if names_cuda or (config.executor == "cuda" and config.device == "auto"):
        device = config.device if names_cuda else "cuda"
        require_cuda(device)
        return Placement("cuda", device, config.dtype)
    if config.executor == "cuda":
        return Placement("cuda", "cpu", config.dtype)
    if config.executor == "auto" and config.device == "auto" and _finds_cuda():
        return Placement("cuda", "cuda", config.dtype)
    if config.dtype == "float16":
        raise DeviceUnavailableError(
            "dtype: the executor cpu computes in float32 or bfloat16, got float16", field="dtype"
        )
    if config.gpu_memory_limit is not None:
        log.warning("gpu_memory_limit has no effect: the model runs on the processor")
    return Placement("cpu", "cpu", config.dtype)


def require_cuda(device: str) -> None:
    """Raise DeviceUnavailableError, in one line, unless the CUDA executor can run on a device.

    `device`: "cuda", the first one, or "cuda:N".
    """
    if importlib.util.find_spec("torch") is None:
        raise _without_torch("it is not installed")
    if not _has_driver():
        raise DeviceUnavailableError(
            f"device: {device}: this machine has no CUDA driver ({CUDA_DRIVER}); {HINT}",
            field="device",
        )
    try:
        # torch takes seconds to import, and is installed for the CUDA executor only.
        from compute_plane.cuda.devices import num_devices, why_no_cuda
    except ImportError as error:
        raise _without_torch(str(error)) from error
    reason = why_no_cuda()
    if reason is not None:
        raise DeviceUnavailableError(f"device: {device}: {reason}; {HINT}", field="device")
    count = num_devices()
    if cuda_index(device) >= count:
        has = "1 CUDA device, cuda:0" if count == 1 else f"{count} CUDA devices from cuda:0 on"
        raise DeviceUnavailableError(
            f"device: this machine has {has}, got {device}", field="device"
        )


def cuda_index(device: str) -> int:
    """Return N of "cuda:N", 0 of "cuda"."""
    return int(device.partition(":")[2] or 0)


def _without_torch(reason: str) -> DeviceUnavailableError:
    return DeviceUnavailableError(
        f"device: cuda needs torch, {the_extra('cuda')}: {reason}",
        field="device",
    )


def _finds_cuda() -> bool:
    """Whether the CUDA executor can run; says why not where there is a driver."""
    if not _has_driver():
        return False
    try:
        require_cuda("cuda")
    except DeviceUnavailableError as error:
        log.warning(
            "computing on the processor, although there is a CUDA driver", reason=error.message
        )
        return False
    return True


def _has_driver() -> bool:
    """Whether this machine has a CUDA driver: a look that takes no time, before torch is asked."""
    try:
        ctypes.CDLL(CUDA_DRIVER)
    except OSError:
        return False
    return True


def describe_device(kind: str, num_threads: int) -> DeviceDescription:
    """Return what this machine says of itself."""
    info = _cpu_info()
    name = "simulated" if kind == "simulated" else info.get("model name") or platform.machine()
    features = (info.get("flags") or info.get("Features") or "").split()
    return DeviceDescription(
        kind=kind,
        name=name,
        capability=" ".join(feature for feature in SHOWN_FEATURES if feature in features),
        total_memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        num_threads=num_threads,
    )


def _cpu_info() -> dict[str, str]:
    """Return the first processor's entries of /proc/cpuinfo; empty where there is none."""
    try:
        text = CPUINFO.read_text()
    except OSError:
        return {}
    entries = {}
    for line in text.partition("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        entries[key.strip()] = value.strip()
    return entries
