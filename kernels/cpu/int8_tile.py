"""The inner tile of products of int8 rows with quantised weights, as LLVM IR.

A tile is R rows of input times P panels of 16 columns (`kernels.cpu.int8_packing`). The sums stay
in registers while k runs down, group by group of 32:

    32 k's:   exact integers    i[r, c]   = Σ_k q_weight[k, c] · q_row[r, k]     (`integer_dot`)
    then:     float32           v         = i · d[c]               rounded once
                                sum[r, c] = fma(v, scale[r], sum)
    with m:                     sum[r, c] = fma(m[c], scaled_sum[r], sum)

where a row's element is q_row · scale and scaled_sum = scale · Σ q_row. Where a weight's scale
holds for 16 k's, v = fma(i of the other 16, d of them, i · d of the first 16). So the bits of an
output depend on its row and its column alone, and are the same on every instruction set. d and m
are exact, of shared scales too (`int8_weights`).

The integer sums begin not at 0 but at the bits of the float BIAS = 1.5 · 2^23: read as a float, the
result is BIAS + i, exactly (|i| < 2^22), and i · d = fma(BIAS + i, d, −BIAS · d), where BIAS · d is
exact as d has 11 bits, or 19 with a shared scale's. That turns the conversion to float and the
product into one instruction.

Where weights are stored greater than they are, sums begin at that much less. What is taken off
belongs to the row, so it stands beside the row, ready (INPUT_BEGINS, of weights 8 greater): to make
it of Σ q of the halves, as formats still do whose groups have two parts, is 6 of 31 instructions a
row of Q4_0 and group, on the ports that multiply.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from numba.core import cgutils

from kernels.cpu.float_sizes import TileSizes
from kernels.cpu.instruction_set import InstructionSet
from kernels.cpu.int8_packing import GROUP, VECTOR_BYTES, Int8Format
from kernels.cpu.int8_unpacking import (
    panel_at,
    unpacked_factors,
    unpacked_tile,
    unpacked_tile_bytes,
    unpacked_weights,
    unpacks_weights,
)
from kernels.cpu.int8_weights import (
    BEGINS_OFFSET,
    BIAS,
    BIAS_BITS,
    PanelFactors,
    fetch_ahead,
    panel_bytes_of,
    panel_factors,
    tile_of,
    weights_of_tiles,
)
from kernels.cpu.integer_dot import Bias, integer_dot
from kernels.cpu.matrix_product import SHARE_BITS
from kernels.cpu.operands import Product
from kernels.cpu.vector_ir import (
    BYTES,
    F32,
    F32X,
    I16,
    I32,
    I32X,
    SECOND_LEVEL,
    Builder,
    Value,
    broadcast,
    constant,
    counted_loop,
    fma,
    i64,
    load,
    offset,
    store,
)

TileEmitter = Callable[..., None]


@dataclass(frozen=True, slots=True)
class RowPlaces:
    """Addresses of one row's values, scales, scaled sums and sums or begins."""

    values: Value
    scales: Value
    scaled_sums: Value
    sums: Value


