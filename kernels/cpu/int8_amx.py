"""Products of int8 rows with quantised weights in the AMX tile registers, for many rows.

TDPBSSD multiplies a tile of 16 rows × 32 k's with one of 32 k's × 16 columns in 16 cycles, where
VPDPBUSD takes 64. What bounds the product then is the float arithmetic behind the integers, which
every group of 32 k's needs for every output (`kernels.cpu.int8_tile`, and the same here, operation
for operation, so the bits are equal).

A panel is first unpacked, once for all rows, a *slot* a group of 32 k's:

    slot    │ 8 vectors of 64 int8: a tile register │ d │ −BIAS · d │ (m) │    float32 of 16 columns

Then the rows go by in blocks of 16, each through all groups: that is the sequence of *units*, one
tile product and its 16 vectors of float arithmetic each. The integers travel through a ring of four
tiles, so that tile registers and vectors work side by side and nobody waits for a store:

    unit u + 3   rows, weights ──▶ TDPBSSD ──▶ a tile register      takes 52 cycles
    unit u + 2   the other tile register ──▶ ring                   is committed in a unit or two
    unit u       ring ──▶ + BIAS ──▶ · d ──▶ · scale, summed in 16 registers over all groups

While tiles are in use, multiplications start at one a cycle, not two; additions still at two. So
what needs no integers, Σ m · scaled_sum, is made beforehand, for all rows of the panel.

Cycles of a unit at 256 rows, K = 576, Q4_1, beside 2 multiplications of 16 vectors = 32:
    weights, then rows in blocks of groups, tiles and vectors by turns        110
    the same, side by side                                                    see `int8_products`
"""

from __future__ import annotations

from typing import Any, Final

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils

from kernels.cpu.emitted import emitted
from kernels.cpu.instruction_set import selected_instruction_set
from kernels.cpu.int8_packing import GROUP, PANEL_COLUMNS, VECTOR_BYTES, Int8Format
from kernels.cpu.int8_tile import BIAS_BITS, panel_factors, panel_minima, weights_of_vector
from kernels.cpu.matrix_product import emit_sums
from kernels.cpu.vector_ir import (
    BYTES,
    F32X,
    I8,
    I16,
    I32X,
    I64,
    VOID,
    Builder,
    Value,
    call,
    constant,
    counted_loop,
    fma,
    i64,
    load,
    offset,
    store,
)

BLOCK_ROWS: Final = 16
TILE_BYTES: Final = GROUP * PANEL_COLUMNS
BLOCK_BYTES: Final = BLOCK_ROWS * VECTOR_BYTES
"""Of the integers, or the float sums, of a block of rows and a panel."""
RING_BLOCKS: Final = 4
AHEAD: Final = 3

SUMS, ROWS, WEIGHTS = 0, 2, 4
"""Tile registers: integers, rows and weights of every other unit."""
NUM_REGISTERS: Final = 6
PALETTE: Final = 1
CONFIGURATION_BYTES: Final = 64
COLUMNS_AT: Final = 16
ROWS_AT: Final = 48
"""The configuration: byte 0 the palette, from 16 the bytes of a row of each register (uint16), from
48 the rows of each register (uint8)."""

_POINTER: Final = I8.as_pointer()

llvmlite.binding.initialize_native_asmparser()


def slot_bytes(fmt: Int8Format) -> int:
    """Return the bytes of the unpacked weights of a group."""
    return TILE_BYTES + (3 if fmt.has_minimum else 2) * VECTOR_BYTES


def _register(number: int) -> ir.Constant:
    return ir.Constant(I8, number)


