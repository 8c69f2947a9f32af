"""Products of one row, or of few: through more panels at once than other rows go.

Such rows wait for memory, and memory gives more to those who read in more places at once: a
processor fetches ahead within a page, each place it reads is another page, and what its cores
themselves may ask for at a time is less than what their caches may. Two threads of a shared Xeon
with AMX, 600 MB in panels of 18 KB, the best of 11 in turns:

    panels at once    1       2       4       8       16
    GB/s              20.0    23.6    27.0    31.1    32.5

Eight have their sums in registers; sixteen do not, and take longer than two. Weights are asked for
GROUPS_AHEAD groups before they are wanted, into the second-level cache: without, eight panels are
as slow as two. Decode steps of Llama 3.2 1B's shape beside those by two panels (one of 256 bits),
medians of 4 to 8 processes a side in turns, on that machine:

    rows                 1       2       3       4       5       6
    Q4_0, amx            0.77    0.85    0.87    0.90    0.93    0.91
    Q6_K, amx            0.83    0.83    0.78    0.86    0.72    0.72    more than 4 went twice
    Q4_K_M, amx          0.84    0.88    0.76    0.91    0.84    0.83
    IQ4_XS, amx          0.86            0.82    0.81    0.86    0.83
    Q8_0, amx            0.87    0.92    0.87
    Q4_0, avx2           0.77

More rows go by two panels (`int8_products`), or through tile registers.
"""

from __future__ import annotations

from typing import Any, Final

from numba import types

from kernels.cpu.emitted import emitted
from kernels.cpu.float_sizes import TileSizes
from kernels.cpu.instruction_set import selected_instruction_set
from kernels.cpu.int8_packing import PANEL_COLUMNS, Int8Format
from kernels.cpu.int8_sizes import wide_tile_sizes
from kernels.cpu.int8_tile import int8_tiles
from kernels.cpu.matrix_product import emit_sums
from kernels.cpu.vector_ir import Builder, Value, counted_loop, i64, offset

SET: Final = selected_instruction_set()

GROUPS_AHEAD: Final = 8
"""16, 32 and all of a panel are as fast, and ask for more that another thread then computes."""


def wide_product(fmt: Int8Format) -> Any:  # noqa: ANN401 - Numba's objects
    """Return what multiplies few rows with panels, as far as wide tiles go.

    int64(rows, x, scales, scaled_sums, begins, groups, weights, panel_bytes, first, end, n, out,
    stride, accumulate, sums): the first of panels `first` to below `end` that is left, which is
    `first` where rows are more than few. weights, out: of panel and column 0. sums: scratch memory.
    """

    def multiply(
        builder: Builder, rows: Value, x: Value, scales: Value, scaled_sums: Value, begins: Value,
        groups: Value, weights: Value, panel_bytes: Value, first: Value, end: Value, n: Value,
        out: Value, stride: Value, accumulate: Value, sums: Value,
    ) -> Value:  # fmt: skip
        def through(sizes: TileSizes, first: Value) -> Value:
            """Multiply with as many panels as tiles of a size hold; return which comes then."""
            tiles = int8_tiles(fmt, sizes, SET, groups_ahead=GROUPS_AHEAD)

            def at_once(index: Value) -> None:
                panel = builder.add(first, builder.mul(index, i64(sizes.panels)))
                at = offset(builder, weights, builder.mul(panel, panel_bytes))
                tiles(
                    builder, rows, x, scales, scaled_sums, begins, groups, at, panel_bytes, sums,
                    i64(0), i64(0),
                )  # fmt: skip
                column = builder.mul(panel, i64(PANEL_COLUMNS))
                target = offset(builder, out, builder.shl(column, i64(2)))
                left = builder.sub(n, column)
                emit_sums(builder, sizes.panels, sums, rows, left, target, stride, accumulate)

            are_few = builder.icmp_unsigned("<", builder.sub(rows, i64(1)), i64(sizes.rows))
            times = builder.sdiv(builder.sub(end, first), i64(sizes.panels))
            times = builder.select(are_few, times, i64(0))
            counted_loop(builder, times, at_once)
            return builder.add(first, builder.mul(times, i64(sizes.panels)))

        for sizes in wide_tile_sizes(SET):
            first = through(sizes, first)
        return first

    multiply.__name__ = f"wide_product_{fmt.label}".lower()
    return emitted(types.int64, *[types.int64] * 15)(multiply)
