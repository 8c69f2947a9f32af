"""Which instruction sets tests can run here, software for tiles included."""

from __future__ import annotations

import platform
import sys

import llvmlite.binding

from kernels.cpu import instruction_set
from kernels.cpu.instruction_set import (
    INSTRUCTION_SETS,
    InstructionSet,
    selected_instruction_set,
    supported_sets,
)

AMX = INSTRUCTION_SETS["amx"]


def missing() -> str | None:
    """Return why this machine cannot run the set `amx` with software for tiles; None if it can."""
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return "software for tiles is for Linux on x86-64"
    features = llvmlite.binding.get_host_cpu_features()
    # Not only what it is chosen by: also what it is compiled for where it is forced.
    wanted = dict.fromkeys((*AMX.needs, *AMX.llvm_features.replace("+", "").split(",")))
    lacking = [n for n in wanted if not n.startswith("amx-") and not features.get(n, False)]
    return f"the processor lacks {', '.join(lacking)}" if lacking else None


def sets_that_run() -> list[InstructionSet]:
    """Return the sets that `choose` can choose, best first."""
    found = supported_sets()
    return found if AMX in found or missing() else [AMX, *found]


def choose(name: str) -> None:
    """Choose this process's set, before a kernel is imported."""
    found = supported_sets()
    if name == AMX.name and AMX not in found:
        assert missing() is None, missing()
        # Last: the best set is compiled for this very processor, all others for what they are.
        instruction_set.supported_sets = lambda: [*found, AMX]
    instruction_set.select_instruction_set(name)


def use(name: str) -> None:
    """Choose this process's set, and stand in for what the processor lacks of it."""
    choose(name)
    stand_in()


def needs_software() -> bool:
    """Return whether the chosen set has tiles and the processor does not."""
    return selected_instruction_set() == AMX and AMX not in supported_sets()


def stand_in(told: int = 2) -> None:
    """Do in software from now on what the processor does not do of the chosen set.

    `told`: a file descriptor, where faults are told of before they end the process.
    """
    if needs_software():
        from tests.amx import trap  # what is emitted is emitted for the chosen set

        trap.install(told)
