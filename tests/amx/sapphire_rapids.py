"""`pytest -p tests.amx.sapphire_rapids -p tests.amx.plugin …`: code as Intel users get it.

The best set is compiled for the very processor: other registers, another order than for the set.
What is left out is what LLVM would use and processors without AMX do not have.
"""

from __future__ import annotations

from kernels.cpu import instruction_set
from kernels.cpu.instruction_set import InstructionSet


def _target(_: InstructionSet) -> tuple[str, str]:
    return "sapphirerapids", "-avx512fp16,-avxvnni"


instruction_set._target_of = _target
