from __future__ import annotations

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np
import pytest
from llvmlite import ir

from kernels.cpu.float_packing import pack_float_rows, packed_float_bytes
from kernels.cpu.float_sizes import BLOCK_ROWS, TileSizes, tile_sizes
from kernels.cpu.float_tile import float_tiles
from kernels.cpu.instruction_set import INSTRUCTION_SETS, supported_sets
from tests.amx.sets import sets_that_run
from tests.kernels.cpu import float_driver
from tests.kernels.cpu.float_driver import FIRST_ROW, KINDS, MARK, example, product, run_product
from tests.kernels.cpu.test_int8_products import before_a_guard_page

SHAPES = [
    (1, 576, 96),
    (2, 1, 1),
    (3, 31, 15),
    (7, 33, 17),
    (16, 64, 32),
    (17, 95, 48),
    (33, 577, 49),
    (70, 672, 80),
    (130, 2048, 64),
    (35, 3107, 33),
    (530, 72, 40),
    (34, 4096, 300),
]
"""(M, K, N): below, at and above the borders of tiles, panels, pairs, blocks, parts and spans."""


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
def test_products_equal_float64_within_rounding(name, m, k, n):
    rows, weights, expected = example(name, m, k, n)
    result = product(name, rows, weights, n, chunks=3)
    # One rounding a step, of sums that grow like √k.
    np.testing.assert_allclose(result, expected, rtol=0, atol=4e-7 * k)


@pytest.mark.parametrize("name", KINDS)
def test_only_the_columns_and_rows_of_the_product_are_written(name):
    for m, k, n in [(5, 40, 17), (33, 64, 32), (18, 33, 95)]:
        rows, weights, expected = example(name, m, k, n)
        out = np.full((FIRST_ROW + m + 1, n + 19), MARK, np.float32)
        run_product(name, rows, weights, n, out, chunks=2)
        written = out[FIRST_ROW : FIRST_ROW + m, :n]
        np.testing.assert_allclose(written, expected, rtol=0, atol=4e-7 * k)
        written[:] = MARK
        assert (out == MARK).all()


@pytest.mark.parametrize("name", KINDS)
def test_a_sum_is_added_whole_to_what_is_there(name):
    for m, k, n in [(9, 70, 50), (80, 672, 64)]:
        rows, weights, _ = example(name, m, k, n)
        plain = product(name, rows, weights, n)
        out = np.full((FIRST_ROW + m, n), MARK, np.float32)
        run_product(name, rows, weights, n, out, accumulate=True, chunks=2)
        np.testing.assert_array_equal(out[FIRST_ROW:], plain + MARK)


@pytest.mark.parametrize("name", KINDS)
def test_any_few_rows_have_the_bits_that_each_has_alone(name):
    """Tiles have any number of rows up to their largest."""
    rows, weights, _ = example(name, 17, 77, 83)
    alone = np.concatenate([product(name, rows[r : r + 1], weights, 83) for r in range(17)])
    for count in range(2, 18):
        part = product(name, np.ascontiguousarray(rows[:count]), weights, 83)
        np.testing.assert_array_equal(part, alone[:count])


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("k", [33, 224, pytest.param(3105, marks=pytest.mark.wide)])
def test_any_number_of_panels_gives_few_rows_the_bits_they_have_among_many(name, k):
    """Few rows go through more panels at once."""
    for panels in range(1, 16):
        n = 16 * panels - panels % 3
        rows, weights, _ = example(name, BLOCK_ROWS + 1, k, n)
        together = product(name, rows, weights, n)
        for count in (1, 3, 4, 16):
            few, out = rows[:count].copy(), np.full((FIRST_ROW + count + 1, n + 37), MARK)
            run_product(name, few, weights, n, out, chunks=panels % 4 + 1)
            np.testing.assert_array_equal(out[FIRST_ROW:-1, :n], together[:count])
            run_product(name, few, weights, n, out, accumulate=True)
            np.testing.assert_array_equal(out[FIRST_ROW:-1, :n], 2 * together[:count])
            out[FIRST_ROW:-1, :n] = MARK
            assert (out == MARK).all()


@pytest.mark.parametrize("name", KINDS)
def test_a_row_has_the_same_bits_in_any_company_and_however_the_work_is_cut(name):
    m, n = 2 * BLOCK_ROWS + 41, 83
    for k in (64, 77, 672):
        rows, weights, _ = example(name, m, k, n)
        together = product(name, rows, weights, n)
        for chunks in (2, 5, 40):
            np.testing.assert_array_equal(product(name, rows, weights, n, chunks=chunks), together)
        for first, end in [(0, 1), (3, 7), (9, 17), (20, 37), (50, 83), (40, 105)]:
            part = product(name, np.ascontiguousarray(rows[first:end]), weights, n)
            np.testing.assert_array_equal(part, together[first:end])


@pytest.mark.parametrize("name", KINDS)
def test_a_neighbour_that_is_not_a_number_harms_nobody(name):
    nan = {2: 0x7FC0, 4: np.nan}
    for k in (33, 64, 95):
        rows, weights, _ = example(name, 36, k, 40)
        alone = product(name, rows, weights, 40)
        for bad in (0, 5, 35):
            company = rows.copy()
            company[bad] = nan[rows.itemsize]
            result = product(name, company, weights, 40)
            kept = np.arange(36) != bad
            np.testing.assert_array_equal(result[kept], alone[kept])
            assert np.isnan(result[bad]).all()
        # What lies behind the last row in memory is nobody's.
        room = np.full(rows.size + 64, nan[rows.itemsize], rows.dtype)
        room[: rows.size] = rows.reshape(-1)
        view = room[: rows.size].reshape(rows.shape)
        np.testing.assert_array_equal(product(name, view, weights, 40), alone)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mprotect of Linux")