def int8_tiles(
    fmt: Int8Format, sizes: TileSizes, chosen: InstructionSet, *, is_unpacked: bool = False,
    groups_ahead: int | None = None,
) -> TileEmitter:  # fmt: skip
    """Return an emitter of one tile, whose number of rows is an argument.

    void(rows, x, scales, scaled_sums, sums, groups, weights, second, out, fetch_first,
    fetch_step). rows: at most `sizes.rows`. x, scales, scaled_sums, sums: addresses of the rows'
    parts (`kernels.cpu.matrix_product`; sums: those of `begins_word`). groups: K/32. weights:
    address of the first panel. second: bytes from a panel to the next; 0 where there is but one,
    which is then computed twice. out: the sums, float32 [rows, panels · 16], aligned to 64 bytes.
    fetch_first, fetch_step: of the panels behind these, beside group g are fetched those of group
    (fetch_first + g · fetch_step) / 2^SHARE_BITS. `groups_ahead`: what is fetched instead comes so
    many groups later, behind the last one in the panels behind these. `is_unpacked`: another
    operand behind these is the address of the panels' scales, and of weights with upper bits
    (`int8_unpacking`).
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
            _tile(builder, fmt, count, sizes, chosen, groups_ahead, *operands)
            builder.branch(end)
        builder.position_at_end(end)

    emit.__name__ = f"tiles_{fmt.label}{'_unpacked' if is_unpacked else ''}".lower()
    return emit


def _tile(
    builder: Builder, fmt: Int8Format, rows: int, sizes: TileSizes, chosen: InstructionSet,
    groups_ahead: int | None, x: Value, scales: Value, scaled_sums: Value, sums: Value,
    groups: Value, weights: Value, second: Value, out: Value, fetch_first: Value,
    fetch_step: Value, unpacked: Value | None = None,
) -> None:  # fmt: skip
    """Emit one tile; operands: those of `int8_tiles` from x on."""
    panels = sizes.panels
    depth, beside = builder.mul(groups, i64(GROUP)), builder.mul(groups, i64(4))
    places = [
        RowPlaces(*(
            offset(builder, at, builder.mul(size, i64(r)))
            for at, size in zip((x, scales, scaled_sums, sums), (depth, *[beside] * 3), strict=True)
        ))
        for r in range(rows)
    ]  # fmt: skip
    following = builder.mul(panel_bytes_of(builder, fmt, groups), i64(panels))
    panel_places = [offset(builder, weights, builder.mul(second, i64(p))) for p in range(panels)]
    totals, in_registers = _totals(builder, rows, sizes, out)
    unpacked_panels, size = [], unpacked_tile_bytes(fmt, chosen)
    if unpacked is not None:
        is_pair = builder.icmp_signed("!=", second, i64(0))
        step = builder.select(is_pair, groups, i64(0))
        unpacked_panels = [panel_at(builder, size, unpacked, step, p) for p in range(panels)]
    # Here, not where the variables are made: a tile may stand in a loop.
    for total in chain(*totals):
        builder.store(constant(F32X, 0.0), total)

    above = integer_dot(chosen, fmt).weight_offset

    def body(group: Value) -> None:
        tiles = [tile_of(builder, fmt, at, groups, group) for at in panel_places]
        # Into the second-level cache: of the panels behind these each pass asks for a part.
        if groups_ahead is None:
            shares = builder.add(fetch_first, builder.mul(group, fetch_step))
            fetched, ahead = builder.lshr(shares, i64(SHARE_BITS)), following
        else:
            fetched, ahead = _later(builder, group, groups_ahead, groups, following)
        for at in panel_places:
            tile = tile_of(builder, fmt, at, groups, fetched)
            fetch_ahead(builder, tile, ahead, locality=SECOND_LEVEL)
        right, below = builder.mul(group, i64(GROUP)), builder.mul(group, i64(4))
        values = [offset(builder, row.values, right) for row in places]
        row_sums = [offset(builder, row.sums, below) for row in places]
        unpacked_tiles = [unpacked_tile(builder, size, at, group) for at in unpacked_panels]
        scaled: list[list[Value]] = []
        for part in range(fmt.parts):
            biases = [
                functools.cache(functools.partial(_bias, builder, fmt, chosen, at, part))
                for at in row_sums
            ]
            if unpacked_tiles and unpacks_weights(fmt, chosen):
                weights = unpacked_weights(builder, fmt, unpacked_tiles, part)
            else:
                weights = weights_of_tiles(builder, tiles, part, chosen, above)
            integers = _integer_sums(builder, fmt, chosen, weights, values, biases, panels)
            if unpacked_tiles:
                factors = [unpacked_factors(builder, fmt, at, part) for at in unpacked_tiles]
            else:
                factors = [panel_factors(builder, tile, chosen, part) for tile in tiles]
            if part < fmt.parts - 1:
                scaled = [scaled_by(builder, of_row, factors) for of_row in integers]
                continue
            for r, (row, of_row) in enumerate(zip(places, totals, strict=True)):
                before = scaled[r] if scaled else None
                products = scaled_by(builder, integers[r], factors, before)
                at = [offset(builder, address, below) for address in (row.scales, row.scaled_sums)]
                add_scaled(builder, of_row, products, factors, *at)

    counted_loop(builder, groups, body)
    if not in_registers:
        return
    for index, total in enumerate(chain(*totals)):
        store(builder, builder.load(total), offset(builder, out, VECTOR_BYTES * index))


def _later(
    builder: Builder, group: Value, count: int, groups: Value, following: Value
) -> tuple[Value, Value]:
    """Return which group comes `count` later, and how many bytes on its panels begin."""
    later = builder.add(group, i64(count))
    is_behind = builder.icmp_signed(">=", later, groups)
    of_next = builder.sub(later, groups)
    return (
        builder.select(is_behind, of_next, later),
        builder.select(is_behind, following, i64(0)),
    )


def _totals(
    builder: Builder, rows: int, sizes: TileSizes, out: Value
) -> tuple[list[list[Value]], bool]:
    """Return the float sums of each row and panel, as pointers, and whether registers hold them.

    Others are where they end up, at `out`: they are added to once in a group.
    """
    in_registers = rows * sizes.panels <= sizes.sums

    def place(row: int, panel: int) -> Value:
        if in_registers:
            return cgutils.alloca_once(builder, F32X)
        address = offset(builder, out, VECTOR_BYTES * (row * sizes.panels + panel))
        return builder.inttoptr(address, F32X.as_pointer())

    return [[place(r, p) for p in range(sizes.panels)] for r in range(rows)], in_registers


def scaled_by(
    builder: Builder, biased: list[Value], factors: list[PanelFactors],
    before: list[Value] | None = None,
) -> list[Value]:  # fmt: skip
    """Return i · d of a row and each panel, i being the integer sums without BIAS.

    `before`: what was returned for the first part of the group; it is added.
    """
    numbers = [builder.bitcast(integers, F32X) for integers in biased]
    if before is None:
        pairs = zip(numbers, factors, strict=True)
        return [fma(builder, number, factor.d, factor.bias) for number, factor in pairs]
    # BIAS is subtracted first: additions cost nothing beside multiplications.
    return [
        fma(builder, builder.fsub(number, constant(F32X, BIAS)), factor.d, first)
        for number, factor, first in zip(numbers, factors, before, strict=True)
    ]


def add_scaled(
    builder: Builder, totals: list[Value], products: list[Value], factors: list[PanelFactors],
    scale_at: Value, scaled_sum_at: Value,
) -> None:  # fmt: skip
    """Add what `scaled_by` returned for a group of a row to its variables of each panel."""
    scale = _broadcast_float(builder, scale_at)
    has_minimum = factors[0].m is not None
    scaled_sum = _broadcast_float(builder, scaled_sum_at) if has_minimum else None
    for total, product, factor in zip(totals, products, factors, strict=True):
        added = fma(builder, product, scale, builder.load(total))
        if factor.m is not None:
            added = fma(builder, factor.m, scaled_sum, added)
        builder.store(added, total)


def whole_sum(builder: Builder, sums: Value) -> Value:
    """Return Σ q of a row's group, int32; `sums`: address of those of its halves, int16."""
    first, second = (
        builder.sext(load(builder, offset(builder, sums, at), I16), I32) for at in (0, 2)
    )
    return builder.add(first, second)


