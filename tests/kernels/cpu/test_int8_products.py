"""Products of int8 rows with quantised weights: right, and the same bits however they are cut."""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from fractions import Fraction
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pytest

from kernels.cpu.int8_packing import INT8_FORMATS
from kernels.cpu.int8_pair_product import PAIR_ROWS, PAIRED_BITS
from kernels.cpu.int8_products import AMX_ROWS
from kernels.cpu.int8_sizes import PAIRS_PRODUCTS, SUMS_BYTES, TILE_PANELS, TILE_ROWS
from kernels.cpu.row_values import LARGEST_INT8
from tests.kernels.cpu import operation_calls
from tests.kernels.cpu.operation_calls import (
    SCALES_AT,
    Float32Array,
    Int8Rows,
    Int64Array,
    UInt8Array,
    decoded_weights,
    packed_weights,
    product,
    quantised,
    random_blocks,
    step_header,
    whole_blocks,
)

Scalar = TypeVar("Scalar", bound=np.generic)

COVERED = ("Q5_1", "Q5_K", "IQ4_NL")
"""Made of what other formats have: fifth bits as Q5_0, scales as Q4_1 and Q4_K; IQ4_XS and Q4_0."""
FORMATS = [
    pytest.param(label, marks=pytest.mark.slow if label in COVERED else ())
    for label in INT8_FORMATS
]
UNTOUCHED = np.float32(-7.25)


def make(label: str, rows: int, n: int, k: int) -> tuple[UInt8Array, UInt8Array, Int8Rows]:
    k = whole_blocks(label, k)
    random = np.random.default_rng(rows * 7919 + n * 31 + k)
    blocks = random_blocks(label, n, k, random)
    x = random.standard_normal((rows, k)).astype(np.float32) * 3
    return blocks, packed_weights(label, blocks, k), quantised(x)


def multiplied(label: str, packed: UInt8Array, rows: Int8Rows, count: int, n: int) -> Float32Array:
    out = np.full((count, n), UNTOUCHED)
    product(label, packed, rows, count, n, out)
    return out


SHAPES = [
    (1, 16, 32), (2, 48, 64), (5, 33, 576), (7, 17, 96), (8, 64, 1536), (15, 80, 64),
    (16, 100, 96), (17, 31, 576), (40, 16, 32), (67, 65, 160),
]  # fmt: skip


