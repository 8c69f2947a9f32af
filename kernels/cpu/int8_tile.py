"""The inner tile of products of int8 rows with quantised weights, as LLVM IR.

A tile is R rows of input times P panels of 16 columns (`kernels.cpu.int8_packing`). The sums stay
in registers while k runs down, group by group of 32:

    32 k's:   exact integers    i[r, c]   = Σ_k q_weight[k, c] · q_row[r, k]     (`integer_dot`)
    then:     float32           v         = i · d[c]               rounded once
                                sum[r, c] = fma(v, scale[r], sum)
    Q4_1 also                   sum[r, c] = fma(m[c], scaled_sum[r], sum)

where a row's element is q_row · scale and scaled_sum = scale · Σ q_row. So the bits of an output
depend on its row and its column alone, and are the same on every instruction set.

The integer sums begin not at 0 but at the bits of the float BIAS = 1.5 · 2^23: read as a float, the
result is BIAS + i, exactly (|i| < 2^22), and i · d = fma(BIAS + i, d, −BIAS · d), where BIAS · d is
exact as d has 11 bits. That turns the conversion to float and the product into one instruction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Final

from numba.core import cgutils

from kernels.cpu.float_sizes import TileSizes
from kernels.cpu.float_tile import f16_to_float32
from kernels.cpu.instruction_set import InstructionSet
from kernels.cpu.int8_packing import GROUP, VECTOR_BYTES, Int8Format
from kernels.cpu.integer_dot import integer_dot
from kernels.cpu.vector_ir import (
    BYTES,
    F32,
    F32X,
    I16X,
    I32,
    I32X,
    Builder,
    Value,
    broadcast,
    constant,
    counted_loop,
    fma,
    i64,
    load,
    offset,
    prefetch,
    store,
)

BIAS: Final = 12582912.0
BIAS_BITS: Final = 0x4B400000
SECOND_LEVEL: Final = 2
"""Locality of the prefetch: the panels after these are asked for, into the second-level cache."""

TileEmitter = Callable[..., None]


@dataclass(frozen=True, slots=True)
class RowPlaces:
    """Addresses of one row's values, scales, scaled sums and sums."""

    values: Value
    scales: Value
    scaled_sums: Value
    sums: Value


def int8_tiles(fmt: Int8Format, sizes: TileSizes, chosen: InstructionSet) -> TileEmitter:
    """Return an emitter of one tile, whose number of rows is an argument.

    void(rows, x, scales, scaled_sums, sums, groups, weights, second, out). rows: one of
    `sizes.rows`. x, scales, scaled_sums, sums: addresses of the rows' parts
    (`kernels.cpu.matrix_product`). groups: K/32. weights: address of the first panel. second: bytes
    from a panel to the next; 0 where there is but one, which is then computed twice. out: the
    sums, float32 [rows, panels · 16].
    """

    def emit(builder: Builder, rows: Value, *operands: Value) -> None:
        end = builder.append_basic_block("tile.end")
        one = builder.append_basic_block("tile.rows.1")
        choice = builder.switch(rows, one)
        for count in sizes.rows:
            block = one if count == 1 else builder.append_basic_block(f"tile.rows.{count}")
            if count != 1:
                choice.add_case(i64(count), block)
            builder.position_at_end(block)
            _tile(builder, fmt, count, sizes.panels, chosen, operands)
            builder.branch(end)
        builder.position_at_end(end)

    emit.__name__ = f"tiles_{fmt.label}".lower()
    return emit


def _tile(
    builder: Builder, fmt: Int8Format, rows: int, panels: int, chosen: InstructionSet,
    operands: tuple[Value, ...],
) -> None:  # fmt: skip
    """Emit one tile; `operands`: those of `int8_tiles` from x on."""
    x, scales, scaled_sums, sums, groups, weights, second, out = operands
    depth, beside = builder.mul(groups, i64(GROUP)), builder.mul(groups, i64(4))
    places = [
        RowPlaces(*(
            offset(builder, at, builder.mul(size, i64(r)))
            for at, size in zip((x, scales, scaled_sums, sums), (depth, *[beside] * 3), strict=True)
        ))
        for r in range(rows)
    ]  # fmt: skip
    following = builder.mul(groups, i64(panels * fmt.tile_bytes))
    panel_at = [offset(builder, weights, builder.mul(second, i64(p))) for p in range(panels)]
    totals = [[cgutils.alloca_once(builder, F32X) for _ in range(panels)] for _ in range(rows)]
    # Here, not where the variables are made: a tile may stand in a loop.
    for total in chain(*totals):
        builder.store(constant(F32X, 0.0), total)

    def body(group: Value) -> None:
        down = builder.mul(group, i64(fmt.tile_bytes))
        tiles = [offset(builder, at, down) for at in panel_at]
        for tile in tiles:
            for line in range(0, fmt.tile_bytes, VECTOR_BYTES):
                prefetch(builder, offset(builder, tile, following, line), SECOND_LEVEL)
        right, below = builder.mul(group, i64(GROUP)), builder.mul(group, i64(4))
        values = [offset(builder, row.values, right) for row in places]
        biases = [_bias(builder, fmt, chosen, offset(builder, row.sums, below)) for row in places]
        integers = _integer_sums(builder, fmt, chosen, tiles, values, biases)
        factors = [panel_factors(builder, fmt, chosen, tile) for tile in tiles]
        for row, of_row, sums_of_row in zip(places, totals, integers, strict=True):
            scales = [offset(builder, at, below) for at in (row.scales, row.scaled_sums)]
            add_scaled(builder, of_row, sums_of_row, factors, *scales)

    counted_loop(builder, groups, body)
    for index, total in enumerate(chain(*totals)):
        store(builder, builder.load(total), offset(builder, out, VECTOR_BYTES * index))


