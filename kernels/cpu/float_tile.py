"""The inner tile of products with floating-point weights, as LLVM IR.

A tile is R rows of input times P panels of 16 columns (`kernels.cpu.float_packing`), summed over
all k in registers, a few panels after the other where there are few registers:

                     panel 0        …  panel P − 1
      k ↓           │ w: 16 lanes │    │ w: 16 lanes │      loaded once a k
    row 0     x ──▶ │ += x · w    │    │ += x · w    │
    …               │             │    │             │      R · P accumulators
    row R − 1 x ──▶ │ += x · w    │    │ += x · w    │

Every output has one accumulator, and k ascends: so its bits depend on its row and its column, and
on nothing else: not on R or P, and, as a fused multiply-add rounds once on every processor, not on
the instruction set. The chain of additions costs nothing: a fused multiply-add takes 4 cycles, two
start in a cycle, and a tile has 8 or more chains; with one row the tile waits for memory anyway.

VDPBF16PS multiplies pairs of bfloat16 and sums them in an order and rounding of its own: rows of
bfloat16 have other bits on processors that have it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Final

from llvmlite import ir
from numba.core import cgutils

from kernels.cpu.float_packing import PANEL_COLUMNS
from kernels.cpu.float_sizes import TileSizes
from kernels.cpu.instruction_set import InstructionSet
from kernels.cpu.vector_ir import (
    BF16_PAIRS,
    F16X,
    F32,
    F32X,
    I16,
    I16X,
    I32,
    I32X,
    SECOND_LEVEL,
    Builder,
    Value,
    bf16_high,
    bf16_low,
    broadcast,
    call,
    constant,
    counted_loop,
    fma,
    i64,
    load,
    offset,
    prefetch,
    store,
)

VECTOR_BYTES: Final = 64
ROW_BYTES: Final = {"F32": 4, "BF16": 2}
TileEmitter = Callable[..., None]


def float_tiles(
    weights: str, row: str, sizes: TileSizes, chosen: InstructionSet, *,
    lines_ahead: int | None = None,
) -> TileEmitter:  # fmt: skip
    """Return an emitter of void(rows, x, row_stride, k, weights, panel_stride, last_panel, out).

    rows: of this tile, `sizes.rows` at most. `weights`: F32, F16 or BF16; `row`: F32 or BF16, what
    x holds (BF16 needs BF16 weights). x: address of the rows, k elements each, row_stride bytes
    apart. weights: address of the first panel; panels lie panel_stride bytes apart; of
    `sizes.panels` of them those above last_panel do not exist and are read as last_panel. out: the
    sums, float32 [rows, panels · 16]. `lines_ahead`: of each panel what lies so many cache lines
    ahead is fetched into the second-level cache.
    """

    def emit(builder: Builder, rows: Value, *operands: Value) -> None:
        end = builder.append_basic_block("tile.end")
        one = builder.append_basic_block("tile.rows.1")
        choice = builder.switch(rows, one)
        for count in range(sizes.rows, 0, -1):
            block = one if count == 1 else builder.append_basic_block(f"tile.rows.{count}")
            if count != 1:
                choice.add_case(i64(count), block)
            builder.position_at_end(block)
            at_once = sizes.panels_at_once(count)
            for p in range(0, sizes.panels, at_once):
                some = range(p, min(p + at_once, sizes.panels))
                _panels(
                    builder, weights, row, count, some, sizes.panels, chosen, lines_ahead, operands
                )
            builder.branch(end)
        builder.position_at_end(end)

    emit.__name__ = f"tiles_{weights}_{row}".lower()
    return emit


def _panels(
    builder: Builder, weights: str, row: str, rows: int, panels: range, of_tile: int,
    chosen: InstructionSet, lines_ahead: int | None, operands: tuple[Value, ...],
) -> None:  # fmt: skip
    """Emit some of a tile's `of_tile` panels; `operands`: those of `float_tiles` from x on."""
    x, row_stride, k, first, panel_stride, last_panel, out = operands
    sums = [[cgutils.alloca_once(builder, F32X) for _ in panels] for _ in range(rows)]
    row_at = [offset(builder, x, builder.mul(row_stride, i64(r))) for r in range(rows)]
    panel_at = [
        offset(builder, first, builder.mul(panel_stride, _at_most(builder, p, last_panel)))
        for p in panels
    ]
    # Here, not where the variables are made: a tile may stand in a loop.
    for accumulator in chain(*sums):
        builder.store(constant(F32X, 0.0), accumulator)
    if weights == "BF16":
        step = _dot_pairs if row == "BF16" and chosen.has_bf16_dot else _multiply_pairs
        _sum_over_pairs(builder, step, row, k, row_at, panel_at, sums, lines_ahead)
    else:
        _sum_over_k(builder, weights, k, row_at, panel_at, sums, chosen, lines_ahead)
    for r, of_row in enumerate(sums):
        for p, accumulator in zip(panels, of_row, strict=True):
            at = VECTOR_BYTES * (r * of_tile + p)
            store(builder, builder.load(accumulator), offset(builder, out, at))


def _at_most(builder: Builder, index: int, last: Value) -> Value:
    return builder.select(builder.icmp_signed("<", i64(index), last), i64(index), last)


