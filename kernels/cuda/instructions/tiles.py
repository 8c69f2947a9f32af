"""Tensor cores: products of 16 × 16 by 16 × 8 tiles of 16-bit floats, summed in float32.

A tile lies spread over the 32 lanes of a warp, in *fragments*. With `group` = lane // 4 and
`quad` = lane % 4, a lane holds of

    A  16 × 16, four words            B  16 × 8 (k × n), two words       C  16 × 8, four float32
       a0  row group,     k 2·quad       b0  k 2·quad,     column group     c0  row group,     column 2·quad
       a1  row group + 8, k 2·quad       b1  k 2·quad + 8, column group     c1  row group,     column 2·quad + 1
       a2  row group,     k 2·quad + 8                                      c2  row group + 8, column 2·quad
       a3  row group + 8, k 2·quad + 8                                      c3  row group + 8, column 2·quad + 1

where a word is the element named and its neighbour of the next k, the first in the lower half. In
other words, each quarter of A (8 × 8), each half of B turned on its side (8 columns × 8 k), and
each half of C is laid out as

    lane of (row r, column c)        c   0   1 │ 2   3 │ 4   5 │ 6   7
                                r 0      lane 0 │   1   │   2   │   3
                                  1           4 │   5   │   6   │   7
                                  …
                                  7          28 │  29   │  30   │  31

This sameness is what kernels live on: a C tile of scores, rounded and packed two columns a word, is
already half an A tile of weights, and `transpose_tile` makes a B tile of it.

The order of k is free as long as A and B agree: attention reads keys in whole vectors, so that a
lane's four words are neighbours in memory, and queries the same way.

(PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type".)
"""  # noqa: E501 - the drawing

from __future__ import annotations

from llvmlite import ir
from numba import uint32
from numba.cuda import types

from kernels.cuda.instructions.emit import F32, I32, Emitter, Intrinsic, Value, instruction

_FOUR_FLOATS = ir.LiteralStructType([F32] * 4)
_FOUR_WORDS = ir.LiteralStructType([I32] * 4)


def _product(kind: str) -> Intrinsic:
    def emit(at: Emitter) -> Value:
        registers = at.row(0, 1, 4)
        sums = [at.builder.load(register) for register in registers]
        result = at.assembly(
            f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
            "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
            "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
            _FOUR_FLOATS,
            [*at.items(2), *at.items(3), *sums],
            of_warp=True,
        )
        for i, register in enumerate(registers):
            at.builder.store(at.builder.extract_value(result, i), register)
        return at.nothing()

    return instruction(types.void, [None] * 4, emit)


# multiply_tiles(sums, i, a, b): sums[i, 0 … 3] += A · B, the C fragment in a row of a local float32
# array [n, 4]; `a` a tuple of four words, `b` of two. By dtype of the words' halves.
multiply_bfloat16_tiles = _product("bf16")
multiply_float16_tiles = _product("f16")
MULTIPLY_TILES: dict[str, Intrinsic] = {
    "bfloat16": multiply_bfloat16_tiles,
    "float16": multiply_float16_tiles,
}


def _from_shared(transposed: str) -> Intrinsic:
    def emit(at: Emitter) -> Value:
        result = at.assembly(
            f"ldmatrix.sync.aligned.m8n8.x4{transposed}.shared.b16 {{$0,$1,$2,$3}}, [$4];",
            "=r,=r,=r,=r,r,~{memory}",
            _FOUR_WORDS,
            [at.shared_address(2, 3)],
            has_effects=True,
            of_warp=True,
        )
        for i, register in enumerate(at.row(0, 1, 4)):
            at.builder.store(at.builder.extract_value(result, i), register)
        return at.nothing()

    return instruction(types.void, [None] * 4, emit)


# load_tiles(words, i, shared, element): words[i, t] = this lane's word of the t-th of four 8 × 8
# tiles of 16-bit elements. Lane l names row l % 8 of tile l // 8 by the index of its first element,
# a multiple of 16 bytes; the eight rows of a tile are conflict-free if they fall on different
# eighths of 128 bytes. The transposed form gives the lane what it would get of the transposed
# tile: two elements below each other.
load_tiles = _from_shared("")
load_transposed_tiles = _from_shared(".trans")


def _transpose(at: Emitter) -> Value:
    return at.assembly(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;",
        "=r,r",
        I32,
        at.arguments,
        of_warp=True,
    )


# transpose_tile(word): this lane's word of the transposed 8 × 8 tile of which `word` is its share.
transpose_tile = instruction(uint32, [uint32], _transpose)


def _choose_bytes(at: Emitter) -> Value:
    return at.assembly("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", I32, at.arguments)


# choose_bytes(a, b, selector): byte i of the result is byte number (selector >> 4·i) & 7 of the
# eight bytes a0 … a3 b0 … b3.
choose_bytes = instruction(uint32, [uint32, uint32, uint32], _choose_bytes)
LOWER_HALVES = 0x5410  # a's lower half, then b's
UPPER_HALVES = 0x7632  # a's upper half, then b's
