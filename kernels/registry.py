"""Kernel sets by name.

A set is imported only when it is asked for: `reference` needs NumPy alone, `cpu` compiles with
Numba (where its machine code is cached must be settled before; see
`compute_plane.executor.kernel_cache`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

from planes.errors import ConfigError

if TYPE_CHECKING:
    from kernels.interface import KernelSet

KERNEL_SETS: Final = {"reference": "kernels.reference.kernel_set", "cpu": "kernels.cpu.kernel_set"}
"""Name of a set → module whose `KERNELS` it is."""


def load_kernels(name: str) -> KernelSet:
    """Return the kernel set called `name`. Raises ConfigError for an unknown one."""
    module = KERNEL_SETS.get(name)
    if module is None:
        known = ", ".join(sorted(KERNEL_SETS))
        raise ConfigError(f"kernel set must be one of {known}, got {name!r}", field="kernels")
    kernels: KernelSet = importlib.import_module(module).KERNELS
    return kernels
