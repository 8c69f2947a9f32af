"""How decode attention's keys and values lie in a lane's registers, in a pool of 16 or of 8 bits.

The fragments are those of `attention_decode_tensor`, which draws the first of the two pools. A lane
asks for the same dimensions of the same tokens of both, but for the order in which it reads them:

*16 bits.* The words read are the tensor core's.

*8 bits* (`quantized_kv`). The bytes stay bytes until the moment of the product: a tile takes half
the registers, and the memory half the time. Then they are not widened, only put where a 16-bit
float has such bits (`instructions.placed_bytes`): what is multiplied is (number + offset) · unit.

Keys: a lane reads 16 bytes for every 64 dimensions, 8 for the last 32 of D 96:

    dimension of a token     0 … 15 │ 16 … 31 │ 32 … 47 │ 48 … 63 │ 64 …
    lane of the quad row       0    │    1    │    2    │    3    │  0, the next vector

and a word, four dimensions, is a product's share: its bytes 0 and 2 for one half of the tile's 16
columns, 1 and 3 for the other. Queries are put into that order once, at the start.

Values: 8 bytes of a strip of 64 dimensions, 4 of one of 32: the lane's dimensions are those of the
other pool, so sums, partials and the merge are the same. A word of the tile takes a column of two
neighbouring tokens' words:

    token 2·quad      word   d0 d1 d2 d3     →   d0 e0 │ d1 e1 │ d2 e2 │ d3 e3
    token 2·quad + 1  word   e0 e1 e2 e3

*Units and offsets* are taken off where they meet few numbers. Of scores: the unit's inverse is one
factor with the key's scale and the softmax's, and the products begin with −offset · Σ query, which
is the same for every token. Of sums: one product more a tile adds up −offset · Σ weight, and both
are taken off when a chunk is merged. Queries and weights are raised by a power of two, so that
nothing between is too small for a float32.

A token's scales wait in the lanes that have its scores: a key's is multiplied to the score, a
value's to the weight before that is rounded. Behind the row's end both may be NaN and count as 1
and 0; the bytes are harmless. The product of weights and values is one of bfloat16 whatever the
model's dtype is: a code of eight bits is exact in it, and weight times scale (scales up to 2³⁹)
has its full precision, where in float16 the many small weights beside a large
one would vanish (below 2⁻²⁴).

Keys and values are read by ordinary reads: the launch may have begun before they were written
(`instructions.early_launch`). It costs nothing, neither registers nor instructions.
"""

from __future__ import annotations

from dataclasses import dataclass

from numba import cuda, float32, uint32

from kernels.cuda.attention_chunks import TILE_TOKENS
from kernels.cuda.instructions.conversions import PAIR_CONVERSIONS, word_to_float32
from kernels.cuda.instructions.placed_bytes import (
    FIRST_COLUMN,
    NEXT_COLUMN,
    PLACE_COLUMN,
    PLACE_WORDS,
    PLACINGS,
    RAISED,
)
from kernels.cuda.instructions.tiles import LOWER_HALVES, UPPER_HALVES, choose_bytes
from kernels.cuda.instructions.vectors import LOAD_WORDS, load_vector, load_word
from kernels.cuda.quantized_kv import VALUE_DTYPE_8_BITS, head_bytes
from kernels.cuda.variant import DeviceFunction, Local, Pointer, Scalar


@dataclass(frozen=True, slots=True)
class DecodePool:
    """One kind of pool. `head_elements`: elements of a kv head of a block, of K or of V.

    `has_scales`: a token has one of its key and one of its value, float32, the first of a block at
    `first_scale` of the head. `has_offsets`: each element has 128 units too many.
    `value_dtype`: of values and weights in their product, `VALUE_DTYPE_8_BITS` or the model's.
    `score_unit`, `sum_unit`: what products with keys and with values are to be multiplied by;
    `weight_unit`: what weights are, with their scales, before.
    `tile_bytes`: of a tile's keys, and of its values, which lie one behind the other.
    `key_dims`: dimensions of a key that a lane reads beside each other.
    `key_rows`, `value_rows`: of four words, the arrays that hold a lane's share of a tile.
    `fills_registers`: whether these and the sums leave no room for queries.

    Device functions:

        load_query(queries, i, query, first, c, quad)   its vector c of the head at `first`, for
                                                        the products 2·c and 2·c + 1
        load_keys(keys, pool, first, lane)              of a tile: `first` is the element of token
                                                        `quad_row`, dimension `key_dims` · quad
        load_values(values, pool, first, lane)          `first` of token 2 · quad, dimension
                                                        8 · quad_row
        load_scales(scales, pool, element)              of the token at `element` and 8 further
        clear_values(values, num_valid, quad)           zeros from token `num_valid` of the tile on
        clear_first_values(values, num_before, quad)    zeros up to that token
        key_tile(keys, m), value_tile(values, m)        the operand A of product m
    """

    has_scales: bool
    has_offsets: bool
    value_dtype: str
    score_unit: float
    weight_unit: float
    sum_unit: float
    head_elements: int
    tile_bytes: int
    key_dims: int
    first_scale: int
    key_rows: int
    value_rows: int
    fills_registers: bool
    load_query: DeviceFunction
    load_keys: DeviceFunction
    load_values: DeviceFunction
    load_scales: DeviceFunction
    clear_values: DeviceFunction
    clear_first_values: DeviceFunction
    key_tile: DeviceFunction
    value_tile: DeviceFunction


