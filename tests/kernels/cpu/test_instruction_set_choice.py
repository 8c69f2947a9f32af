"""Which instruction sets are found on a processor, best first."""

from __future__ import annotations

import platform
import subprocess
import sys

import llvmlite.binding
import pytest

from compute_plane import config
from compute_plane.cpu import build
from kernels.cpu import instruction_set
from kernels.cpu.instruction_set import (
    AVX512_NEEDS,
    INSTRUCTION_SETS,
    forced_target,
    select_instruction_set,
    supported_sets,
)

AVX2 = ("avx2", "fma", "f16c")
AVX512_BF16 = (*AVX2, *AVX512_NEEDS, "avx512bf16")
AMX = ("amx-tile", "amx-int8", "amx-bf16")


@pytest.mark.parametrize(
    ("features", "names"),
    [
        ((*AVX512_BF16, "sse4a"), ["zen4", "avx512_bf16", "avx512", "avx2", "generic"]),
        (AVX512_BF16, ["avx512_bf16", "avx512", "avx2", "generic"]),
        ((*AVX512_BF16, *AMX), ["amx", "avx512_bf16", "avx512", "avx2", "generic"]),
        ((*AVX2, "sse4a"), ["avx2", "generic"]),
        ((), ["generic"]),
    ],
    ids=["AMD with bfloat16", "Intel with bfloat16", "Intel with AMX", "older AMD", "none"],
)
def test_a_processor_has_the_sets_whose_features_it_has(
    monkeypatch: pytest.MonkeyPatch, features: tuple[str, ...], names: list[str]
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(
        llvmlite.binding, "get_host_cpu_features", lambda: dict.fromkeys(features, True)
    )
    monkeypatch.setattr(instruction_set, "_tile_registers_granted", lambda: True)
    assert [found.name for found in supported_sets()] == names


GRAVITON2, CORTEX_A72 = 0x1011_9FFF, 0x8FF
"""AT_HWCAP of processors with SDOT and without."""


@pytest.mark.parametrize(
    ("word", "names", "target"),
    [
        (GRAVITON2, ["neon", "generic"], ("generic", "+neon,+lse,+dotprod")),
        (CORTEX_A72, ["generic"], ("generic", "")),
    ],
    ids=["with SDOT", "without"],
)
def test_what_an_arm_processor_has_is_asked_of_linux_and_all_that_is_compiled_for(
    monkeypatch: pytest.MonkeyPatch, word: int, names: list[str], target: tuple[str, str]
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    # As LLVM reports it on ARM, with SDOT or without.
    monkeypatch.setattr(llvmlite.binding, "get_host_cpu_features", lambda: {"neon": True})
    monkeypatch.setattr(instruction_set, "_hardware_capabilities", lambda: word)
    monkeypatch.setattr(instruction_set, "_selected", None)
    monkeypatch.setattr(instruction_set, "_forced", None)
    assert [found.name for found in supported_sets()] == names
    assert select_instruction_set().name == names[0]
    assert forced_target() == target


def test_a_forced_set_is_what_kernels_are_compiled_for() -> None:
    program = (
        "import sys\n"
        "from kernels.cpu.instruction_set import forced_target, select_instruction_set\n"
        "select_instruction_set(sys.argv[1])\n"
        "import kernels.cpu.compiled, numba\n"
        "assert forced_target() == (numba.config.CPU_NAME, numba.config.CPU_FEATURES)\n"
        "print(numba.config.CPU_NAME)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "generic"], check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == ("x86-64" if platform.machine() == "x86_64" else "generic")


def test_the_option_offers_every_set() -> None:
    assert ("auto", *INSTRUCTION_SETS) == config.INSTRUCTION_SETS


@pytest.mark.parametrize(("name", "tokens"), [("amx", 512), ("zen4", 256), ("avx2", 256)])
def test_without_amx_running_streams_wait_for_smaller_chunks_of_prompts(
    monkeypatch: pytest.MonkeyPatch, name: str, tokens: int
) -> None:
    monkeypatch.setattr(instruction_set, "_selected", INSTRUCTION_SETS[name])
    assert build.chosen_prefill_chunk() == tokens