@pytest.mark.parametrize("label", FORMATS)
@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
def test_a_product_is_that_of_the_decoded_numbers(label: str, rows: int, n: int, k: int) -> None:
    blocks, packed, x = make(label, rows, n, k)
    out = multiplied(label, packed, x, rows, n)
    weights = decoded_weights(label, blocks)
    exact = x.decoded(rows) @ weights.T
    # Integers are exact: what is rounded are some additions a group, of sums not above these.
    bound = np.abs(x.decoded(rows)) @ np.abs(weights.T)
    assert (np.abs(out - exact) <= 4 * 2.0**-24 * (k // 32 + 2) * bound).all()


@pytest.mark.parametrize("label", FORMATS)
def test_the_largest_numbers_are_multiplied_exactly(label: str) -> None:
    fmt = INT8_FORMATS[label]
    n, k, rows = 32, whole_blocks(label, 64), PAIR_ROWS + 3
    blocks = np.zeros((n, k // fmt.block_elements, fmt.block_bytes), np.uint8)
    most, least = (0xFF, 0x00) if fmt.is_nibbles else (0x80, 0x7F)
    blocks[:16], blocks[16:] = most, least  # 15, 31, 63 and −128; 113 and −127 of IQ4
    if label == "Q6_K":
        blocks[:16, :, 192:208] = blocks[16:, :, 192:208] = 0x80  # s = −128
    for at in SCALES_AT.get(label, (0,)):
        # One and, as m and dmin, zero: sums stay integers.
        number = [1.0 if at == SCALES_AT.get(label, (0,))[0] else 0.0]
        blocks[:, :, at : at + 2] = np.array(number, "<f2").view(np.uint8)
    largest = np.float32(LARGEST_INT8)
    x = np.where(np.arange(rows)[:, None] % 2, -largest, largest)
    x = np.repeat(x, k, axis=1).astype(np.float32)
    out = multiplied(label, packed_weights(label, blocks.reshape(n, -1), k), quantised(x), rows, n)
    assert (out == x.astype(np.float64) @ decoded_weights(label, blocks.reshape(n, -1)).T).all()


def fma(a: float, b: float, c: float) -> np.float32:
    """a · b + c, rounded once, to even where two are as near."""
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    if not exact:
        return np.float32(0)
    unit = Fraction(2) ** (math.frexp(float(exact))[1] - 24)
    return np.float32(float(round(exact / unit) * unit))


def test_where_a_scale_holds_for_half_a_group_the_halves_are_rounded_in_turn() -> None:
    """v = fma(i of the second half, its d, i · d of the first), and the sum fma(v, scale, sum)."""
    rows, n, k = 2, 16, 256
    blocks, packed, x = make("Q6_K", rows, n, k)
    out = multiplied("Q6_K", packed, x, rows, n)
    d = blocks[:, 208:210].view("<f2").astype(np.float64)
    d = d * blocks[:, 192:208].view(np.int8)  # [n, halves]
    weights = decoded_weights("Q6_K", blocks).reshape(n, -1, 16)
    q = np.rint(weights / np.where(d, d, np.inf)[:, :, None])
    integers = np.einsum("nhk,rhk->rnh", q, x.values[:rows].reshape(rows, -1, 16).astype(float))
    for row in range(rows):
        for column in range(n):
            total = np.float32(0)
            for group, scale in enumerate(x.scales[row]):
                v = np.float32(0)
                for half in (2 * group, 2 * group + 1):
                    v = fma(integers[row, column, half], d[column, half], v)
                total = fma(v, scale, total)
            assert out[row, column] == total


@pytest.mark.parametrize("label", FORMATS)
def test_a_row_has_the_same_bits_alone_and_among_any_others(label: str) -> None:
    n, k, rows = 50, 160, 70
    _, packed, x = make(label, rows, n, k)
    together = multiplied(label, packed, x, rows, n)
    for first, end in [(0, 1), (69, 70), (3, 5), (10, 16), (1, 16), (20, 36), (3, 70), (33, 66)]:
        part = multiplied(label, packed, x.rows(first, end), end - first, n)
        assert (part.view(np.int32) == together[first:end].view(np.int32)).all()


@pytest.mark.parametrize("label", FORMATS)
def test_any_few_rows_have_the_bits_that_each_has_alone(label: str) -> None:
    """Tiles have any number of rows up to their largest."""
    n, k, rows = 50, 96, 13
    _, packed, x = make(label, rows, n, k)
    alone = np.concatenate([multiplied(label, packed, x.rows(r, r + 1), 1, n) for r in range(rows)])
    for count in range(2, rows + 1):
        out = multiplied(label, packed, x, count, n)
        assert (out.view(np.int32) == alone[:count].view(np.int32)).all()


@pytest.mark.parametrize("label", FORMATS)
@pytest.mark.parametrize("rows", [1, 5, 10, AMX_ROWS, 21, PAIR_ROWS + 1])
def test_any_cut_into_chunks_in_any_order_gives_the_same_bits(label: str, rows: int) -> None:
    n, k = 150, 96
    _, packed, x = make(label, rows, n, k)
    whole = multiplied(label, packed, x, rows, n)
    for chunks in (range(3), range(6, -1, -1), range(40)):
        out = np.full((rows, n), UNTOUCHED)
        product(label, packed, x, rows, n, out, chunks=chunks)
        assert (out.view(np.int32) == whole.view(np.int32)).all()


@pytest.mark.parametrize("label", FORMATS)
@pytest.mark.parametrize("k", [4096, 8224])
def test_panels_that_go_by_in_several_runs_give_the_same_bits(label: str, k: int) -> None:
    n = 100
    _, packed, x = make(label, PAIR_ROWS + 1, n, k)
    together = multiplied(label, packed, x, PAIR_ROWS + 1, n)
    alone = multiplied(label, packed, x, 3, n)
    assert (together[:3].view(np.int32) == alone.view(np.int32)).all()
    last = multiplied(label, packed, x.rows(PAIR_ROWS - 2, PAIR_ROWS + 1), 3, n)
    assert (together[-3:].view(np.int32) == last.view(np.int32)).all()


@pytest.mark.skipif(not PAIRS_PRODUCTS, reason="the set makes no two products of one")
@pytest.mark.parametrize("label", [f.label for f in INT8_FORMATS.values() if f.bits == PAIRED_BITS])
def test_an_odd_last_panel_is_computed_twice_and_not_beside_one_that_is_not_prepared(
    label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[UInt8Array] = []

    def keep(rows: int, k: int = 32, first: int = 0) -> tuple[Int64Array, UInt8Array]:
        header, scratch = step_header(rows, k, first)
        kept.append(scratch)
        return header, scratch

    n = 3 * 16
    _, packed, x = make(label, PAIR_ROWS, n, 64)
    monkeypatch.setattr(operation_calls, "step_header", keep)
    out = multiplied(label, packed, x, PAIR_ROWS, n)
    (scratch,) = kept
    last = scratch[:SUMS_BYTES].view(np.float32).reshape(TILE_ROWS, TILE_PANELS, 16)
    for panel in range(TILE_PANELS):
        assert (last[:, panel] == out[-TILE_ROWS:, -16:]).all()


@pytest.mark.parametrize("label", FORMATS)
@pytest.mark.parametrize("rows", [AMX_ROWS, 2 * AMX_ROWS, PAIR_ROWS])
@pytest.mark.parametrize("k", [64, 160, 192, 224])
def test_workers_that_walk_forwards_and_backwards_get_the_same_bits(
    label: str, rows: int, k: int
) -> None:
    n = 150
    _, packed, x = make(label, rows, n, k)
    alone = np.concatenate([multiplied(label, packed, x.rows(r, r + 1), 1, n) for r in range(rows)])
    for worker in (0, 1):
        for chunks in (1, 3, 12):
            out = np.full((rows, n), UNTOUCHED)
            product(label, packed, x, rows, n, out, chunks=range(chunks), worker=worker)
            assert (out.view(np.int32) == alone.view(np.int32)).all()


@pytest.mark.parametrize("label", FORMATS)
@pytest.mark.parametrize("n", [1, 15, 17, 47])
@pytest.mark.parametrize("rows", [1, 3, 6, AMX_ROWS, 16, 2 * AMX_ROWS, PAIR_ROWS + 4])
def test_nothing_is_written_outside_the_rows_and_columns(label: str, n: int, rows: int) -> None:
    _, packed, x = make(label, rows, n, 64)
    out = np.full((rows + 5, n + 20), UNTOUCHED)
    product(label, packed, x, rows, n, out, first=2)
    assert (out[2 : rows + 2, :n] == multiplied(label, packed, x, rows, n)).all()
    out[2 : rows + 2, :n] = UNTOUCHED
    assert (out == UNTOUCHED).all()


@pytest.mark.parametrize("label", FORMATS)
@pytest.mark.parametrize("rows", [1, 7, AMX_ROWS, PAIR_ROWS + 2])
def test_sums_are_added_to_what_is_there_after_they_are_whole(label: str, rows: int) -> None:
    n, k = 37, 96
    _, packed, x = make(label, rows, n, k)
    before = np.random.default_rng(1).standard_normal((rows, n)).astype(np.float32)
    out = before.copy()
    product(label, packed, x, rows, n, out, accumulate=True)
    assert (out == before + multiplied(label, packed, x, rows, n)).all()


@pytest.mark.parametrize("label", FORMATS)
@pytest.mark.parametrize("rows", [3, 19, 3 * AMX_ROWS, PAIR_ROWS])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_shows_it_and_harms_no_other(
    label: str, rows: int, bad: float
) -> None:
    n, k, harmed = 33, whole_blocks(label, 64), 2
    random = np.random.default_rng(5)
    packed = packed_weights(label, random_blocks(label, n, k, random), k)
    x = random.standard_normal((rows, k)).astype(np.float32)
    healthy = multiplied(label, packed, quantised(x), rows, n)
    x[harmed, 40] = bad
    out = multiplied(label, packed, quantised(x), rows, n)
    assert np.isnan(out[harmed]).all()
    others = np.arange(rows) != harmed
    assert (out[others] == healthy[others]).all()


def before_a_guard_page(array: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
    """Return a copy that ends where memory ends: reading behind it kills the process."""
    size = -(-array.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = mmap.mmap(-1, size + mmap.PAGESIZE)
    start = np.frombuffer(pages, np.uint8).ctypes.data
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    assert protect(ctypes.c_void_p(start + size), mmap.PAGESIZE, 0) == 0
    copy = np.frombuffer(pages, array.dtype, array.size, size - array.nbytes)
    copy = copy.reshape(array.shape)
    copy[:] = array
    return copy


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mprotect of Linux")
@pytest.mark.parametrize("label", FORMATS)
@pytest.mark.parametrize("rows", [1, 3, 6, 8, AMX_ROWS, 16, 17, PAIR_ROWS + 1])
@pytest.mark.parametrize("k", [96, 256])
def test_nothing_behind_the_last_row_or_weight_is_read(label: str, rows: int, k: int) -> None:
    n = 17 if rows > 6 else 13 * 16 + 1  # few rows go through more panels at once
    _, packed, x = make(label, rows, n, k)
    exact = x.rows(0, rows)
    guarded = Int8Rows(
        before_a_guard_page(exact.values),
        before_a_guard_page(exact.scales),
        before_a_guard_page(exact.scaled_sums),
        before_a_guard_page(exact.sums),
        before_a_guard_page(exact.pair_sums),
        before_a_guard_page(exact.begins),
    )
    out = multiplied(label, before_a_guard_page(packed), guarded, rows, n)
    assert (out == multiplied(label, packed, x, rows, n)).all()


@pytest.mark.slow
@pytest.mark.parametrize("label", FORMATS)
@pytest.mark.parametrize("k", [32, 64, 96, 576, 1536, 4096])
@pytest.mark.parametrize("n", [16, 31, 320])
def test_every_number_of_rows_gives_each_row_its_bits(label: str, k: int, n: int) -> None:
    rows = 67
    _, packed, x = make(label, rows, n, k)
    together = multiplied(label, packed, x, rows, n)
    for count in range(1, rows):
        part = multiplied(label, packed, x.rows(rows - count, rows), count, n)
        assert (part.view(np.int32) == together[rows - count :].view(np.int32)).all()
