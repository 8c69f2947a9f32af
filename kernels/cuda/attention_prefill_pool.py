"""How prefill attention's keys and values come from a pool of 16 or of 8 bits to the tensor cores.

*16 bits.* A token's row is D / 8 vectors of 16 bytes. Both the copies (eight lanes, eight
neighbouring vectors of a row or two) and `ldmatrix` (eight lanes, the same vector of eight rows)
must hit different eighths of 128 bytes, so vectors trade places in a row, by the row's number:

    D 64, 128, 256   vector v of row r lies at v ^ (r % 8)      D 64:   row 0   0 1 2 3 4 5 6 7
    D 96             192 bytes: every other row begins half             row 1   1 0 3 2 5 4 7 6
                     way round, v ^ (r / 2 % 4) does the rest           row 2   2 3 0 1 6 7 4 5  …

A step further on along D flips bits of the place, a step along the rows adds a constant, so that an
address costs one instruction. `ldmatrix` fetches four 8 × 8 tiles: for keys two halves of 16
dimensions of 8 keys twice, for values (transposed) 16 keys of 8 dimensions twice.

*8 bits* (`quantized_kv`). A token's row in a stage is D bytes, D / 16 vectors, and the stage ends
with its scales, which are copied one by one, since behind the row's end they must be zeros and not
somebody's NaN:

    keys, a tile of rows of D bytes │ values, as many │ scales of the keys │ scales of the values

    D 128, 256   vector v of row r lies at v ^ (r % 8)      128 bytes a row, or twice that
    D 96         v ^ (r / 4 % 2)                             96: four rows begin at other quarters
    D 64         v ^ (r / 2 % 4)                             64: every other row begins half way

`ldmatrix` moves rows of 16 bytes, whatever they mean: eight of them are 8 keys of 16 dimensions,
and a lane gets four bytes, of key lane // 4 the dimensions 4·quad to 4·quad + 3, or transposed, of
the keys 2·quad and 2·quad + 1 the two dimensions 2·(lane // 4) and the next:

    word of a key              d0 d1 d2 d3     widened   d0 d2 │ d1 d3
    word of two keys k and l   k0 k1 l0 l1               k0 l0 │ k1 l1

So one read serves twice the keys or dimensions; of a tile of but 16 keys it is two vectors of them,
for this step along D and the next. A word of a key is the share of both halves of a
product's 16 columns, in an order that queries are read in, too. A word of two keys is the share of
two products: of even dimensions and of odd ones, and what a lane sums in the end is

    product 2·s, columns 2·quad, 2·quad + 1        dimensions 16·s + 4·quad, + 2
    product 2·s + 1                                dimensions 16·s + 4·quad + 1, + 3

The product with values is one of bfloat16 whatever the model's dtype: `attention_decode_pool` says
why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numba import cuda, int32, int64, uint8, uint16, uint32

from kernels.cuda.attention_prefill_layout import LAYOUTS
from kernels.cuda.instructions.async_copies import copy_word_async
from kernels.cuda.instructions.conversions import PAIR_CONVERSIONS
from kernels.cuda.instructions.eight_bits import WIDEN
from kernels.cuda.instructions.tiles import (
    LOWER_HALVES,
    MULTIPLY_TILES,
    UPPER_HALVES,
    choose_bytes,
    load_tiles,
    load_transposed_tiles,
)
from kernels.cuda.instructions.vectors import load_word, store_word
from kernels.cuda.quantized_kv import SCALE_BYTES, VALUE_DTYPE_8_BITS, head_bytes
from kernels.cuda.variant import DeviceFunction, Local, Pointer, Scalar, Scalars

# (shift, mask) by head size: vector v of row r lies at v ^ (r >> shift & mask).
SWIZZLES = {64: (0, 7), 96: (1, 3), 128: (0, 7), 256: (0, 7)}
SWIZZLES_8_BITS = {64: (1, 3), 96: (2, 1), 128: (0, 7), 256: (0, 7)}

VECTOR_BYTES = 16


def sum_columns(head_size: int) -> int:
    """Return the fragments of a tile of rows of the sums: 8 dimensions each, then the mass."""
    return head_size // 8 + 1


@dataclass(frozen=True, slots=True)
class PrefillPool:
    """One kind of pool, and what its tiles are in shared memory, in elements of the pool.

    `value_dtype`: of values and weights in their product. `element`: Numba's type of the pool's
    elements. `vector`: of 16 bytes. `head_elements`: of a kv head of a block, of K or of V.
    `stage`: of a tile's keys, values and scales. `shift`, `mask`: the swizzle.

    Device functions:

        query_words(query, element, quad)             this lane's share of A for the 16 dimensions
                                                      from `element` on, two words of a row
        key_place(lane), value_place(lane)            where the lane's row of the first read lies,
                                                      in the keys and in the values of a stage
        copy_scales(tiles, element, pool, block_tables, first_entry, block_stride, key_offset,
                    value_offset, kv_head, first_key, first_seen, last_key)
                                                      start copying a tile's scales to `element` on
        add_keys(scores, words, left, tiles, place, step)
                                                      scores += queries of 16 dimensions · keys
        add_values(sums, words, weights, tiles, place, pair)
                                                      sums += weights of 16 keys · values
        store_row(out, element, sums, fragment, i, share, quad)
                                                      write a row of the output from numbers i and
                                                      i + 1 of the sums from `fragment` on
    """

    has_scales: bool
    value_dtype: str
    element: Any
    vector: int
    head_elements: int
    stage: int
    shift: int
    mask: int
    query_words: DeviceFunction
    key_place: DeviceFunction
    value_place: DeviceFunction
    copy_scales: DeviceFunction
    add_keys: DeviceFunction
    add_values: DeviceFunction
    store_row: DeviceFunction


def make_prefill_pool(
    dtype: str, kv_dtype: str | None, head_size: int, block_size: int, is_read: DeviceFunction
) -> PrefillPool:
    """Return the functions for a pool of `kv_dtype`, or of the model's own dtype.

    `is_read`: as of `PrefillWindow`.
    """
    if kv_dtype is None:
        return _make_16_bits(dtype, head_size, block_size)
    return _make_8_bits(dtype, kv_dtype, head_size, block_size, is_read)


def _make_column(flips: int) -> DeviceFunction:
    """Return where a lane's row of 16 dimensions lies, `flips` of which the swizzle permutes."""

    @cuda.jit(device=True, inline="always")
    def column(place: Scalar, step: Scalar) -> Scalar:
        return int64(place ^ (step % flips * 16)) + step // flips * flips * 16

    return column


