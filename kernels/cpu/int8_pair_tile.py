"""The inner tile of products of int8 rows with 4-bit weights, by half as many multiplications.

Where additions run beside multiplications and cost nothing (`InstructionSet.pairs_products`), two
products are made of one (Winograd, "A new algorithm for inner product", 1968). With A = w + a and
B = w' + b, w and w' two weights, a and b constants:

    w · x + w' · x' = (A + x') · (B + x) − A · B − (x · x' + a · x + b · x')

A · B belongs to the weights alone and the last bracket to the row alone, so each is computed once:
a panel is *prepared* for all rows, and the brackets, summed over a group of 32, stand beside the
rows (`Product.INPUT_PAIR_SUMS`). The halves of a byte as it is stored, k and k + 16 of a group, are
a pair. All of it is exact: the integers, and so the bits, are those of `kernels.cpu.int8_tile`.

    of 16 columns and a group    multiplications                     additions
    int8_tile                    8 VPDPBUSD, 3 of scaling            0
    here                         4 VPDPBUSD, 3 of scaling            9

Bytes limit the numbers. With a = 120, b = −8, w in 0 … 15 and x in −120 … 120, A + x' is in 0 … 255
and B + x in −128 … 127: unsigned times signed, as VPDPBUSD has it. That is why rows are quantised
to 120 steps there and not to 127 (`row_values.LARGEST_INT8`).

    prepared   A k 0–3 │ A k 4–7 │ …      4 vectors, 16 columns × 4 bytes each, as in the panel
    group      B k 16–19 │ …              4 vectors
    768 bytes  BIAS_BITS − Σ A · B        int32 [16]
               d │ −BIAS · d │ m          float32 [16] each; of a format without m, anything
"""

from __future__ import annotations

from itertools import chain
from typing import Any, Final

from numba import types
from numba.core import cgutils

from kernels.cpu.emitted import emitted
from kernels.cpu.instruction_set import InstructionSet
from kernels.cpu.int8_packing import GROUP, VECTOR_BYTES, Int8Format
from kernels.cpu.int8_sizes import (
    FACTORS_AT,
    PREPARED_BYTES,
    SUMS_AT,
    TILE_PANELS,
    TILE_ROWS,
    VECTORS,
)
from kernels.cpu.int8_tile import add_scaled, scaled_by, whole_sum
from kernels.cpu.int8_weights import (
    BIAS_BITS,
    PanelFactors,
    fetch_ahead,
    panel_factors,
    tile_of,
    weights_of_tiles,
)
from kernels.cpu.integer_dot import integer_dot
from kernels.cpu.vector_ir import (
    BYTES,
    F32X,
    I32,
    I32X,
    SECOND_LEVEL,
    Builder,
    Value,
    broadcast,
    constant,
    counted_loop,
    i64,
    load,
    offset,
    store,
)

PAIR_OFFSET: Final = 120
"""a above, and the largest number of a row."""
PARTNER_OFFSET: Final = -8
"""b above."""


def pair_preparer(fmt: Int8Format, chosen: InstructionSet) -> Any:  # noqa: ANN401 - Numba's objects
    """Return void(panel, groups, following, prepared): prepare a panel of K/32 groups.

    `following`: bytes from the panel to one that is asked for into the second-level cache.
    """
    dot = integer_dot(chosen, fmt)

    def prepare(
        builder: Builder, panel: Value, groups: Value, following: Value, prepared: Value
    ) -> None:
        def body(group: Value) -> None:
            tile = tile_of(builder, fmt, panel, groups, group)
            out = offset(builder, prepared, builder.mul(group, i64(PREPARED_BYTES)))
            fetch_ahead(builder, tile, following, locality=SECOND_LEVEL)
            total: Value = constant(I32X, 0)
            weights = [of_tile for _, [of_tile] in weights_of_tiles(builder, [tile], 0, chosen)]
            for v, (low, high) in enumerate(zip(weights[::2], weights[1::2], strict=True)):
                first = builder.add(low, constant(BYTES, PAIR_OFFSET))
                second = builder.add(high, constant(BYTES, PARTNER_OFFSET))
                total = dot.step(builder, total, first, second)
                store(builder, first, offset(builder, out, VECTOR_BYTES * v))
                store(builder, second, offset(builder, out, VECTOR_BYTES * (VECTORS + v)))
            begin = builder.sub(constant(I32X, BIAS_BITS), total)
            store(builder, begin, offset(builder, out, SUMS_AT))
            factors = panel_factors(builder, tile, chosen)
            for index, factor in enumerate((factors.d, factors.bias, factors.m)):
                if factor is not None:
                    store(builder, factor, offset(builder, out, FACTORS_AT + VECTOR_BYTES * index))

        counted_loop(builder, groups, body)

    prepare.__name__ = f"prepare_{fmt.label}".lower()
    return emitted(types.void, *[types.int64] * 4)(prepare)


