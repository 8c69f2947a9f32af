"""Products of int8 rows with quantised weights in the AMX tile registers, for many rows.

TDPBSSD multiplies a tile of 16 rows × 32 k's with one of 32 k's × 16 columns in 16 cycles, where
VPDPBUSD takes 64. What bounds the product then is the float arithmetic behind the integers, which
every group of 32 k's needs for every output (`kernels.cpu.int8_tile`, and the same here, operation
for operation, so the bits are equal).

The nibbles of a panel are first unpacked, once for all rows. Then the rows go by in blocks of 16,
each through all groups: that is the sequence of *units*, one tile product and its 16 vectors of
float arithmetic each. Tile registers, two of each kind, work for later units meanwhile, and the
integers travel through a ring of four tiles in memory, so that nobody waits for anybody:

    unit u + 5   rows, weights ──▶ tile registers
    unit u + 3   TDPBSSD ──▶ a tile register                            takes 52 cycles
    unit u + 2   the other tile register ──▶ ring                       must reach the cache
    unit u       ring ──▶ + BIAS ──▶ · d ──▶ · scale, summed in 16 registers over all groups

The ladder: cycles a unit at 256 rows, K = 576, Q4_1, on an Intel processor with AMX (family 6, two
cores, 3.4 GHz); a unit is 16384 operations, so 64 cycles are 0.87 · 10^12 operations a second.

    vectors alone (VPDPBUSD, `kernels.cpu.int8_tile`)                                  139
    tiles and vectors by turns, blocks of 6 groups, 2 panels                           112
    side by side, TDPBSSD last of the tile instructions                                107
    side by side, each tile instruction two units ahead of the next, spread between
    the vectors                                                                         86
    the same without what surrounds it: unpacking, misses of the cache, OUT              80
    Q4_0, two multiplications instead of three                                           66

What bounds it: while tiles are in use, this processor starts multiplications of 512 bits at one a
cycle instead of two (additions still at two), for some 350 cycles after each tile instruction, and
none for the 16 cycles of a TDPBSSD. Three multiplications of 16 vectors and one product are 64
cycles. By turns they would be 30 + 31, but the switch costs 180 more each time, and buffers that
make it rare do not fit the first-level cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils

from kernels.cpu.emitted import emitted
from kernels.cpu.instruction_set import selected_instruction_set
from kernels.cpu.int8_packing import GROUP, PANEL_COLUMNS, VECTOR_BYTES, Int8Format
from kernels.cpu.int8_tile import BIAS_BITS, panel_factors, weights_of_vector
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
    prefetch,
    store,
)

BLOCK_ROWS: Final = 16
TILE_BYTES: Final = GROUP * PANEL_COLUMNS
BLOCK_BYTES: Final = BLOCK_ROWS * VECTOR_BYTES
"""Of the integers, or the float sums, of a block of rows and a panel."""
RING_BLOCKS: Final = 4
UNITS_STORED, UNITS_MADE, UNITS_LOADED = 2, 3, 5
"""Which unit from the one in hand is put into the ring, multiplied, loaded."""
ROWS_BETWEEN: Final = 3
"""Rows of float arithmetic between two instructions on tiles: side by side they cost least."""

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
    """Return void(panel, groups, tiles): unpack a panel's nibbles into tiles of int8."""

    def unpack(builder: Builder, panel: Value, groups: Value, tiles: Value) -> None:
        def body(group: Value) -> None:
            packed = offset(builder, panel, builder.mul(group, i64(fmt.tile_bytes)))
            tile = offset(builder, tiles, builder.mul(group, i64(TILE_BYTES)))
            for v in range(fmt.num_vectors):
                stored = load(builder, offset(builder, packed, VECTOR_BYTES * v), BYTES)
                for k, unpacked in weights_of_vector(builder, fmt, v, [stored]):
                    signed = builder.sub(unpacked[0], constant(BYTES, fmt.offset))
                    store(builder, signed, offset(builder, tile, k * PANEL_COLUMNS))

        counted_loop(builder, groups, body)

    unpack.__name__ = f"unpack_{fmt.label}".lower()
    return emitted(types.void, *[types.int64] * 3)(unpack)


