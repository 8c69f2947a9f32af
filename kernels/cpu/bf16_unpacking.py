"""Quantised panels made panels of bfloat16, a few at a time, for products in the tile registers.

A tile of a quantised panel (`kernels.cpu.int8_packing`: 16 columns, 32 k's) becomes one of a BF16
panel (`kernels.cpu.float_packing`: 16 vectors of pairs of k's). Each weight is computed in float32
as the format says, with one rounding (q · d + m), and then rounded to bfloat16, to nearest, ties to
even; a subnormal result becomes zero, as it would in the product.

    nibbles   lane c of vector v holds k 4·v + j in the low and k 16 + 4·v + j in the high half of
              byte j: a table of 16 float32, looked up by the low four bits of a lane, takes the
              place of mask and conversion
    more bits their vector's lanes look up another table, which has 16 times the upper bits alone;
              the two are added
    Q8_0      lane c of vector v holds k 4·v + j in byte j: shifted up, shifted down, converted
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir
from numba import types

from kernels.cpu.emitted import emitted
from kernels.cpu.instruction_set import selected_instruction_set
from kernels.cpu.int8_packing import GROUP, PANEL_COLUMNS, VECTOR_BYTES, Int8Format
from kernels.cpu.int8_weights import panel_factors, tile_of
from kernels.cpu.vector_ir import (
    BF16_PAIRS,
    F32X,
    I16,
    I32,
    I32X,
    LANES,
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

BF16_TILE_BYTES: Final = 2 * GROUP * PANEL_COLUMNS
NIBBLE_VALUES: Final = 16
PREFETCHED_TILES: Final = 4
"""How far ahead of the unpacking the packed weights are asked for."""

_WORDS: Final = ir.VectorType(I16, 2 * LANES)
_INTERLEAVED: Final = [half + lane for lane in range(LANES) for half in (0, LANES)]


def bf16_unpacker(fmt: Int8Format) -> Any:  # noqa: ANN401 - Numba's objects
    """Return void(panel, groups, first, count, tiles), which unpacks a part of a panel.

    panel: address of one of `groups` tiles. `count` of them, from `first` on, become tiles of
    bfloat16 at `tiles`.
    """

    def unpack(
        builder: Builder, panel: Value, groups: Value, first: Value, count: Value, tiles: Value
    ) -> None:
        values = [float(value) for value in fmt.values]
        above = [
            float((q & ((1 << fmt.high_bits) - 1)) << fmt.low_bits) for q in range(NIBBLE_VALUES)
        ]

        def looked_up(table: list[float], lanes: Value, shift: int) -> Value:
            index = builder.lshr(lanes, constant(I32X, shift)) if shift else lanes
            operands = [ir.Constant(F32X, table), index]
            return call(builder, "llvm.x86.avx512.permvar.sf.512", F32X, operands)

        def integer(lanes: Value, upper: list[Value], v: int, byte: int, *, is_high: bool) -> Value:
            """Return one weight of each lane, as float32, before it is scaled."""
            if fmt.is_nibbles:
                low = looked_up(values, lanes, 8 * byte + (4 if is_high else 0))
                if not upper:
                    return low
                # One vector of fifth bits; of two bits more, one for each half of the k's.
                turn = v + (fmt.low_vectors if is_high else 0)
                vector, bit = divmod(fmt.high_bits * turn, 8)
                return builder.fadd(low, looked_up(above, upper[vector], 8 * byte + bit))
            top = builder.shl(lanes, constant(I32X, 24 - 8 * byte)) if byte < 3 else lanes
            return builder.sitofp(builder.ashr(top, constant(I32X, 24)), F32X)

        def body(index: Value) -> None:
            packed = tile_of(builder, fmt, panel, groups, builder.add(first, index))
            tile = offset(builder, tiles, builder.mul(index, i64(BF16_TILE_BYTES)))
            for line in range(0, fmt.tile_bytes, VECTOR_BYTES):
                ahead = PREFETCHED_TILES * fmt.tile_bytes + line
                prefetch(builder, offset(builder, packed.address, ahead))
            parts = [
                panel_factors(builder, packed, selected_instruction_set(), part)
                for part in range(fmt.parts)
            ]
            vectors = [
                load(builder, offset(builder, packed.address, VECTOR_BYTES * v), I32X)
                for v in range(fmt.num_vectors)
            ]
            upper = vectors[fmt.low_vectors :]

            def weight(v: int, byte: int, *, is_high: bool) -> Value:
                q = integer(vectors[v], upper, v, byte, is_high=is_high)
                factors = parts[-1 if is_high else 0]
                if factors.m is None:
                    return builder.fmul(q, factors.d)
                return fma(builder, q, factors.d, factors.m)

            for v in range(fmt.low_vectors):
                for is_high in (False, True) if fmt.is_nibbles else (False,):
                    for byte in (0, 2):
                        even = weight(v, byte, is_high=is_high)
                        odd = weight(v, byte + 1, is_high=is_high)
                        first_k = 4 * v + byte + (GROUP // 2 if is_high else 0)
                        at = offset(builder, tile, first_k // 2 * VECTOR_BYTES)
                        store(builder, _pairs(builder, even, odd), at)

        counted_loop(builder, count, body)

    unpack.__name__ = f"bf16_of_{fmt.label}".lower()
    return emitted(types.void, *[types.int64] * 5)(unpack)


def _pairs(builder: Builder, even: Value, odd: Value) -> Value:
    """Return bfloat16 of two vectors, side by side in each 32-bit lane."""
    name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
    halves = builder.bitcast(call(builder, name, BF16_PAIRS, [odd, even]), _WORDS)
    order = ir.Constant(ir.VectorType(I32, 2 * LANES), _INTERLEAVED)
    return builder.shuffle_vector(halves, ir.Constant(_WORDS, ir.Undefined), order)
