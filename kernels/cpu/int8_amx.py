"""Products of int8 rows with quantised weights in the AMX tile registers, for many rows.

TDPBSSD multiplies a tile of 16 rows × 32 k's with one of 32 k's × 16 columns in 16 cycles, where
VPDPBUSD takes 64. What bounds the product then is the float arithmetic behind the integers, which
every group of 32 k's needs for every output (`kernels.cpu.int8_tile`, and the same here, operation
for operation, so the bits are equal).

A run of panels is one sequence of *units*: panel by panel, the rows in blocks of 16, each through
all groups. A unit is one tile product and its 16 vectors of float arithmetic. Tile registers, two
of each kind, work for later units meanwhile, and the integers travel through a ring of four tiles
in memory, so that nobody waits for anybody:

    unit u + 5   rows, weights ──▶ tile registers
    unit u + 3   TDPBSSD ──▶ a tile register                            takes 52 cycles
    unit u + 2   the other tile register ──▶ ring                       must reach the cache
    unit u       ring ──▶ + BIAS ──▶ · d ──▶ · scale, summed in 16 registers over all groups

Nibbles are unpacked a panel ahead. While the last block of a panel goes by, every unit unpacks its
group of the next panel over its own tile, which is in a register by then. And all units of a panel
together fetch the panel after the next one into the second-level cache.

The ladder: cycles a unit at 256 rows, K = 576, Q4_1, on an Intel processor with AMX (family 6, two
cores, 3.4 GHz); a unit is 16384 operations, so 64 cycles are 0.87 · 10^12 operations a second.

    vectors alone (VPDPBUSD, `kernels.cpu.int8_tile`)                                  139
    tiles and vectors by turns, blocks of 6 groups, 2 panels                           112
    side by side, TDPBSSD last of the tile instructions                                107
    side by side, each tile instruction two units ahead of the next, spread between
    the vectors                                                                         86
    the same without what surrounds it: unpacking, misses of the cache, OUT              80
    Q4_0, two multiplications instead of three                                           66

What surrounds it counts at few rows. Nanoseconds for 16 columns × 32 k's of weights that come from
memory (K = 576, N = 3072, Q4_1, CPU time of one thread):

                                                                        16 rows   32 rows
    a panel at a time: unpack, fill, drain; fetched by the first block    45.0      72.3
    fetched into the second-level cache instead of the first              44.5      70.3
    a run of panels as one sequence, unpacked a panel ahead               40.8      61.4
    larger runs (`kernels.cpu.step`: chunks claimed together)             38.0      56.5
    the same with weights in the second-level cache                       27.6      50.6

Slower: sums that begin with BIAS in a tile loaded from memory (a load of a tile costs 15 cycles, 16
additions nothing); factors broadcast by the multiplications themselves; fetching keys and values
for the attention that follows (fetches that wait for memory hold up the loads of this loop: the
products 6.2 → 11.9 ms, attention 11.1 → 8.5).

What bounds it: while tiles are in use, this processor starts multiplications of 512 bits at one a
cycle instead of two (additions still at two), for some 350 cycles after each tile instruction, and
none for the 16 cycles of a TDPBSSD. Three multiplications of 16 vectors and one product are 64
cycles. By turns they would be 30 + 31, but the switch costs 180 more each time, and buffers that
make it rare do not fit the first-level cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from numba import types
from numba.core import cgutils

from kernels.cpu.amx_tiles import clear_tile, load_tile, multiply_tiles, store_tile
from kernels.cpu.emitted import emitted
from kernels.cpu.instruction_set import selected_instruction_set
from kernels.cpu.int8_amx_tiles import ROWS, SUMS, WEIGHTS, RowBroadcasts, add_product, unpack_tile
from kernels.cpu.int8_packing import GROUP, PANEL_COLUMNS, VECTOR_BYTES, Int8Format
from kernels.cpu.int8_sizes import BLOCK_BYTES, BLOCK_ROWS, RING_BLOCKS, TILE_BYTES
from kernels.cpu.int8_weights import (
    BIAS_BITS,
    Tile,
    fetched_lines,
    panel_factors,
    tile_of,
)
from kernels.cpu.matrix_product import emit_sums
from kernels.cpu.vector_ir import (
    F32X,
    I32X,
    I64,
    SECOND_LEVEL,
    Builder,
    Value,
    constant,
    counted_loop,
    fma,
    i64,
    load,
    offset,
    prefetch,
    store,
)

UNITS_STORED, UNITS_MADE, UNITS_LOADED = 2, 3, 5
"""Which unit from the one in hand is put into the ring, multiplied, loaded."""
ROWS_BETWEEN: Final = 3
"""Rows of float arithmetic between two instructions on tiles: side by side they cost least."""
FEWEST_GROUPS: Final = UNITS_LOADED + 1
"""Of panels that go by in one run: with fewer a tile would be loaded before it is unpacked."""


def _of_block(
    builder: Builder, block: Value, whole: Value, first: Value, row_bytes: Value, last: Value
) -> Value:
    """Return the address of a block of rows: behind the whole ones, `last`."""
    down = builder.mul(block, builder.mul(row_bytes, i64(BLOCK_ROWS)))
    is_whole = builder.icmp_signed("<", block, whole)
    return builder.select(is_whole, builder.add(first, down), last)


def _variable(builder: Builder, value: Value) -> Value:
    place = cgutils.alloca_once(builder, value.type)
    builder.store(value, place)
    return place


class _Walk:
    """A place in the sequence of units: a panel, counted from the first, a block, a group."""

    def __init__(self, builder: Builder, groups: Value, blocks: Value) -> None:
        self.groups, self.blocks = groups, blocks
        self.panel, self.block, self.group = (_variable(builder, i64(0)) for _ in range(3))

    def at(self, builder: Builder) -> tuple[Value, Value, Value]:
        """Return panel, block and group."""
        return builder.load(self.panel), builder.load(self.block), builder.load(self.group)

    def go_on(self, builder: Builder, end_block: Callable[[], None] | None = None) -> None:
        """Go to the next unit; `end_block` emits what is done behind a block's last one."""
        group = builder.add(builder.load(self.group), i64(1))
        is_end = builder.icmp_signed("==", group, self.groups)
        builder.store(builder.select(is_end, i64(0), group), self.group)
        with builder.if_then(is_end, likely=False):
            if end_block is not None:
                end_block()
            block = builder.add(builder.load(self.block), i64(1))
            is_over = builder.icmp_signed("==", block, self.blocks)
            builder.store(builder.select(is_over, i64(0), block), self.block)
            panel = builder.add(builder.load(self.panel), builder.zext(is_over, I64))
            builder.store(panel, self.panel)


