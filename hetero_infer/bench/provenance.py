"""What a result is of: the machine, the software, the commit, the command."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

from hetero_infer.version import version

PACKAGES = ("grpcio", "llvmlite", "numba", "numpy", "protobuf", "tokenizers")
"""Their versions shape the numbers."""

TOLD_FLAGS = ("avx", "fma", "f16c", "amx", "sve", "asimd", "i8mm", "bf16")
"""Which of a processor's many features are written down: those whose names begin so."""

GIT_TIMEOUT_S = 10


def now() -> str:
    """Return the time, UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def describe_origin(command: str) -> dict[str, Any]:
    """Return everything below, as it is when a benchmark begins."""
    return {
        "date": now(),
        "command": command,
        "machine": describe_machine(),
        "software": describe_software(),
        **describe_commit(),
    }


def describe_machine() -> dict[str, Any]:
    """Return processor, cores, memory and system; None for what the system does not say."""
    processor = _processor()
    return {
        "cpu": processor.get("model name") or processor.get("Processor") or platform.processor(),
        "cpu_flags": sorted(
            flag
            for flag in (processor.get("flags") or processor.get("Features") or "").split()
            if flag.startswith(TOLD_FLAGS)
        ),
        "cpus": os.cpu_count(),
        "usable_cpus": usable_cpus(),
        "memory_bytes": _memory_bytes(),
        "architecture": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "load_average": os.getloadavg()[0],
    }


def describe_software() -> dict[str, Any]:
    """Return the versions of the product, of Python and of what the numbers depend on."""
    return {
        "hetero-paged-infer": version(),
        "python": platform.python_version(),
        **{name: _version_of(name) for name in PACKAGES},
    }


def describe_commit() -> dict[str, Any]:
    """Return the commit of this source tree and whether the tree differs from it.

    None where the product was installed without its repository.
    """
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return {"commit": None, "tree_has_changes": None}
    commit = _git(root, "rev-parse", "HEAD")
    changes = None if commit is None else _git(root, "status", "--porcelain")
    return {"commit": commit, "tree_has_changes": None if changes is None else bool(changes)}


def usable_cpus() -> int:
    """Return how many CPUs this process may use."""
    return len(os.sched_getaffinity(0))


class CpuWatch:
    """How much of the processors others use while a benchmark runs; Linux only, else nothing."""

    def __init__(self) -> None:
        self._began = _cpu_seconds()

    def share_of_others(self) -> float | None:
        """Return their share since this was made, 0 to 1.

        What this process and its children that have ended used is not theirs; call it when the
        planes that were started are gone.
        """
        ended = _cpu_seconds()
        if self._began is None or ended is None:
            return None
        wall, busy, own = (after - before for before, after in zip(self._began, ended, strict=True))
        return min(max((busy - own) / (wall * (os.cpu_count() or 1)), 0.0), 1.0)


def _cpu_seconds() -> tuple[float, float, float] | None:
    """Return seconds: on the wall, of all processors at work, of this process and its children."""
    own = os.times()
    try:
        line = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0]
    except OSError:
        return None
    # user, nice, system, idle, iowait, irq, softirq, steal; guests are part of user.
    ticks = [int(word) for word in line.split()[1:9]]
    busy = (sum(ticks) - sum(ticks[3:5])) / os.sysconf("SC_CLK_TCK")
    used = own.user + own.system + own.children_user + own.children_system
    return own.elapsed, busy, used


def _processor() -> dict[str, str]:
    """Return what Linux says of the first processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in reversed(lines) if ":" in line)
    return {key.strip(): value.strip() for key, _, value in pairs}


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(root: Path, *arguments: str) -> str | None:
    """Return what a git command prints; None where there is no git or it fails."""
    program = shutil.which("git")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, "-C", str(root), *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=GIT_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