def _sum_over_k(
    builder: Builder, weights: str, k: Value, row_at: list[Value], panel_at: list[Value],
    sums: list[list[Value]], chosen: InstructionSet, lines_ahead: int | None,
) -> None:  # fmt: skip
    """Add x[k] · w[k] for all k; weights F32 or F16."""
    vector_bytes = PANEL_COLUMNS * (4 if weights == "F32" else 2)

    def body(index: Value) -> None:
        down = builder.mul(index, i64(vector_bytes))
        _fetch(builder, panel_at, down, lines_ahead)
        vectors = []
        for panel in panel_at:
            place = offset(builder, panel, down)
            if weights == "F32":
                vectors.append(load(builder, place, F32X))
            else:
                vectors.append(f16_to_float32(builder, load(builder, place, I16X), chosen))
        right = builder.mul(index, i64(ROW_BYTES["F32"]))
        for at, accumulators in zip(row_at, sums, strict=True):
            x = broadcast(builder, load(builder, offset(builder, at, right), F32))
            _multiply_add(builder, x, vectors, accumulators)

    counted_loop(builder, k, body)


def _sum_over_pairs(
    builder: Builder, step: Callable[..., None], row: str, k: Value,
    row_at: list[Value], panel_at: list[Value], sums: list[list[Value]], lines_ahead: int | None,
) -> None:  # fmt: skip
    """Add the products of all whole pairs of k, and of the half pair at the end if k is odd."""

    def body(index: Value, *, is_half: bool = False) -> None:
        down = builder.mul(index, i64(VECTOR_BYTES))
        _fetch(builder, panel_at, down, None if is_half else lines_ahead)
        pairs = [load(builder, offset(builder, panel, down), I32X) for panel in panel_at]
        right = builder.mul(index, i64(2 * ROW_BYTES[row]))
        places = [offset(builder, at, right) for at in row_at]
        step(builder, row, places, pairs, sums, is_half=is_half)

    num_pairs = builder.lshr(k, i64(1))
    counted_loop(builder, num_pairs, body)
    with builder.if_then(builder.trunc(k, ir.IntType(1)), likely=False):
        body(num_pairs, is_half=True)


def _fetch(builder: Builder, panels: list[Value], down: Value, lines_ahead: int | None) -> None:
    if lines_ahead is not None:
        for panel in panels:
            at = offset(builder, panel, down, VECTOR_BYTES * lines_ahead)
            prefetch(builder, at, SECOND_LEVEL)


def _multiply_pairs(
    builder: Builder, row: str, places: list[Value], pairs: list[Value],
    sums: list[list[Value]], *, is_half: bool,
) -> None:  # fmt: skip
    """Add both products of a pair, one after the other, in float32."""
    halves = [bf16_low] if is_half else [bf16_low, bf16_high]
    if row == "BF16":
        row_pairs = [_broadcast_pair(builder, at, is_half=is_half) for at in places]
    for half, widened in enumerate(halves):
        vectors = [widened(builder, pair) for pair in pairs]
        for r, accumulators in enumerate(sums):
            if row == "BF16":
                x = widened(builder, row_pairs[r])
            else:
                place = offset(builder, places[r], half * ROW_BYTES["F32"])
                x = broadcast(builder, load(builder, place, F32))
            _multiply_add(builder, x, vectors, accumulators)


def _dot_pairs(
    builder: Builder, row: str, places: list[Value], pairs: list[Value],
    sums: list[list[Value]], *, is_half: bool,
) -> None:  # fmt: skip
    """Add the dot products of pairs of bfloat16: VDPBF16PS. Behind the last k stands zero."""
    operands = [builder.bitcast(pair, BF16_PAIRS) for pair in pairs]
    for at, accumulators in zip(places, sums, strict=True):
        x = builder.bitcast(_broadcast_pair(builder, at, is_half=is_half), BF16_PAIRS)
        for accumulator, operand in zip(accumulators, operands, strict=True):
            arguments = [builder.load(accumulator), operand, x]
            total = call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", F32X, arguments)
            builder.store(total, accumulator)


def _broadcast_pair(builder: Builder, place: Value, *, is_half: bool) -> Value:
    """Return a row's next two bfloat16 in every lane; behind a half pair nothing is read."""
    if is_half:
        return broadcast(builder, builder.zext(load(builder, place, I16), I32))
    return broadcast(builder, load(builder, place, I32))


def _multiply_add(
    builder: Builder, x: Value, vectors: list[Value], accumulators: list[Value]
) -> None:
    for accumulator, vector in zip(accumulators, vectors, strict=True):
        builder.store(fma(builder, x, vector, builder.load(accumulator)), accumulator)


def f16_to_float32(builder: Builder, bits: Value, chosen: InstructionSet) -> Value:
    """Return finite float16 lanes, given as int16, as float32; exact on every processor.

    Without an instruction for it: exponent and fraction, moved to their places in a float32, are
    the value times 2^-112 (a subnormal float16 becomes a subnormal float32), then the sign.
    """
    if chosen.name != "generic":
        return builder.fpext(builder.bitcast(bits, F16X), F32X)
    wide = builder.zext(bits, I32X)
    magnitude = builder.shl(builder.and_(wide, constant(I32X, 0x7FFF)), constant(I32X, 13))
    scaled = builder.fmul(builder.bitcast(magnitude, F32X), constant(F32X, 2.0**112))
    sign = builder.shl(builder.and_(wide, constant(I32X, 0x8000)), constant(I32X, 16))
    return builder.bitcast(builder.or_(builder.bitcast(scaled, I32X), sign), F32X)