def add_scaled(
    builder: Builder, totals: list[Value], biased: list[Value], factors: list[PanelFactors],
    scale_at: Value, scaled_sum_at: Value,
) -> None:  # fmt: skip
    """Add a group's integer sums of a row, BIAS and all, to its variables of each panel."""
    scale = _broadcast_float(builder, scale_at)
    has_minimum = factors[0].m is not None
    scaled_sum = _broadcast_float(builder, scaled_sum_at) if has_minimum else None
    for total, integers, factor in zip(totals, biased, factors, strict=True):
        product = fma(builder, builder.bitcast(integers, F32X), factor.d, factor.bias)
        added = fma(builder, product, scale, builder.load(total))
        if factor.m is not None:
            added = fma(builder, factor.m, scaled_sum, added)
        builder.store(added, total)


@dataclass(frozen=True, slots=True)
class PanelFactors:
    """What a group's sums of a panel are multiplied with: d, −BIAS · d and m (None without)."""

    d: Value
    bias: Value
    m: Value | None


def panel_factors(
    builder: Builder, fmt: Int8Format, chosen: InstructionSet, tile: Value
) -> PanelFactors:
    """Load a tile's scales and minima as float32."""

    def widened(at: int) -> Value:
        return f16_to_float32(builder, load(builder, offset(builder, tile, at), I16X), chosen)

    d = widened(fmt.scales_at)
    bias = builder.fmul(d, constant(F32X, -BIAS))
    return PanelFactors(d, bias, widened(fmt.minima_at) if fmt.has_minimum else None)


def _bias(builder: Builder, fmt: Int8Format, chosen: InstructionSet, sums: Value) -> Value:
    """Return where the integer sums of a row begin, int32 lanes; `sums`: address of its Σ q."""
    taken = fmt.offset + integer_dot(chosen, is_nibbles=fmt.is_nibbles).weight_offset
    if not taken:
        return constant(I32X, BIAS_BITS)
    total = builder.mul(load(builder, sums, I32), I32(taken))
    return broadcast(builder, builder.sub(I32(BIAS_BITS), total))


def _integer_sums(
    builder: Builder, fmt: Int8Format, chosen: InstructionSet, tiles: list[Value],
    rows: list[Value], biases: list[Value],
) -> list[list[Value]]:  # fmt: skip
    """Return the biased integer sums of a group, of each row and panel."""
    dot = integer_dot(chosen, is_nibbles=fmt.is_nibbles)
    sums = [[dot.start(builder, bias) for _ in tiles] for bias in biases]
    for v in range(fmt.num_vectors):
        stored = [load(builder, offset(builder, tile, VECTOR_BYTES * v), BYTES) for tile in tiles]
        for at, weights in weights_of_vector(builder, fmt, v, stored):
            prepared = [dot.prepare(builder, w) for w in weights]
            for row, of_row in zip(rows, sums, strict=True):
                word = broadcast(builder, load(builder, offset(builder, row, at), I32))
                four = builder.bitcast(word, BYTES)
                of_row[:] = [
                    dot.step(builder, s, w, four) for s, w in zip(of_row, prepared, strict=True)
                ]
    return [
        [dot.finish(builder, s, bias) for s in of_row]
        for of_row, bias in zip(sums, biases, strict=True)
    ]


def weights_of_vector(
    builder: Builder, fmt: Int8Format, index: int, stored: list[Value]
) -> list[tuple[int, list[Value]]]:
    """Return the first k of each four, and their weights, that vector `index` of a tile holds."""
    if not fmt.is_nibbles:
        return [(4 * index, stored)]
    fifteen = constant(BYTES, 15)
    low = [builder.and_(s, fifteen) for s in stored]
    # There is no shift of bytes: of wider lanes, and what comes in from above is masked.
    shifted = [builder.lshr(builder.bitcast(s, I32X), constant(I32X, 4)) for s in stored]
    high = [builder.and_(builder.bitcast(s, BYTES), fifteen) for s in shifted]
    return [(4 * index, low), (GROUP // 2 + 4 * index, high)]


def _broadcast_float(builder: Builder, address: Value) -> Value:
    return broadcast(builder, load(builder, address, F32))