def make_decode_pool(
    dtype: str, kv_dtype: str | None, head_size: int, block_size: int
) -> DecodePool:
    """Return the functions for a pool of `kv_dtype`, or of the model's own dtype."""
    if kv_dtype is None:
        return _make_16_bits(dtype, head_size, block_size)
    return _make_8_bits(dtype, kv_dtype, head_size, block_size)


def _make_load_values(
    head_size: int, load_eight: DeviceFunction, load_four: DeviceFunction
) -> DeviceFunction:
    """Return what reads a lane's values: eight dimensions of a strip of 64, four of one of 32."""
    wide_strips, strips = head_size // 64, -(-head_size // 64)

    @cuda.jit(device=True, inline="always")
    def load_values_of(values: Local, pool: Pointer, first: Scalar, lane: Scalar) -> None:
        """values[4s + j] = the lane's dimensions in strip s of its token j: 0, 1, 8, 9 further.

        `first`: the element of the lane's token 0 where its dimensions in the first strip begin.
        """
        for s in range(wide_strips):
            for j in range(4):
                element = first + (j // 2 * 8 + j % 2) * head_size + 64 * s
                load_eight(values, 4 * s + j, pool, element)
        for s in range(wide_strips, strips):
            narrower = 4 * (lane // 4)  # four dimensions a lane, not eight
            for j in range(4):
                element = first + (j // 2 * 8 + j % 2) * head_size + 64 * s
                load_four(values, 4 * s + j, pool, element - narrower)

    return load_values_of


def _make_16_bits(dtype: str, head_size: int, block_size: int) -> DecodePool:
    columns = head_size // 32  # vectors of a token that a lane holds
    strips = -(-head_size // 64)
    load_values_of = _make_load_values(head_size, load_vector, LOAD_WORDS[2])

    @cuda.jit(device=True, inline="always")
    def load_query(
        queries: Local, i: Scalar, query: Pointer, first: Scalar, c: Scalar, quad: Scalar
    ) -> None:
        load_vector(queries, i, query, first + 32 * c + 8 * quad)

    @cuda.jit(device=True, inline="always")
    def load_keys(keys: Local, pool: Pointer, first: Scalar, _lane: Scalar) -> None:
        """keys[half · columns + c] = 32c … of the lane's dimensions of its token in that half."""
        for half in range(2):
            for c in range(columns):
                element = first + 8 * half * head_size + 32 * c
                load_vector(keys, half * columns + c, pool, element)

    @cuda.jit(device=True, inline="always")
    def load_scales(_scales: Local, _pool: Pointer, _element: Scalar) -> None:
        pass

    @cuda.jit(device=True, inline="always")
    def clear_token(values: Local, j: Scalar) -> None:
        for s in range(strips):
            for word in range(4):
                values[4 * s + j, word] = uint32(0)

    @cuda.jit(device=True, inline="always")
    def clear_values(values: Local, num_valid: Scalar, quad: Scalar) -> None:
        if num_valid < TILE_TOKENS:
            for j in range(4):
                if j // 2 * 8 + j % 2 >= num_valid - quad * 2:
                    clear_token(values, j)

    @cuda.jit(device=True, inline="always")
    def clear_first_values(values: Local, num_before: Scalar, quad: Scalar) -> None:
        for j in range(4):
            if j // 2 * 8 + j % 2 < num_before - quad * 2:
                clear_token(values, j)

    @cuda.jit(device=True, inline="always")
    def key_tile(keys: Local, m: Scalar) -> tuple[Scalar, Scalar, Scalar, Scalar]:
        upper, lower = m // 2, columns + m // 2  # tokens quad_row, quad_row + 8
        word = m % 2 * 2
        return (keys[upper, word], keys[lower, word], keys[upper, word + 1], keys[lower, word + 1])

    @cuda.jit(device=True, inline="always")
    def value_tile(values: Local, m: Scalar) -> tuple[Scalar, Scalar, Scalar, Scalar]:
        s, i = m // 4 * 4, m % 4
        return (
            choose_bytes(values[s, i], values[s + 1, i], LOWER_HALVES),
            choose_bytes(values[s, i], values[s + 1, i], UPPER_HALVES),
            choose_bytes(values[s + 2, i], values[s + 3, i], LOWER_HALVES),
            choose_bytes(values[s + 2, i], values[s + 3, i], UPPER_HALVES),
        )

    return DecodePool(
        has_scales=False,
        has_offsets=False,
        value_dtype=dtype,
        score_unit=1.0,
        weight_unit=1.0,
        sum_unit=1.0,
        head_elements=block_size * head_size,
        tile_bytes=2 * TILE_TOKENS * head_size,
        key_dims=8,
        first_scale=0,
        key_rows=2 * columns,
        value_rows=4 * strips,
        fills_registers=head_size == 256,  # 64 of keys, of values and of sums
        load_query=load_query,
        load_keys=load_keys,
        load_values=load_values_of,
        load_scales=load_scales,
        clear_values=clear_values,
        clear_first_values=clear_first_values,
        key_tile=key_tile,
        value_tile=value_tile,
    )


def _make_8_bits(dtype: str, kv_dtype: str, head_size: int, block_size: int) -> DecodePool:
    wide_strips, strips = head_size // 64, -(-head_size // 64)
    wide_columns = 2 * wide_strips  # of the queries' vectors of 8, those that 16 bytes of keys need
    first_scale = block_size * head_size
    load_pair = LOAD_WORDS[2]
    load_values_of = _make_load_values(head_size, load_pair, LOAD_WORDS[1])
    of_keys, of_values = (kv_dtype, dtype), (kv_dtype, VALUE_DTYPE_8_BITS)
    place_keys, place_values = PLACE_WORDS[of_keys], PLACE_COLUMN[of_values]
    raised, pairs_of = RAISED[dtype], PAIR_CONVERSIONS[dtype]
    low_of, high_of, pack = pairs_of.low, pairs_of.high, pairs_of.pack

    @cuda.jit(device=True, inline="always")
    def load_query(
        queries: Local, i: Scalar, query: Pointer, first: Scalar, c: Scalar, quad: Scalar
    ) -> None:
        dim = c // 2 * 64 + 16 * quad + c % 2 * 8 if c < wide_columns else 32 * c + 8 * quad
        load_vector(queries, i, query, first + dim)
        for word in range(4):
            both = queries[i, word]
            low, high = low_of(both) * float32(raised), high_of(both) * float32(raised)
            queries[i, word] = pack(low, high)
        for word in range(0, 4, 2):
            low, high = queries[i, word], queries[i, word + 1]
            queries[i, word] = choose_bytes(low, high, LOWER_HALVES)
            queries[i, word + 1] = choose_bytes(low, high, UPPER_HALVES)

    @cuda.jit(device=True, inline="always")
    def load_scales(scales: Local, pool: Pointer, element: Scalar) -> None:
        for half in range(2):
            scales[half] = word_to_float32(load_word(pool, element + 32 * half))

    @cuda.jit(device=True, inline="always")
    def load_keys(keys: Local, pool: Pointer, first: Scalar, lane: Scalar) -> None:
        """keys[half · strips + s] = the lane's bytes in strip s of its token in that half."""
        for half in range(2):
            for s in range(wide_strips):
                element = first + 8 * half * head_size + 64 * s
                load_vector(keys, half * strips + s, pool, element)
            for s in range(wide_strips, strips):
                element = first + 8 * half * head_size + 64 * s - 8 * (lane % 4)
                load_pair(keys, half * strips + s, pool, element)

    @cuda.jit(device=True, inline="always")
    def clear_values(_values: Local, _end: Scalar, _quad: Scalar) -> None:
        pass  # their scales are 0

    @cuda.jit(device=True, inline="always")
    def key_tile(keys: Local, m: Scalar) -> tuple[Scalar, Scalar, Scalar, Scalar]:
        words = cuda.local.array((1, 4), uint32)
        place_keys(words, 0, keys[m // 4, m % 4], keys[strips + m // 4, m % 4])
        return (words[0, 0], words[0, 2], words[0, 1], words[0, 3])

    @cuda.jit(device=True, inline="always")
    def value_tile(values: Local, m: Scalar) -> tuple[Scalar, Scalar, Scalar, Scalar]:
        s, word = m // 4 * 4, m % 4 // 2
        even = FIRST_COLUMN + m % 2 * 2 * NEXT_COLUMN
        odd = even + NEXT_COLUMN
        return (
            place_values(values[s, word], values[s + 1, word], even),
            place_values(values[s, word], values[s + 1, word], odd),
            place_values(values[s + 2, word], values[s + 3, word], even),
            place_values(values[s + 2, word], values[s + 3, word], odd),
        )

    return DecodePool(
        has_scales=True,
        has_offsets=PLACINGS[of_keys].offset != 0,
        value_dtype=VALUE_DTYPE_8_BITS,
        score_unit=1 / (PLACINGS[of_keys].unit * raised),
        weight_unit=RAISED[VALUE_DTYPE_8_BITS],
        sum_unit=1 / (PLACINGS[of_values].unit * RAISED[VALUE_DTYPE_8_BITS]),
        head_elements=head_bytes(head_size, block_size),
        tile_bytes=TILE_TOKENS * head_size,
        key_dims=16,
        first_scale=first_scale,
        key_rows=2 * strips,
        value_rows=4 * strips,
        fills_registers=False,
        load_query=load_query,
        load_keys=load_keys,
        load_values=load_values_of,
        load_scales=load_scales,
        clear_values=clear_values,
        clear_first_values=clear_values,
        key_tile=key_tile,
        value_tile=value_tile,
    )
