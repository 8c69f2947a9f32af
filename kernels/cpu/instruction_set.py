"""Which instructions the CPU kernels are made of: found out at start, or forced by an option.

    name         integer dot product       bfloat16 dot product   float vectors
    amx          AMX int8 and VPDPBUSD     AMX bf16               512 bits
    zen4         VPDPBUSD, 512 bits        VDPBF16PS              512 bits
    avx512_bf16  VPDPBUSD, 512 bits        VDPBF16PS              512 bits
    avx512       VPDPBUSD, 512 bits        widened to float32     512 bits
    avx2_vnni    VPDPBUSD, 256 bits        widened to float32     256 bits
    avx2         VPMADDWD                  widened to float32     256 bits
    neon         SDOT                      widened to float32     128 bits
    generic      what LLVM makes of it     widened to float32     what LLVM makes of it

zen4 is avx512_bf16 of an AMD processor, where units that add stand beside those that multiply:
many rows meet 4-bit weights by half as many multiplications (`kernels.cpu.int8_pair_tile`). Zen 5
has its features too, and so takes it; it was measured on Zen 4 only.

A kernel is written once, over vectors of 16 float32 or int32 lanes; LLVM splits them into what the
processor has. Only the rows of this table are told apart in the sources.

Forcing a set makes LLVM compile *everything* for a processor that has no more than it, so one
machine can test all sets below its own. The choice is made once, before the first kernel is
compiled, and holds for the process.

ARM processors are asked by way of Linux (`granted_features`), and kernels are compiled for the set
alone there, whatever else the processor has: LLVM does not report SDOT, and by the processor's name
it would use what a hypervisor may hide, SVE for one.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import llvmlite.binding

from planes.errors import ConfigError

LINUX_ARCH_PRCTL: Final = 158
ARCH_REQ_XCOMP_PERM: Final = 0x1023
XFEATURE_XTILEDATA: Final = 18
"""Linux gives a process the AMX tile registers only once it has asked (arch_prctl(2))."""

AT_HWCAP: Final = 16
ARM_HWCAPS: Final = {"neon": 1 << 1, "lse": 1 << 8, "dotprod": 1 << 20}
"""Bits of the word that Linux gives every process on ARM (getauxval(3)), by LLVM's names."""


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """A row of the table above.

    `machine`: platform.machine() it belongs to, None for any. `needs`: LLVM's names of the features
    a processor must have. `llvm_cpu`, `llvm_features`: what kernels are compiled for where the set
    is forced. `vector_registers`, `vector_bits`: for the choice of tile sizes.
    """

    name: str
    machine: str | None
    needs: tuple[str, ...]
    llvm_cpu: str
    llvm_features: str
    vector_bits: int
    vector_registers: int

    @property
    def has_amx(self) -> bool:
        """Whether tiles of 16 rows are multiplied by one instruction."""
        return self.name == "amx"

    @property
    def has_bf16_dot(self) -> bool:
        """Whether pairs of bfloat16 are multiplied and summed by one instruction."""
        return self.name in ("zen4", "avx512_bf16")

    @property
    def pairs_products(self) -> bool:
        """Whether additions cost nothing beside multiplications, so that fewer of these pay."""
        return self.name == "zen4"

    @property
    def fetch_locality(self) -> int:
        """Where attention fetches keys and values ahead: 3, the first-level cache; 2, the second.

        On Zen 4 decode reads 17 GB/s with the second, 12 with the first, 13 with none; elsewhere
        the second was not measured.
        """
        return 2 if self.name == "zen4" else 3


AVX512_NEEDS: Final = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni", "fma", "f16c")
AVX512_FORCED: Final = "+avx512vnni,+avx512vbmi,+avx512bitalg,+avx512vpopcntdq"