def begins_word(fmt: Int8Format) -> Product:
    """Return the word of a product's record from which a format's sums learn where they begin."""
    return Product.INPUT_BEGINS if fmt.parts == 1 else Product.INPUT_SUMS


def _bias(
    builder: Builder, fmt: Int8Format, chosen: InstructionSet, sums: Value, part: int
) -> Value:
    """Return where the integer sums of a row begin, int32 lanes.

    `sums`: address of that for BEGINS_OFFSET; of formats whose groups have parts, of the Σ q. What
    is taken off is a power of 2 times Σ q.
    """
    taken = fmt.offset + integer_dot(chosen, fmt).weight_offset
    if not taken:
        return constant(I32X, BIAS_BITS)
    if fmt.parts == 1:
        begin = broadcast(builder, load(builder, sums, I32))
        times = taken // BEGINS_OFFSET
        if times == 1:
            return begin
        left = constant(I32X, times.bit_length() - 1)
        rest = (1 - times) * BIAS_BITS & 0xFFFFFFFF
        return builder.add(builder.shl(begin, left), constant(I32X, rest))
    # In vectors: shifts cost nothing beside multiplications, and moving a scalar into one does.
    both = broadcast(builder, load(builder, sums, I32))
    if part == 0:
        half = builder.shl(both, constant(I32X, 16))
    else:
        half = builder.and_(both, constant(I32X, 0xFFFF0000))
    right = 16 - (taken.bit_length() - 1)
    return builder.sub(constant(I32X, BIAS_BITS), builder.ashr(half, constant(I32X, right)))


def _integer_sums(
    builder: Builder, fmt: Int8Format, chosen: InstructionSet,
    weights: Iterable[tuple[int, list[Value]]], rows: list[Value], biases: Sequence[Bias],
    panels: int,
) -> list[list[Value]]:  # fmt: skip
    """Return the biased integer sums of a part of a group, of each row and panel.

    `weights`: of each four k's the first and what `weights_of_tiles` has there.
    """
    dot = integer_dot(chosen, fmt)
    sums = [[dot.start(bias) for _ in range(panels)] for bias in biases]
    if chosen.vector_bits != 256:  # there registers do not hold all of them
        weights = list(weights)
    for at, of_tiles in weights:
        prepared = [dot.prepare(builder, w) for w in of_tiles]
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


def _broadcast_float(builder: Builder, address: Value) -> Value:
    return broadcast(builder, load(builder, address, F32))
