"""int8 operations give the same bits on every instruction set, by the instructions meant for it.

Rows are quantised more coarsely on sets that make two products of one (`InstructionSet`).
"""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass

import llvmlite.binding as llvm
import pytest
from llvmlite import ir

from kernels.cpu.instruction_set import INSTRUCTION_SETS, InstructionSet, supported_sets
from kernels.cpu.int8_packing import INT8_FORMATS
from kernels.cpu.int8_sizes import int8_tile_sizes
from kernels.cpu.int8_tile import int8_tiles
from kernels.cpu.int8_unpacking import unpacked_from, unpacks_weights
from kernels.cpu.vector_ir import I64, VOID
from tests.amx.sets import sets_that_run

TIMEOUT_S = 1200


@dataclass(frozen=True)
class Target:
    """A processor, and the instructions of its set that are looked for."""

    name: str
    cpu: str
    features: str
    dot: str
    triple: str = "x86_64-unknown-linux-gnu"
    from_float16: str = "vcvtph2ps"
    shift_right: str = "vpsrld"


NEON = INSTRUCTION_SETS["neon"]
TARGETS = [
    Target(
        "neon", NEON.llvm_cpu, NEON.llvm_features, "sdot", "aarch64-unknown-linux-gnu", "fcvtl",
        "ushr",
    ),
    Target("avx512", "x86-64-v4", "+avx512vnni", "vpdpbusd"),
    Target("avx2_vnni", "x86-64-v3", "+avxvnni", "vpdpbusd"),
    Target("avx2", "x86-64-v3", "", "vpmaddubsw"),
]  # fmt: skip


def check_that_bits_agree(sets: Iterable[InstructionSet], *arguments: str) -> None:
    """Compare what the instruction sets compute, side by side."""
    chosen = list(sets)
    found = digests([s.name for s in chosen], *arguments)
    rows, products = zip(*(digest.split() for digest in found), strict=True)
    assert len(set(products)) == 1
    alike = {digest for s, digest in zip(chosen, rows, strict=True) if not s.pairs_products}
    assert len(alike) == 1
    if any(s.pairs_products for s in chosen):
        assert len(set(rows)) == 2


def digests(names: Iterable[str], *arguments: str) -> list[str]:
    """Return what each instruction set computes."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.kernels.cpu.int8_digest", name, *arguments],
            stdout=subprocess.PIPE, text=True,
        )
        for name in names
    ]  # fmt: skip
    outcomes = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes)
    return outcomes


@pytest.mark.wide
def test_the_best_set_and_the_plainest_give_the_same_bits() -> None:
    best, *others = supported_sets()
    check_that_bits_agree([best, *(s for s in others if s.name in ("avx2", "generic"))])


@pytest.mark.slow
def test_every_set_gives_the_same_bits_for_every_format() -> None:
    check_that_bits_agree(sets_that_run(), "all")


@functools.cache
def assembly(label: str, target: Target, *, is_unpacked: bool = False) -> str:
    """Return the machine code, as text, of a format's tiles for another processor."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    chosen = INSTRUCTION_SETS[target.name]
    module = ir.Module()
    module.triple = target.triple
    kinds = [I64] * (12 if is_unpacked else 11)
    function = ir.Function(module, ir.FunctionType(VOID, kinds), "tiles")
    builder = ir.IRBuilder(function.append_basic_block())
    emit = int8_tiles(INT8_FORMATS[label], int8_tile_sizes(chosen), chosen, is_unpacked=is_unpacked)
    emit(builder, *function.args)
    builder.ret_void()
    machine = llvm.Target.from_triple(target.triple).create_target_machine(
        cpu=target.cpu, features=target.features, opt=3
    )
    parsed = llvm.parse_assembly(str(module))
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    llvm.create_pass_builder(machine, options).getModulePassManager().run(
        parsed, llvm.create_pass_builder(machine, options)
    )
    return str(machine.emit_assembly(parsed))


@pytest.mark.spread(4)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@pytest.mark.parametrize("label", list(INT8_FORMATS))
def test_tiles_are_made_of_the_sets_dot_products(label: str, target: Target) -> None:
    assert target.dot in assembly(label, target)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("target", "label"),
    # One whose weights share bytes, one with upper bits, one that looks them up; the others are
    # made of the same pieces.
    [
        pytest.param(
            target,
            label,
            marks=() if label in ("Q4_K", "Q6_K", "IQ4_XS") else pytest.mark.slow,
            id=f"{target.name}-{label}",
        )
        for label, fmt in INT8_FORMATS.items()
        for target in TARGETS
        if unpacked_from(fmt, INSTRUCTION_SETS[target.name])
    ],
)
def test_tiles_of_unpacked_panels_find_there_what_was_unpacked(label: str, target: Target) -> None:
    """The same dot products, and nothing of what the unpacking has done for all rows."""
    packed, unpacked = (assembly(label, target, is_unpacked=is_so) for is_so in (False, True))
    assert target.dot in unpacked
    assert target.from_float16 in packed
    assert target.from_float16 not in unpacked
    assert target.shift_right in packed
    # Weights that are not unpacked share bytes in memory of either kind.
    of_weights = unpacks_weights(INT8_FORMATS[label], INSTRUCTION_SETS[target.name])
    assert (target.shift_right in unpacked) != of_weights