INSTRUCTION_SETS: Final[Mapping[str, InstructionSet]] = {
    s.name: s
    for s in (
        InstructionSet(
            "amx", "x86_64", (*AVX512_NEEDS, "amx-tile", "amx-int8", "amx-bf16", "avx512bf16"),
            "x86-64-v4", AVX512_FORCED + ",+amx-tile,+amx-int8,+amx-bf16,+avx512bf16", 512, 32,
        ),
        InstructionSet(
            "zen4", "x86_64", (*AVX512_NEEDS, "avx512bf16", "sse4a"),
            "x86-64-v4", AVX512_FORCED + ",+avx512bf16,+sse4a", 512, 32,
        ),
        InstructionSet(
            "avx512_bf16", "x86_64", (*AVX512_NEEDS, "avx512bf16"),
            "x86-64-v4", AVX512_FORCED + ",+avx512bf16", 512, 32,
        ),
        InstructionSet(
            "avx512", "x86_64", AVX512_NEEDS, "x86-64-v4", AVX512_FORCED, 512, 32,
        ),
        InstructionSet(
            "avx2_vnni", "x86_64", ("avx2", "fma", "f16c", "avxvnni"),
            "x86-64-v3", "+avxvnni", 256, 16,
        ),
        InstructionSet("avx2", "x86_64", ("avx2", "fma", "f16c"), "x86-64-v3", "", 256, 16),
        InstructionSet(
            "neon", "aarch64", tuple(ARM_HWCAPS), "generic", "+neon,+lse,+dotprod", 128, 32,
        ),
        InstructionSet("generic", None, (), "", "", 128, 16),
    )
}  # fmt: skip
"""All sets, best first."""

AUTOMATIC: Final = "auto"


def supported_sets() -> list[InstructionSet]:
    """Return the sets this processor and operating system can run, best first."""
    features = granted_features()
    machine = platform.machine()
    return [
        candidate
        for candidate in INSTRUCTION_SETS.values()
        if candidate.machine in (None, machine)
        and all(features.get(need, False) for need in candidate.needs)
        and (not candidate.has_amx or _tile_registers_granted())
    ]


def granted_features() -> Mapping[str, bool]:
    """Return what this processor has and the system lets be used, by LLVM's names.

    Of ARM only what sets need: LLVM reads it from /proc/cpuinfo, where it does not know SDOT.
    """
    if platform.machine() != "aarch64" or not sys.platform.startswith("linux"):
        found: Mapping[str, bool] = llvmlite.binding.get_host_cpu_features()
        return found
    word = _hardware_capabilities()
    return {name: bool(word & bit) for name, bit in ARM_HWCAPS.items()}


def select_instruction_set(name: str = AUTOMATIC) -> InstructionSet:
    """Choose the set kernels are compiled for; call before a kernel is imported.

    Raises ConfigError if the processor does not have the set that is asked for, or if the process
    has chosen another one already.
    """
    global _selected, _forced
    supported = supported_sets()
    chosen = supported[0] if name == AUTOMATIC else INSTRUCTION_SETS.get(name)
    if chosen is None or chosen not in supported:
        names = ", ".join(s.name for s in supported)
        raise ConfigError(
            f"instruction_set must be auto or one this processor has ({names}), got {name}",
            field="instruction_set",
        )
    if _selected is not None and _selected != chosen:
        raise ConfigError(
            f"instruction_set: this process has compiled for {_selected.name}, got {chosen.name}",
            field="instruction_set",
        )
    is_best = chosen is supported[0] and platform.machine() != "aarch64"
    _forced = None if is_best else _target_of(chosen)
    _selected = chosen
    return chosen


def adopt(name: str, target: tuple[str, str] | None) -> None:
    """Choose what another process has chosen, which this one compiles for."""
    global _selected, _forced
    _selected, _forced = INSTRUCTION_SETS[name], target


def selected_instruction_set() -> InstructionSet:
    """Return the set of this process, choosing the best one if nothing was chosen yet."""
    return _selected or select_instruction_set()


def forced_target() -> tuple[str, str] | None:
    """Return LLVM's processor name and features to compile for; None: those of this processor."""
    return _forced


def _target_of(chosen: InstructionSet) -> tuple[str, str]:
    """Return LLVM's processor name and features that have `chosen` and nothing above it."""
    if chosen.llvm_cpu:
        return chosen.llvm_cpu, chosen.llvm_features
    return ("x86-64", "") if platform.machine() == "x86_64" else ("generic", "")


def _hardware_capabilities() -> int:
    """Return the first word in which Linux tells a process what the processor has."""
    getauxval = ctypes.CDLL(None).getauxval
    getauxval.argtypes, getauxval.restype = [ctypes.c_ulong], ctypes.c_ulong
    return int(getauxval(AT_HWCAP))


def _tile_registers_granted() -> bool:
    """Ask Linux for the AMX tile registers, for this process and the threads it starts later."""
    if not sys.platform.startswith("linux"):
        return False
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    return bool(syscall(LINUX_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0)


_selected: InstructionSet | None = None
_forced: tuple[str, str] | None = None