def _make_multiply_rows(dtype: str, row_tiles: int, stride: int) -> DeviceFunction:
    """Return what multiplies a warp's tiles of rows with the columns of two tiles of 8.

    The sums of a second tile of rows are `stride` fragments behind those of the first.
    """
    multiply = MULTIPLY_TILES[dtype]

    @cuda.jit(device=True, inline="always")
    def multiply_rows(sums: Local, n: Scalar, left: Local, first: Scalars, second: Scalars) -> None:
        for m in range(row_tiles):
            a = (left[m, 0], left[m, 1], left[m, 2], left[m, 3])
            multiply(sums, m * stride + n, a, first)
            multiply(sums, m * stride + n + 1, a, second)

    return multiply_rows


def _make_place(head_size: int, vector: int, tokens: int, shift: int, mask: int) -> DeviceFunction:
    """Return where a lane's row of a first read lies, of 32 tokens, or of 16 and two vectors."""
    token_bits = tokens.bit_length() - 1

    @cuda.jit(device=True, inline="always")
    def place(lane: Scalar) -> Scalar:
        vector_of_lane = (lane >> token_bits) ^ (lane >> shift & mask)
        return (lane & tokens - 1) * head_size + vector * vector_of_lane

    return place


def _make_16_bits(dtype: str, head_size: int, block_size: int) -> PrefillPool:
    shift, mask = SWIZZLES[head_size]
    column = _make_column(2 if head_size == 96 else 4)
    vector = VECTOR_BYTES // 2
    steps, vectors = head_size // 16, head_size // vector
    layout = LAYOUTS[head_size]
    keys, key_tiles = layout.keys, layout.keys // 8
    multiply_keys = _make_multiply_rows(dtype, layout.row_tiles, key_tiles)
    multiply_values = _make_multiply_rows(dtype, layout.row_tiles, sum_columns(head_size))
    pack = PAIR_CONVERSIONS[dtype].pack

    @cuda.jit(device=True, inline="always")
    def query_words(query: Pointer, element: Scalar, quad: Scalar) -> tuple[Scalar, Scalar]:
        first = element + 2 * quad
        return load_word(query, first), load_word(query, first + 8)

    @cuda.jit(device=True, inline="always")
    def key_place(lane: Scalar) -> Scalar:
        row = (lane >> 4 << 3) + (lane & 7)
        return row * head_size + vector * ((lane >> 3 & 1) ^ (lane >> shift & mask))

    @cuda.jit(device=True, inline="always")
    def add_keys(
        scores: Local, words: Local, left: Local, tiles: Pointer, place: Scalar, step: Scalar
    ) -> None:
        first = column(place, step)
        for pair in range(key_tiles // 2):
            load_tiles(words, 0, tiles, first + pair * 16 * head_size)
            low, high = (words[0, 0], words[0, 1]), (words[0, 2], words[0, 3])
            multiply_keys(scores, 2 * pair, left, low, high)

    @cuda.jit(device=True, inline="always")
    def add_values(
        sums: Local, words: Local, weights: Local, tiles: Pointer, place: Scalar, pair: Scalar
    ) -> None:
        for step in range(steps):
            first = column(place, step) + pair * 16 * head_size
            load_transposed_tiles(words, 0, tiles, first)
            low, high = (words[0, 0], words[0, 1]), (words[0, 2], words[0, 3])
            multiply_values(sums, 2 * step, weights, low, high)

    @cuda.jit(device=True, inline="always")
    def store_row(
        out: Pointer, element: Scalar, sums: Local,
        fragment: Scalar, i: Scalar, share: Scalar, quad: Scalar,
    ) -> None:  # fmt: skip
        first = element + 2 * quad
        for n in range(vectors):
            low, high = sums[fragment + n, i] * share, sums[fragment + n, i + 1] * share
            store_word(out, first + 8 * n, pack(low, high))

    return PrefillPool(
        has_scales=False,
        value_dtype=dtype,
        element=uint16,
        vector=vector,
        head_elements=block_size * head_size,
        stage=2 * keys * head_size,
        shift=shift,
        mask=mask,
        query_words=query_words,
        key_place=key_place,
        value_place=_make_place(head_size, vector, 16, shift, mask),
        copy_scales=None,
        add_keys=add_keys,
        add_values=add_values,
        store_row=store_row,
    )


def _make_8_bits(
    dtype: str, kv_dtype: str, head_size: int, block_size: int, is_read: DeviceFunction
) -> PrefillPool:
    shift, mask = SWIZZLES_8_BITS[head_size]
    column = _make_column({64: 4, 96: 2, 128: 8, 256: 8}[head_size])
    layout = LAYOUTS[head_size]
    steps, keys = head_size // 16, layout.keys
    key_tiles, block_shift = keys // 8, block_size.bit_length() - 1
    first_scale, head_elements = block_size * head_size, head_bytes(head_size, block_size)
    multiply_keys = _make_multiply_rows(dtype, layout.row_tiles, key_tiles)
    multiply_values = _make_multiply_rows(
        VALUE_DTYPE_8_BITS, layout.row_tiles, sum_columns(head_size)
    )
    widen_keys, widen_values = WIDEN[kv_dtype, dtype], WIDEN[kv_dtype, VALUE_DTYPE_8_BITS]
    steps_at_once = 32 // min(keys, 32)  # of 16 dimensions, in one read of keys
    pack = PAIR_CONVERSIONS[dtype].pack

    @cuda.jit(device=True, inline="always")
    def query_words(query: Pointer, element: Scalar, quad: Scalar) -> tuple[Scalar, Scalar]:
        low = load_word(query, element + 4 * quad)
        high = load_word(query, element + 4 * quad + 2)
        return choose_bytes(low, high, LOWER_HALVES), choose_bytes(low, high, UPPER_HALVES)

    @cuda.jit(device=True, inline="always")
    def copy_scales(
        tiles: Pointer, element: Scalar, pool: Pointer, block_tables: Pointer, first_entry: Scalar,
        block_stride: Scalar, key_offset: Scalar, value_offset: Scalar, kv_head: Scalar,
        first_key: Scalar, first_seen: Scalar, last_key: Scalar,
    ) -> None:  # fmt: skip
        number = int32(cuda.threadIdx.x)  # first those of the keys, then those of the values
        if number < 2 * keys:
            key = int32(first_key + number % keys)
            entry = int32(first_entry + (min(key, last_key) >> block_shift))
            place = int32(kv_head * head_elements + first_scale + 4 * (key % block_size))
            source = int64(block_tables[entry]) * block_stride + place
            source += key_offset if number < keys else value_offset
            is_wanted = key <= last_key and is_read(key, first_seen)
            copy_word_async(tiles, element + 4 * number, pool, source, is_wanted)

    @cuda.jit(device=True, inline="always")
    def add_keys(
        scores: Local, words: Local, left: Local, tiles: Pointer, place: Scalar, step: Scalar
    ) -> None:
        pairs = cuda.local.array((1, 4), uint32)
        first = column(place, step)
        for four in range(-(-key_tiles // 4)):
            if step % steps_at_once == 0:
                load_tiles(words, 0, tiles, first + four * 32 * head_size)
            for two in range(2 // steps_at_once):
                t = 2 * (two + step % steps_at_once)
                widen_keys(pairs, 0, words[0, t], words[0, t + 1])
                low, high = (pairs[0, 0], pairs[0, 1]), (pairs[0, 2], pairs[0, 3])
                multiply_keys(scores, 4 * four + 2 * two, left, low, high)

    @cuda.jit(device=True, inline="always")
    def add_values(
        sums: Local, words: Local, weights: Local, tiles: Pointer, place: Scalar, pair: Scalar
    ) -> None:
        pairs = cuda.local.array((1, 4), uint32)
        for two in range(steps // 2):
            first = column(place, 2 * two) + pair * 16 * head_size
            load_transposed_tiles(words, 0, tiles, first)
            for half in range(2):
                widen_values(pairs, 0, words[0, 2 * half], words[0, 2 * half + 1])
                even, odd = (pairs[0, 0], pairs[0, 2]), (pairs[0, 1], pairs[0, 3])
                multiply_values(sums, 4 * two + 2 * half, weights, even, odd)

    @cuda.jit(device=True, inline="always")
    def store_row(
        out: Pointer, element: Scalar, sums: Local,
        fragment: Scalar, i: Scalar, share: Scalar, quad: Scalar,
    ) -> None:  # fmt: skip
        first = element + 4 * quad
        for step in range(steps):
            even, odd = fragment + 2 * step, fragment + 2 * step + 1
            for j in range(2):
                low, high = sums[even, i + j] * share, sums[odd, i + j] * share
                store_word(out, first + 16 * step + 2 * j, pack(low, high))

    return PrefillPool(
        has_scales=True,
        value_dtype=VALUE_DTYPE_8_BITS,
        element=uint8,
        vector=VECTOR_BYTES,
        head_elements=head_elements,
        stage=2 * keys * (head_size + SCALE_BYTES),
        shift=shift,
        mask=mask,
        query_words=query_words,
        key_place=_make_place(head_size, VECTOR_BYTES, min(keys, 32), shift, mask),
        value_place=_make_place(head_size, VECTOR_BYTES, 16, shift, mask),
        copy_scales=copy_scales,
        add_keys=add_keys,
        add_values=add_values,
        store_row=store_row,
    )