class RowBroadcasts:
    """Float32 of 16 rows, `stride` bytes apart, each in all lanes.

    The addresses are base + stride · row, with four multiples of the stride and the factors 1, 2
    and 4 of an address, in assembly: LLVM would keep an address a row, for want of registers in
    memory.
    """

    FACTORS: Final = ((0, 1), (1, 1), (1, 2), (3, 1), (1, 4), (5, 1), (3, 2), (7, 1))
    """Row r of a half is at multiple · factor strides."""

    def __init__(self, builder: Builder, stride: Value) -> None:
        self.strides = {n: builder.mul(stride, i64(n)) for n in (1, 3, 5, 7)}
        self.half = builder.shl(stride, i64(3))

    def of_rows(self, builder: Builder, base: Value) -> Callable[[int], Value]:
        """Return what loads the float of row r, base being the address of row 0's."""
        halves = (base, builder.add(base, self.half))

        def of_row(r: int) -> Value:
            half = halves[r // len(self.FACTORS)]
            multiple, factor = self.FACTORS[r % len(self.FACTORS)]
            if multiple:
                kind = ir.FunctionType(F32X, [I64, I64])
                text, constraint = f"vbroadcastss ($1,$2,{factor}), $0", "=v,r,r"
                vector = builder.asm(kind, text, constraint, [half, self.strides[multiple]], False)
            else:
                kind = ir.FunctionType(F32X, [I64])
                vector = builder.asm(kind, "vbroadcastss ($1), $0", "=v,r", [half], False)
            vector.attributes.add("readonly")
            return vector

        return of_row


def _add_product(builder: Builder, total: Value, x: Value, y: Value) -> Value:
    """Return fma(x, y, total) in the register of total.

    LLVM would take the register of x, and so have 16 sums to move, and some to spill, every turn.
    """
    kind = ir.FunctionType(F32X, [F32X, F32X, F32X])
    added = builder.asm(kind, "vfmadd231ps $3, $2, $0", "=v,0,v,v", [total, x, y], False)
    added.attributes.add("readnone")
    return added


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
    """Return what multiplies all rows with a panel.

    void(panel, tiles, tile_stride, groups, x, last_x, scales, last_scales, scaled_sums,
    last_scaled_sums, num_rows, ring, totals, out, stride, columns, accumulate). panel: packed;
    tiles: its tiles of int8, tile_stride bytes apart. x, scales, scaled_sums: of whole blocks of 16
    rows; last_…: of one more, filled up with zeros, if num_rows is no multiple of 16. ring, totals:
    scratch memory, RING_BLOCKS and 1 times BLOCK_BYTES. out, stride, columns, accumulate: as in
    `kernels.cpu.matrix_product.emit_sums`.
    """

    def multiply(builder: Builder, *operands: Value) -> None:
        panel, tiles, tile_stride, groups, x, last_x = operands[:6]
        scales, last_scales, scaled_sums, last_scaled_sums, num_rows = operands[6:11]
        ring, totals, out, stride, columns, accumulate = operands[11:]
        chosen = selected_instruction_set()
        whole = builder.lshr(num_rows, i64(4))
        blocks = builder.lshr(builder.add(num_rows, i64(BLOCK_ROWS - 1)), i64(4))
        k, row_bytes = builder.mul(groups, i64(GROUP)), builder.shl(groups, i64(2))
        broadcasts = RowBroadcasts(builder, row_bytes)
        loaded, added = (_Walk(builder, groups, blocks) for _ in range(2))
        sums = [cgutils.alloca_once(builder, F32X) for _ in range(BLOCK_ROWS)]

        def begin_block(block: Value) -> None:
            for total in sums:
                builder.store(constant(F32X, 0.0), total)
            row_stride = builder.shl(stride, i64(2))
            first = offset(builder, out, builder.mul(builder.shl(block, i64(4)), row_stride))
            for r in range(BLOCK_ROWS):
                place = offset(builder, first, builder.mul(row_stride, i64(r)))
                prefetch(builder, place, is_written=True)

        def of_ring(unit: Value) -> Value:
            index = builder.and_(unit, i64(RING_BLOCKS - 1))
            return offset(builder, ring, builder.mul(index, i64(BLOCK_BYTES)))

        def load_rows(turn: int) -> None:
            block, group = loaded.at(builder)
            rows = _of_block(builder, block, whole, x, k, last_x)
            place = offset(builder, rows, builder.mul(group, i64(GROUP)))
            _load_tile(builder, _register(ROWS + turn), place, k)

        def load_weights(turn: int) -> None:
            _, group = loaded.at(builder)
            place = offset(builder, tiles, builder.mul(group, tile_stride))
            _load_tile(builder, _register(WEIGHTS + turn), place, i64(VECTOR_BYTES))
            loaded.go_on(builder)

        def clear(turn: int) -> None:
            call(builder, "llvm.x86.tilezero", VOID, [_register(SUMS + turn)])

        def make(turn: int) -> None:
            registers = [_register(first + turn) for first in (SUMS, ROWS, WEIGHTS)]
            call(builder, "llvm.x86.tdpbssd", VOID, registers)

        def put(turn: int, unit: Value) -> None:
            place = builder.inttoptr(of_ring(unit), _POINTER)
            operands = [_register(SUMS + turn), place, i64(VECTOR_BYTES)]
            call(builder, "llvm.x86.tilestored64", VOID, operands)

        def write_out(block: Value) -> None:
            for r, total in enumerate(sums):
                store(builder, builder.load(total), offset(builder, totals, r * VECTOR_BYTES))
            row = builder.shl(block, i64(4))
            left = builder.sub(num_rows, row)
            is_whole = builder.icmp_signed(">", left, i64(BLOCK_ROWS))
            rows = builder.select(is_whole, i64(BLOCK_ROWS), left)
            target = offset(builder, out, builder.shl(builder.mul(row, stride), i64(2)))
            emit_sums(builder, 1, totals, rows, columns, target, stride, accumulate)

        def step(unit: Value, turn: int) -> None:
            """Emit the float arithmetic of a unit, and between it what later units need."""
            block, group = added.at(builder)
            packed = offset(builder, panel, builder.mul(group, i64(fmt.tile_bytes)))
            factors = panel_factors(builder, fmt, chosen, packed)
            with builder.if_then(builder.icmp_signed("==", block, i64(0)), likely=False):
                following = builder.add(packed, builder.mul(groups, i64(fmt.tile_bytes)))
                for line in range(0, fmt.tile_bytes, VECTOR_BYTES):
                    prefetch(builder, offset(builder, following, line))
            right = builder.shl(group, i64(2))
            beside = [(scales, last_scales)]
            if fmt.has_minimum:
                beside.append((scaled_sums, last_scaled_sums))
            floats = [
                broadcasts.of_rows(
                    builder,
                    offset(builder, _of_block(builder, block, whole, at, row_bytes, last), right),
                )
                for at, last in beside
            ]
            integers = of_ring(unit)
            work = [
                lambda: clear(1 - turn),
                lambda: make(1 - turn),
                lambda: load_rows(1 - turn),
                lambda: load_weights(1 - turn),
                lambda: put(turn, builder.add(unit, i64(UNITS_STORED))),
            ]
            for r, total in enumerate(sums):
                if r % ROWS_BETWEEN == 0 and work:
                    work.pop(0)()
                place = offset(builder, integers, r * VECTOR_BYTES)
                biased = builder.add(load(builder, place, I32X), constant(I32X, BIAS_BITS))
                product = fma(builder, builder.bitcast(biased, F32X), factors.d, factors.bias)
                value = _add_product(builder, builder.load(total), product, floats[0](r))
                if factors.m is not None:
                    value = _add_product(builder, value, factors.m, floats[1](r))
                builder.store(value, total)
            added.go_on(builder)
            is_end = builder.icmp_signed("==", builder.add(group, i64(1)), groups)
            with builder.if_then(is_end, likely=False):
                write_out(block)
                begin_block(builder.add(block, i64(1)))

        begin_block(i64(0))
        # What the steps −5 to −1 would have done.
        for before in range(UNITS_LOADED, 0, -1):
            turn = before % 2
            if before <= UNITS_MADE:
                clear(1 - turn)
                make(1 - turn)
            load_rows(1 - turn)
            load_weights(1 - turn)
            if before <= UNITS_STORED:
                put(turn, i64(UNITS_STORED - before))

        def two_units(unit: Value) -> None:
            step(unit, 0)
            step(builder.add(unit, i64(1)), 1)

        units = builder.mul(groups, blocks)
        even = builder.and_(units, i64(-2))
        counted_loop(builder, even, two_units, step=2)
        with builder.if_then(builder.icmp_signed("!=", even, units)):
            step(even, 0)

    multiply.__name__ = f"multiply_panel_{fmt.label}".lower()
    return emitted(types.void, *[types.int64] * 17)(multiply)


def _load_tile(builder: Builder, register: Value, address: Value, stride: Value) -> None:
    operands = [register, builder.inttoptr(address, _POINTER), stride]
    call(builder, "llvm.x86.tileloadd64", VOID, operands)
