"""The device a plane computes on: chosen by the configuration, described for people and tools."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from compute_plane.config import ComputePlaneConfig
from compute_plane.errors import DeviceUnavailableError

CPUINFO: Final = Path("/proc/cpuinfo")

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

    `dtype`: as configured; the executor resolves `auto`.
    """

    executor: str
    device: str
    dtype: str


def choose_placement(config: ComputePlaneConfig) -> Placement:
    """Resolve `auto` and refuse what is not there. Raises DeviceUnavailableError.

    A custom executor brings its own device and number format: it is told what was asked for.
    """
    is_custom = ":" in config.executor
    is_cuda = config.executor in ("auto", "cuda")
    if is_custom:
        device = "cpu" if config.device == "auto" else config.device
        return Placement(config.executor, device, config.dtype)
    if config.device == "cuda" and not is_cuda:
        raise DeviceUnavailableError(
            f"device: the executor {config.executor} does not run on cuda; "
            "use --executor auto or cuda",
            field="device",
        )
    if config.executor == "simulated":
        return Placement("simulated", "simulated", "none")
    if config.device == "cuda" or (config.executor == "cuda" and config.device == "auto"):
        _require_cuda()
        return Placement("cuda", "cuda", config.dtype)
    if config.executor == "cuda":
        return Placement("cuda", "cpu", config.dtype)
    if config.dtype == "float16":
        raise DeviceUnavailableError(
            "dtype: the executor cpu computes in float32 or bfloat16, got float16", field="dtype"
        )
    return Placement("cpu", "cpu", config.dtype)


def _require_cuda() -> None:
    """Raise DeviceUnavailableError, in one line, unless the CUDA executor can run on a device."""
    try:
        # torch is installed for the CUDA executor only.
        from compute_plane.cuda.devices import require_cuda
    except ImportError as error:
        raise DeviceUnavailableError(
            f"device: cuda needs torch (pip install 'hetero-paged-infer[cuda]'): {error}",
            field="device",
        ) from error
    require_cuda()


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