def panels_multiplier(fmt: Int8Format) -> Any:  # noqa: ANN401 - Numba's objects
    """Return what multiplies all rows with a run of panels.

    void(panel, panel_step, num_panels, tiles, groups, x, last_x, scales, last_scales, scaled_sums,
    last_scaled_sums, num_rows, ring, totals, out, out_step, stride, columns, accumulate). panel:
    the first, packed; panel_step: bytes from one to the next, which may lie before it. tiles:
    memory for a panel's tiles of int8, the first panel's unpacked (nibbles only). num_panels: 1 if
    groups is below FEWEST_GROUPS. x, scales, scaled_sums: of whole blocks of 16 rows; last_…: of
    one more, filled up with zeros, if num_rows is no multiple of 16. ring, totals: scratch memory,
    RING_BLOCKS and 1 times BLOCK_BYTES. out, columns: of the first panel, and the columns from
    there to the last one of OUT; out_step: bytes to the next panel's. stride, accumulate: as in
    `kernels.cpu.matrix_product.emit_sums`.
    """

    def multiply(builder: Builder, *operands: Value) -> None:
        panel, panel_step, num_panels, tiles, groups, x, last_x = operands[:7]
        scales, last_scales, scaled_sums, last_scaled_sums, num_rows = operands[7:12]
        ring, totals, out, out_step, stride, columns, accumulate = operands[12:]
        chosen = selected_instruction_set()
        whole = builder.lshr(num_rows, i64(4))
        blocks = builder.lshr(builder.add(num_rows, i64(BLOCK_ROWS - 1)), i64(4))
        last_block = builder.sub(blocks, i64(1))
        k, row_bytes = builder.mul(groups, i64(GROUP)), builder.shl(groups, i64(2))
        broadcasts = RowBroadcasts(builder, row_bytes)
        row_stride = builder.shl(stride, i64(2))
        block_stride = builder.shl(row_stride, i64(4))
        loaded, added = (_Walk(builder, groups, blocks) for _ in range(2))
        sums = [_variable(builder, constant(F32X, 0.0)) for _ in range(BLOCK_ROWS)]
        # Of the panel at hand: its weights, its columns of OUT, and the columns from there on.
        panel_at, out_at, left_at = (_variable(builder, v) for v in (panel, out, columns))

        def begin_block(block: Value) -> None:
            for total in sums:
                builder.store(constant(F32X, 0.0), total)
            first = offset(builder, builder.load(out_at), builder.mul(block, block_stride))
            for r in range(BLOCK_ROWS):
                place = offset(builder, first, builder.mul(row_stride, i64(r)))
                prefetch(builder, place, is_written=True)

        def of_ring(unit: Value) -> Value:
            index = builder.and_(unit, i64(RING_BLOCKS - 1))
            return offset(builder, ring, builder.mul(index, i64(BLOCK_BYTES)))

        def load_rows(turn: int) -> None:
            _, block, group = loaded.at(builder)
            rows = _of_block(builder, block, whole, x, k, last_x)
            load_tile(
                builder, ROWS + turn, offset(builder, rows, builder.mul(group, i64(GROUP))), k
            )

        def load_weights(turn: int) -> None:
            number, _, group = loaded.at(builder)
            if fmt.is_nibbles:
                place = offset(builder, tiles, builder.mul(group, i64(TILE_BYTES)))
            else:
                # What is loaded behind the last panel nobody uses, but it must be there.
                is_there = builder.icmp_signed("<", number, num_panels)
                down = builder.mul(builder.select(is_there, number, i64(0)), panel_step)
                place = offset(builder, panel, down, builder.mul(group, i64(fmt.tile_bytes)))
            load_tile(builder, WEIGHTS + turn, place, VECTOR_BYTES)
            loaded.go_on(builder)

        def clear(turn: int) -> None:
            clear_tile(builder, SUMS + turn)

        def make(turn: int) -> None:
            multiply_tiles(builder, "tdpbssd", SUMS + turn, ROWS + turn, WEIGHTS + turn)

        def put(turn: int, unit: Value) -> None:
            store_tile(builder, SUMS + turn, of_ring(unit), VECTOR_BYTES)

        def write_out(block: Value) -> None:
            for r, total in enumerate(sums):
                store(builder, builder.load(total), offset(builder, totals, r * VECTOR_BYTES))
            left = builder.sub(num_rows, builder.shl(block, i64(4)))
            rows, width = (
                builder.select(builder.icmp_signed("<", n, i64(most)), n, i64(most))
                for n, most in ((left, BLOCK_ROWS), (builder.load(left_at), PANEL_COLUMNS))
            )
            target = offset(builder, builder.load(out_at), builder.mul(block, block_stride))
            emit_sums(builder, 1, totals, rows, width, target, stride, accumulate)

        def end_block() -> None:
            _, block, _ = added.at(builder)
            write_out(block)
            is_over = builder.icmp_signed("==", block, last_block)
            with builder.if_then(is_over):
                passed = builder.ashr(out_step, i64(2))
                builder.store(builder.sub(builder.load(left_at), passed), left_at)
                for place, step_bytes in ((out_at, out_step), (panel_at, panel_step)):
                    builder.store(builder.add(builder.load(place), step_bytes), place)
            begin_block(builder.select(is_over, i64(0), builder.add(block, i64(1))))

        def look_ahead(tile: Tile) -> None:
            """Fetch a part of the panel after the next one, and unpack a tile of the next one."""
            number, block, group = added.at(builder)
            lines = fetched_lines(builder, tile)
            is_first, is_second = (builder.icmp_signed("==", block, i64(n)) for n in (0, 1))
            is_only = builder.icmp_signed("==", blocks, i64(1))
            half = len(lines) // 2
            parts = ((is_first, lines[:half]), (builder.or_(is_only, is_second), lines[half:]))
            for is_wanted, part in parts:
                with builder.if_then(is_wanted, likely=False):
                    for line in part:
                        ahead = offset(builder, line, panel_step, panel_step)
                        prefetch(builder, ahead, SECOND_LEVEL)
            if not fmt.is_nibbles:
                return
            is_last = builder.icmp_signed("==", block, last_block)
            is_there = builder.icmp_signed("<", builder.add(number, i64(1)), num_panels)
            with builder.if_then(builder.and_(is_last, is_there), likely=False):
                following = builder.add(builder.load(panel_at), panel_step)
                unpack_tile(builder, fmt, following, groups, group, tiles)

        def step(unit: Value, turn: int) -> None:
            """Emit the float arithmetic of a unit, and between it what later units need."""
            _, block, group = added.at(builder)
            tile = tile_of(builder, fmt, builder.load(panel_at), groups, group)
            factors = panel_factors(builder, tile, chosen)
            look_ahead(tile)
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
                value = add_product(builder, builder.load(total), product, floats[0](r))
                if factors.m is not None:
                    value = add_product(builder, value, factors.m, floats[1](r))
                builder.store(value, total)
            added.go_on(builder, end_block)

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

        units = builder.mul(builder.mul(groups, blocks), num_panels)
        even = builder.and_(units, i64(-2))
        counted_loop(builder, even, two_units, step=2)
        with builder.if_then(builder.icmp_signed("!=", even, units)):
            step(even, 0)

    multiply.__name__ = f"multiply_panels_{fmt.label}".lower()
    return emitted(types.void, *[types.int64] * 19)(multiply)
