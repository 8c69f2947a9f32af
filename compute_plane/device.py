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
    if is_custom:
        device = "cpu" if config.device == "auto" else config.device
        return Placement(config.executor, device, config.dtype)
    if config.device == "cuda":
        raise DeviceUnavailableError(
            "device: cuda needs the CUDA executor, which this version does not have yet; "
            "use --device cpu or auto",
            field="device",
        )
    if config.executor == "simulated":
        return Placement("simulated", "simulated", "none")
    return Placement("cpu", "cpu", config.dtype)


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