def pair_tile(fmt: Int8Format, chosen: InstructionSet) -> Any:  # noqa: ANN401 - Numba's objects
    """Return void(x, scales, scaled_sums, sums, pair_sums, groups, prepared, second, out).

    x … pair_sums: addresses of the parts of TILE_ROWS rows (`kernels.cpu.matrix_product`). groups:
    K/32. prepared: address of the first prepared panel. second: bytes from it to the next one; 0
    where there is but one, which is then computed twice. out: the sums, float32 [TILE_ROWS, 32].
    """

    def emit(builder: Builder, *operands: Value) -> None:
        _tile(builder, fmt, chosen, operands)

    emit.__name__ = f"pair_tile_{fmt.label}".lower()
    return emitted(types.void, *[types.int64] * 9)(emit)


def _tile(
    builder: Builder, fmt: Int8Format, chosen: InstructionSet, operands: tuple[Value, ...]
) -> None:
    """Emit the tile; `operands`: those of `pair_tile`."""
    x, *beside, groups, prepared, second, out = operands
    depth, width = builder.mul(groups, i64(GROUP)), builder.mul(groups, i64(4))

    def row_at(first: Value, size: Value, row: int) -> Value:
        return offset(builder, first, builder.mul(size, i64(row)))

    rows = range(TILE_ROWS)
    values = [row_at(x, depth, r) for r in rows]
    parts = [[row_at(at, width, r) for at in beside] for r in rows]
    panel_at = [offset(builder, prepared, builder.mul(second, i64(p))) for p in range(TILE_PANELS)]
    totals = [[cgutils.alloca_once(builder, F32X) for _ in range(TILE_PANELS)] for _ in rows]
    # Here, not where the variables are made: a tile may stand in a loop.
    for total in chain(*totals):
        builder.store(constant(F32X, 0.0), total)
    dot = integer_dot(chosen, fmt)

    def body(group: Value) -> None:
        down = builder.mul(group, i64(PREPARED_BYTES))
        tiles = [offset(builder, at, down) for at in panel_at]
        right, below = builder.mul(group, i64(GROUP)), builder.mul(group, i64(4))
        here = [offset(builder, at, right) for at in values]
        sums: list[list[Value]] = []
        for part in parts:
            taken = _taken(builder, fmt, *(offset(builder, at, below) for at in part[2:]))
            sums.append([builder.sub(_load(builder, tile, SUMS_AT, I32X), taken) for tile in tiles])
        for v in range(VECTORS):
            first = [_load(builder, tile, VECTOR_BYTES * v, BYTES) for tile in tiles]
            second = [_load(builder, tile, VECTOR_BYTES * (VECTORS + v), BYTES) for tile in tiles]
            for r in rows:
                x, partner = (
                    _four(builder, offset(builder, here[r], 4 * v + at)) for at in (0, GROUP // 2)
                )
                sums[r] = [
                    dot.step(builder, s, builder.add(a, partner), builder.add(b, x))
                    for s, a, b in zip(sums[r], first, second, strict=True)
                ]
                if v == VECTORS - 1:
                    # A row is scaled beside the sums of the next ones: multiplications and
                    # additions stay mixed.
                    factors = [_factors(builder, fmt, tile) for tile in tiles]
                    scales = [offset(builder, at, below) for at in parts[r][:2]]
                    products = scaled_by(builder, sums[r], factors)
                    add_scaled(builder, totals[r], products, factors, *scales)

    counted_loop(builder, groups, body)
    for index, total in enumerate(chain(*totals)):
        store(builder, builder.load(total), offset(builder, out, VECTOR_BYTES * index))


def _taken(builder: Builder, fmt: Int8Format, sums: Value, pair_sums: Value) -> Value:
    """Return what is taken off a row's sums of a group, in all lanes."""
    taken = load(builder, pair_sums, I32)
    if fmt.offset:
        taken = builder.add(taken, builder.mul(whole_sum(builder, sums), I32(fmt.offset)))
    return broadcast(builder, taken)


def _factors(builder: Builder, fmt: Int8Format, tile: Value) -> PanelFactors:
    d, bias = (_load(builder, tile, FACTORS_AT + VECTOR_BYTES * i, F32X) for i in range(2))
    m = _load(builder, tile, FACTORS_AT + 2 * VECTOR_BYTES, F32X) if fmt.has_minimum else None
    return PanelFactors(d, bias, m)


def _four(builder: Builder, address: Value) -> Value:
    """Return four numbers of a row in every lane."""
    return builder.bitcast(broadcast(builder, load(builder, address, I32)), BYTES)


def _load(builder: Builder, tile: Value, at: int, kind: Any) -> Value:  # noqa: ANN401 - an ir.Type
    return load(builder, offset(builder, tile, at), kind)