@emitted(types.void)
def configure_tiles(builder: Builder) -> None:
    """Set up this thread's tile registers: 16 rows of 32 bytes times 8 rows of 64 bytes."""
    memory = cgutils.alloca_once(builder, ir.ArrayType(I8, CONFIGURATION_BYTES))
    builder.store(ir.Constant(memory.type.pointee, None), memory)
    address = builder.ptrtoint(memory, I64)
    store(builder, ir.Constant(I8, PALETTE), address)
    shapes = {SUMS: (BLOCK_ROWS, VECTOR_BYTES), ROWS: (BLOCK_ROWS, GROUP)}
    shapes[WEIGHTS] = (GROUP // 4, VECTOR_BYTES)
    for first, (rows, row_bytes) in shapes.items():
        for number in (first, first + 1):
            place = offset(builder, address, COLUMNS_AT + 2 * number)
            store(builder, ir.Constant(I16, row_bytes), place)
            store(builder, ir.Constant(I8, rows), offset(builder, address, ROWS_AT + number))
    call(builder, "llvm.x86.ldtilecfg", VOID, [builder.inttoptr(address, _POINTER)])


@emitted(types.void)
def release_tiles(builder: Builder) -> None:
    """Give up the tile registers, so that the system need not save them."""
    call(builder, "llvm.x86.tilerelease", VOID, [])


def unpacker(fmt: Int8Format) -> Any:  # noqa: ANN401 - Numba's objects
    """Return void(panel, groups, slots): unpack a panel into slots."""

    def unpack(builder: Builder, panel: Value, groups: Value, slots: Value) -> None:
        chosen = selected_instruction_set()

        def body(group: Value) -> None:
            tile = offset(builder, panel, builder.mul(group, i64(fmt.tile_bytes)))
            slot = offset(builder, slots, builder.mul(group, i64(slot_bytes(fmt))))
            for v in range(fmt.num_vectors):
                stored = load(builder, offset(builder, tile, VECTOR_BYTES * v), BYTES)
                for k, unpacked in weights_of_vector(builder, fmt, v, [stored]):
                    signed = builder.sub(unpacked[0], constant(BYTES, fmt.offset))
                    store(builder, signed, offset(builder, slot, k * PANEL_COLUMNS))
            factors = panel_factors(builder, fmt, chosen, tile)
            vectors = [factors.d, factors.bias]
            if fmt.has_minimum:
                vectors.append(panel_minima(builder, fmt, chosen, tile))
            for i, vector in enumerate(vectors):
                store(builder, vector, offset(builder, slot, TILE_BYTES + VECTOR_BYTES * i))

        counted_loop(builder, groups, body)

    return emitted(types.void, *[types.int64] * 3)(unpack)


class RowBroadcasts:
    """Float32 of 16 rows, `stride` bytes apart, each in all lanes.

    The addresses are base + stride · row with four multiples of the stride and the processor's
    factors 1, 2 and 4, in assembly: LLVM would keep an address a row, more than there are registers.
    """

    FACTORS: Final = ((0, 1), (1, 1), (1, 2), (3, 1), (1, 4), (5, 1), (3, 2), (7, 1))
    """Row r of a half is at multiple · factor strides."""

    def __init__(self, builder: Builder, stride: Value) -> None:
        self.strides = {n: builder.mul(stride, i64(n)) for n in (1, 3, 5, 7)}
        self.half = builder.shl(stride, i64(3))

    def load(self, builder: Builder, base: Value) -> list[Value]:
        """Return the floats of the 16 rows from `base` on."""
        vectors = []
        for half in (base, builder.add(base, self.half)):
            for multiple, factor in self.FACTORS:
                if multiple:
                    kind = ir.FunctionType(F32X, [I64, I64])
                    text, constraint = f"vbroadcastss ($1,$2,{factor}), $0", "=v,r,r"
                    operands = [half, self.strides[multiple]]
                else:
                    kind = ir.FunctionType(F32X, [I64])
                    text, constraint, operands = "vbroadcastss ($1), $0", "=v,r", [half]
                vector = builder.asm(kind, text, constraint, operands, False)
                vector.attributes.add("readonly")
                vectors.append(vector)
        return vectors


def _add_product(builder: Builder, total: Value, x: Value, y: Value) -> Value:
    """Return fma(x, y, total) in the register of total.

    LLVM would take the register of x, and so have 16 sums to move, and some to spill, every turn.
    """
    kind = ir.FunctionType(F32X, [F32X, F32X, F32X])
    added = builder.asm(kind, "vfmadd231ps $3, $2, $0", "=v,0,v,v", [total, x, y], False)
    added.attributes.add("readnone")
    return added


def minima_maker(fmt: Int8Format) -> Any:  # noqa: ANN401 - Numba's objects
    """Return void(slots, groups, scaled_sums, last, whole, blocks, out): Σ m · scaled_sum.

    scaled_sums: float32 [rows, groups] of `whole` blocks of 16 rows, last: of one more, if `blocks`
    is larger. out: float32 [blocks, 16, 16].
    """

    def make_minima(
        builder: Builder, slots: Value, groups: Value, scaled_sums: Value, last: Value,
        whole: Value, blocks: Value, out: Value,
    ) -> None:  # fmt: skip
        row_bytes = builder.shl(groups, i64(2))
        broadcasts = RowBroadcasts(builder, row_bytes)
        sums = [cgutils.alloca_once(builder, F32X) for _ in range(BLOCK_ROWS)]

        def make_block(block: Value) -> None:
            rows = _of_block(builder, block, whole, scaled_sums, row_bytes, last)
            for total in sums:
                builder.store(constant(F32X, 0.0), total)

            def body(group: Value) -> None:
                m_at = offset(builder, slots, builder.mul(group, i64(slot_bytes(fmt))))
                m = load(builder, offset(builder, m_at, TILE_BYTES + 2 * VECTOR_BYTES), F32X)
                here = offset(builder, rows, builder.shl(group, i64(2)))
                for total, scaled_sum in zip(sums, broadcasts.load(builder, here), strict=True):
                    added = _add_product(builder, builder.load(total), m, scaled_sum)
                    builder.store(added, total)

            counted_loop(builder, groups, body)
            place = offset(builder, out, builder.mul(block, i64(BLOCK_BYTES)))
            for r, total in enumerate(sums):
                store(builder, builder.load(total), offset(builder, place, r * VECTOR_BYTES))

        counted_loop(builder, blocks, make_block)

    return emitted(types.void, *[types.int64] * 7)(make_minima)


def _of_block(
    builder: Builder, block: Value, whole: Value, first: Value, row_bytes: Value, last: Value
) -> Value:
    """Return the address of a block of rows: behind the whole ones, `last`."""
    down = builder.mul(block, builder.mul(row_bytes, i64(BLOCK_ROWS)))
    is_whole = builder.icmp_signed("<", block, whole)
    return builder.select(is_whole, builder.add(first, down), last)


class _Walk:
    """A place in the sequence of units: a block, a group, and the addresses that go with them."""

    def __init__(self, builder: Builder, groups: Value, blocks: Value) -> None:
        self.groups, self.blocks = groups, blocks
        self.block, self.group = (cgutils.alloca_once(builder, I64) for _ in range(2))
        for place in (self.block, self.group):
            builder.store(i64(0), place)

    def at(self, builder: Builder) -> tuple[Value, Value]:
        """Return block and group."""
        return builder.load(self.block), builder.load(self.group)

    def go_on(self, builder: Builder) -> None:
        """Go to the next unit; from the last to the first, which is made again for nobody."""
        group = builder.add(builder.load(self.group), i64(1))
        is_end = builder.icmp_signed("==", group, self.groups)
        builder.store(builder.select(is_end, i64(0), group), self.group)
        with builder.if_then(is_end, likely=False):
            block = builder.add(builder.load(self.block), i64(1))
            is_over = builder.icmp_signed("==", block, self.blocks)
            builder.store(builder.select(is_over, i64(0), block), self.block)


def panel_multiplier(fmt: Int8Format) -> Any:  # noqa: ANN401 - Numba's objects
    """Return what multiplies all rows with an unpacked panel.

    void(slots, groups, x, last_x, scales, last_scales, num_rows, minima, ring, totals, out, stride,
    columns, accumulate). x, scales: of whole blocks of 16 rows; last_…: of one more, filled up with
    zeros, if num_rows is no multiple of 16. minima: what a minima maker wrote. ring, totals: scratch
    memory, RING_BLOCKS and 1 times BLOCK_BYTES. out, stride, columns, accumulate: as in
    `kernels.cpu.matrix_product.emit_sums`.
    """

    def multiply(builder: Builder, *operands: Value) -> None:
        slots, groups, x, last_x, scales, last_scales, num_rows, minima = operands[:8]
        ring, totals, out, stride, columns, accumulate = operands[8:]
        whole = builder.lshr(num_rows, i64(4))
        blocks = builder.lshr(builder.add(num_rows, i64(BLOCK_ROWS - 1)), i64(4))
        k, row_bytes = builder.mul(groups, i64(GROUP)), builder.shl(groups, i64(2))
        broadcasts = RowBroadcasts(builder, row_bytes)
        made, added = (_Walk(builder, groups, blocks) for _ in range(2))
        sums = [cgutils.alloca_once(builder, F32X) for _ in range(BLOCK_ROWS)]

        def clear() -> None:
            for total in sums:
                builder.store(constant(F32X, 0.0), total)

        def slot_of(group: Value) -> Value:
            return offset(builder, slots, builder.mul(group, i64(slot_bytes(fmt))))

        def of_ring(unit: Value) -> Value:
            index = builder.and_(unit, i64(RING_BLOCKS - 1))
            return offset(builder, ring, builder.mul(index, i64(BLOCK_BYTES)))

        def make(turn: int) -> None:
            """Emit the next tile product, into register SUMS + turn."""
            block, group = made.at(builder)
            rows = _of_block(builder, block, whole, x, k, last_x)
            rows = offset(builder, rows, builder.mul(group, i64(GROUP)))
            registers = [_register(first + turn) for first in (SUMS, ROWS, WEIGHTS)]
            _load_tile(builder, registers[1], rows, k)
            _load_tile(builder, registers[2], slot_of(group), i64(VECTOR_BYTES))
            call(builder, "llvm.x86.tilezero", VOID, registers[:1])
            call(builder, "llvm.x86.tdpbssd", VOID, registers)
            made.go_on(builder)

        def put(turn: int, unit: Value) -> None:
            """Emit the store of register SUMS + turn into the ring."""
            place = builder.inttoptr(of_ring(unit), _POINTER)
            operands = [_register(SUMS + turn), place, i64(VECTOR_BYTES)]
            call(builder, "llvm.x86.tilestored64", VOID, operands)

        def add(unit: Value) -> None:
            """Emit the float arithmetic of a unit, and behind the last group the way out."""
            block, group = added.at(builder)
            slot, integers = slot_of(group), (of_ring(unit) if not __import__('os').environ.get('RFIX') else offset(builder, totals, 0))
            d, bias = (
                load(builder, offset(builder, slot, TILE_BYTES + VECTOR_BYTES * i), F32X)
                for i in range(2)
            )
            rows = _of_block(builder, block, whole, scales, row_bytes, last_scales)
            rows = offset(builder, rows, builder.shl(group, i64(2)))
            row_scales = broadcasts.load(builder, rows)
            for r, (total, scale) in enumerate(zip(sums, row_scales, strict=True)):
                integer = load(builder, offset(builder, integers, r * VECTOR_BYTES), I32X)
                biased = builder.bitcast(builder.add(integer, constant(I32X, BIAS_BITS)), F32X)
                product = fma(builder, biased, d, bias)
                builder.store(_add_product(builder, builder.load(total), product, scale), total)
            added.go_on(builder)
            is_end = builder.icmp_signed("==", builder.add(group, i64(1)), groups)
            with builder.if_then(is_end, likely=False):
                write_out(block)
                clear()

        def write_out(block: Value) -> None:
            below = builder.mul(block, i64(BLOCK_BYTES))
            for r, place in enumerate(sums):
                total = builder.load(place)
                if fmt.has_minimum:
                    rest = load(builder, offset(builder, minima, below, r * VECTOR_BYTES), F32X)
                    total = builder.fadd(total, rest)
                store(builder, total, offset(builder, totals, r * VECTOR_BYTES))
            row = builder.shl(block, i64(4))
            left = builder.sub(num_rows, row)
            is_whole = builder.icmp_signed(">", left, i64(BLOCK_ROWS))
            rows = builder.select(is_whole, i64(BLOCK_ROWS), left)
            target = offset(builder, out, builder.shl(builder.mul(row, stride), i64(2)))
            emit_sums(builder, 1, totals, rows, columns, target, stride, accumulate)

        clear()
        make(0)
        make(1)
        put(0, i64(0))
        make(0)
        put(1, i64(1))

        def step(unit: Value, turn: int) -> None:
            put(turn, builder.add(unit, i64(AHEAD - 1)))
            make(1 - turn)
            add(unit)

        def two_units(unit: Value) -> None:
            step(unit, 0)
            step(builder.add(unit, i64(1)), 1)

        units = builder.mul(groups, blocks)
        even = builder.and_(units, i64(-2))
        counted_loop(builder, even, two_units, step=2)
        with builder.if_then(builder.icmp_signed("!=", even, units)):
            step(even, 0)

    return emitted(types.void, *[types.int64] * 14)(multiply)


def _load_tile(builder: Builder, register: Value, address: Value, stride: Value) -> None:
    operands = [register, builder.inttoptr(address, _POINTER), stride]
    call(builder, "llvm.x86.tileloadd64", VOID, operands)