@pytest.mark.parametrize("name", KINDS)
def test_nothing_behind_the_last_row_or_weight_is_read(name):
    for m, k, n in [
        (1, 33, 15),
        (9, 64, 16),
        (18, 95, 41),
        (34, 672, 80),
        (1, 95, 203),
        (4, 64, 192),
    ]:
        rows, weights, _ = example(name, m, k, n)
        guarded = before_a_guard_page(rows), before_a_guard_page(weights)
        np.testing.assert_array_equal(product(name, *guarded, n), product(name, rows, weights, n))


def test_packing_keeps_every_bit_and_fills_up_with_zeros():
    random = np.random.default_rng(0)
    for label, element in (("F32", np.uint32), ("F16", np.uint16), ("BF16", np.uint16)):
        n, k = 21, 37
        bits = random.integers(0, np.iinfo(element).max, (n, k), element, endpoint=True)
        out = np.full(packed_float_bytes(label, n, k), 0xFF, np.uint8)
        pack_float_rows(label, bits.view(np.uint8).reshape(n, -1), k, out)
        if label == "BF16":
            pairs = out.view(element).reshape(2, -1, 16, 2)
            turned = pairs.transpose(0, 2, 1, 3).reshape(32, -1)
        else:
            turned = out.view(element).reshape(2, k, 16).transpose(0, 2, 1).reshape(32, k)
        np.testing.assert_array_equal(turned[:n, :k], bits)
        assert not turned[n:].any()
        assert not turned[:, k:].any()


def digests_of(name: str) -> dict[str, tuple[str, float]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.cpu.float_driver", name],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(float_driver.__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


DISTINCT = ("amx", "zen4", "avx2", "generic")
"""Sets whose tiles are not those of another one here."""


def check_that_bits_agree(names):
    """Rows of bfloat16 may differ where a dot product of the processor computes them."""
    with ThreadPoolExecutor(2) as pool:
        results = dict(zip(names, pool.map(digests_of, names), strict=True))
    for name in KINDS:
        sets = names
        if name == "product_bf16_rows":
            sets = [n for n in names if n not in ("amx", "zen4", "avx512_bf16")]
        assert len({results[s][name][0] for s in sets}) == 1, name
        assert all(results[s][name][1] < 1e-4 for s in names), name


@pytest.mark.wide
def test_different_vector_widths_give_the_same_bits():
    check_that_bits_agree([s.name for s in supported_sets() if s.name in DISTINCT])


@pytest.mark.slow
def test_every_instruction_set_gives_the_same_bits():
    check_that_bits_agree([s.name for s in sets_that_run()])


def assembly(weights: str, row: str, sizes: TileSizes, name: str, cpu: str, triple: str) -> str:
    """Return a tile's machine code for another processor."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    chosen = INSTRUCTION_SETS[name]
    module = ir.Module()
    module.triple = triple
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 8)
    function = ir.Function(module, kind, "tile")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    float_tiles(weights, row, sizes, chosen)(builder, *function.args)
    builder.ret_void()
    machine = llvm.Target.from_triple(triple).create_target_machine(
        cpu=cpu, features=chosen.llvm_features, opt=3
    )
    parsed = llvm.parse_assembly(str(module))
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(3))
    passes.getModulePassManager().run(parsed, passes)
    return machine.emit_assembly(parsed)


LINUX = "x86_64-unknown-linux-gnu"


@pytest.mark.parametrize(
    ("weights", "row", "name", "cpu", "triple", "instruction"),
    [
        ("F32", "F32", "neon", "neoverse-n1", "aarch64-unknown-linux-gnu", "fmla"),
        ("BF16", "BF16", "neon", "neoverse-n1", "aarch64-unknown-linux-gnu", "fmla"),
        ("F16", "F32", "neon", "neoverse-n1", "aarch64-unknown-linux-gnu", "fcvtl"),
        ("BF16", "BF16", "avx512_bf16", "x86-64-v4", LINUX, "vdpbf16ps"),
        ("BF16", "BF16", "avx512", "x86-64-v4", LINUX, "vfmadd"),
        ("F16", "F32", "avx2", "x86-64-v3", LINUX, "vcvtph2ps"),
    ],
)
def test_a_tile_is_made_of_the_instruction_its_set_is_named_for(
    weights, row, name, cpu, triple, instruction
):
    code = assembly(weights, row, TileSizes(2, 3, 6), name, cpu, triple)
    assert instruction in code
    assert "call" not in code


@pytest.mark.parametrize("weights", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("name", ["avx2", "avx512"])
def test_sums_of_a_tile_stay_in_registers(weights, name):
    """One that is kept in memory while k runs down makes many rows three times as slow."""
    chosen = INSTRUCTION_SETS[name]
    code = assembly(weights, "F32", tile_sizes(chosen), name, chosen.llvm_cpu, LINUX)
    assert re.search(r"vfmadd\w+\s", code)
    stored = re.findall(r"\s(vmov\w+\s+%[yz]mm\d+, -?\d*\(%rsp\))", code)
    assert len(stored) <= 1  # a mask, or the like
