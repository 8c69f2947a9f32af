"""int8 operations give the same bits on every instruction set, by the instructions meant for it.

Rows are quantised more coarsely on sets that make two products of one (`InstructionSet`).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable

import llvmlite.binding as llvm
import pytest
from llvmlite import ir

from kernels.cpu.instruction_set import INSTRUCTION_SETS, InstructionSet, supported_sets
from kernels.cpu.int8_packing import INT8_FORMATS
from kernels.cpu.int8_sizes import int8_tile_sizes
from kernels.cpu.int8_tile import int8_tiles
from kernels.cpu.vector_ir import I64, VOID
from tests.amx.sets import sets_that_run

NEON = INSTRUCTION_SETS["neon"]
TIMEOUT_S = 1200


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


def test_the_best_set_and_the_plainest_give_the_same_bits() -> None:
    best, *others = supported_sets()
    check_that_bits_agree([best, *(s for s in others if s.name in ("avx2", "generic"))])


@pytest.mark.slow
def test_every_set_gives_the_same_bits_for_every_format() -> None:
    check_that_bits_agree(sets_that_run(), "all")


def assembly(label: str, name: str, triple: str, cpu: str, features: str) -> str:
    """Return the machine code, as text, of a format's tiles for another processor."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    chosen = INSTRUCTION_SETS[name]
    module = ir.Module()
    module.triple = triple
    function = ir.Function(module, ir.FunctionType(VOID, [I64] * 9), "tiles")
    builder = ir.IRBuilder(function.append_basic_block())
    emit = int8_tiles(INT8_FORMATS[label], int8_tile_sizes(chosen), chosen)
    emit(builder, *function.args)
    builder.ret_void()
    target = llvm.Target.from_triple(triple).create_target_machine(
        cpu=cpu, features=features, opt=3
    )
    parsed = llvm.parse_assembly(str(module))
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    llvm.create_pass_builder(target, options).getModulePassManager().run(
        parsed, llvm.create_pass_builder(target, options)
    )
    return str(target.emit_assembly(parsed))


@pytest.mark.parametrize("label", list(INT8_FORMATS))
@pytest.mark.parametrize(
    ("name", "triple", "cpu", "features", "wanted"),
    [
        ("neon", "aarch64-unknown-linux-gnu", NEON.llvm_cpu, NEON.llvm_features, "sdot"),
        ("avx512", "x86_64-unknown-linux-gnu", "x86-64-v4", "+avx512vnni", "vpdpbusd"),
        ("avx2_vnni", "x86_64-unknown-linux-gnu", "x86-64-v3", "+avxvnni", "vpdpbusd"),
        ("avx2", "x86_64-unknown-linux-gnu", "x86-64-v3", "", "vpmaddubsw"),
    ],
)
def test_tiles_are_made_of_the_sets_dot_products(
    label: str, name: str, triple: str, cpu: str, features: str, wanted: str
) -> None:
    assert wanted in assembly(label, name, triple, cpu, features)
