"""How much memory the weights and a KV pool take, and whether this machine has it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from planes.errors import ConfigError

MEMINFO: Final = Path("/proc/meminfo")
CGROUP: Final = Path("/sys/fs/cgroup")
FILE_CACHES: Final = ("active_file", "inactive_file")
"""Lines of a control group's memory.stat that count pages the kernel takes back when it must."""

MIB: Final = 1024 * 1024


def available_memory_bytes(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int | None:
    """Return the bytes this process may still take, or None where the system does not say.

    The smaller of what the kernel calls available and what the control group leaves. File caches of
    the group count as available: the kernel drops them before it refuses memory.
    """
    candidates: list[int] = []
    for line in _read(meminfo).splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            candidates.append(int(value.split()[0]) * 1024)
    limit, used = (_read(cgroup / name).strip() for name in ("memory.max", "memory.current"))
    if limit.isdigit() and used.isdigit():  # "max": no limit
        stat = dict(line.split() for line in _read(cgroup / "memory.stat").splitlines())
        caches = sum(int(stat.get(name, 0)) for name in FILE_CACHES)
        candidates.append(max(0, int(limit) - max(0, int(used) - caches)))
    return min(candidates, default=None)


def check_weights_fit(num_bytes: int, available_bytes: int | None) -> None:
    """Raise ConfigError, naming `model`, if weights of so many bytes cannot fit into memory.

    The system would grant the memory and end the process when it is used. `available_bytes` None
    (unknown) passes.
    """
    if available_bytes is not None and num_bytes > available_bytes:
        raise ConfigError(
            f"model: its weights need {num_bytes // MIB} MiB, "
            f"but only {available_bytes // MIB} MiB are available",
            field="model",
        )


def check_pools_fit(
    num_blocks: int, swap_bytes: int, block_bytes: int, available_bytes: int | None
) -> int:
    """Return the blocks of the host pool; raise ConfigError if the pools cannot fit into memory.

    The error names `max_num_blocks` or `swap_space`. Pools are filled lazily, but what is promised
    to the control plane must be there when it is used. `available_bytes` None (unknown) passes.
    """
    _check_pool_fits(num_blocks, block_bytes, available_bytes)
    if available_bytes is not None and num_blocks * block_bytes + swap_bytes > available_bytes:
        raise ConfigError(
            f"--swap-space needs {swap_bytes // MIB} MiB beside the KV pool's "
            f"{num_blocks * block_bytes // MIB} MiB, but only {available_bytes // MIB} MiB are "
            "available",
            field="swap_space",
        )
    return swap_bytes // block_bytes


def _check_pool_fits(num_blocks: int, block_bytes: int, available_bytes: int | None) -> None:
    needed = num_blocks * block_bytes
    if available_bytes is None or needed <= available_bytes:
        return
    most = available_bytes // block_bytes
    raise ConfigError(
        f"--max-num-blocks {num_blocks} needs {needed // MIB} MiB for the KV pool "
        f"({block_bytes} bytes a block), but only {available_bytes // MIB} MiB are available: "
        f"at most {most} blocks fit",
        field="max_num_blocks",
    )


def _read(path: Path) -> str:
    """Return the text of a system file, empty where it does not exist or may not be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
