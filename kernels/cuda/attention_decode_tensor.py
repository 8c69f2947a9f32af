"""Decode attention for 16-bit floats: keys and values go from the pool straight to tensor cores.

One block of threads works on one kv head of one row, a warp on one tile of 16 tokens after the
other; `attention_chunks` says which, and how the warps' results meet. Within a warp both products
are turned on their side, so that the *tokens*, of which there are many, fill the 16 rows of the
tensor core's tile, and the heads of the group, of which there are few, its 8 columns:

    scores [16 tokens, 8 heads]  =  K [16 tokens, D]  ·  Qᵀ [D, 8 heads]       D/16 products
    sums   [D, 8 heads]         +=  Vᵀ [D, 16 tokens]  ·  weights [16 tokens, 8 heads]   D/16

A group of up to 8 heads takes one column tile, one of 9 to 16 two (`head_tiles`); columns behind
the group's end hold zero queries and are never written. Each tile of keys and values is read once
and multiplied with both: two warps that read the same tile would need fewer registers each, but
their reads would pass the first cache twice, and hold no more bytes in flight.

Fragments, with `quad_row` = lane // 4 and `quad` = lane % 4 (drawn in `instructions.tiles`), of a
pool of 16 bits; those of 8 bits are drawn in `attention_decode_pool`, which reads both:

*Keys* (A of the first product). A lane reads 16 bytes of token `quad_row` and of token
`quad_row` + 8 for every 32 dimensions; the four lanes of a quad row read 64 bytes of a token:

    dimension of a token     0 … 7 │ 8 … 15 │ 16 … 23 │ 24 … 31 │ 32 …
    lane of the quad row       0   │   1    │    2    │    3    │  0, the next vector
    words of its vector     0 1 2 3

The tensor core wants the words of dimensions 2·quad and 2·quad + 8 here, but the order of the
dimensions is free as long as queries agree: words 0 and 1 go into one product, 2 and 3 into the
next, and queries (B) are read the same way, a head where the keys have a token.

*Scores* (C). Lane holds tokens `quad_row` and `quad_row` + 8 of the heads 2·quad and 2·quad + 1.
Peak and mass of these two heads live in the same lane; a maximum over tokens is three shuffles over
the quad rows. Any peak serves that keeps powers of two in range, so the peaks follow the largest
scores only once one of a column tile's heads is ahead by 8: the shuffles, and scaling the sums
anew, are needed in a warp's first tile of a chunk and hardly ever after it. *Weights*: the scores'
tile, rounded and packed two heads a word, transposed by one instruction a half, is the B of the
second product.

*Values* (A of the second product, transposed). A lane reads 16 bytes, 8 dimensions, of each of the
tokens 2·quad, 2·quad + 1 and the same + 8; the eight quad rows read 128 bytes of a token, one
strip of 64 dimensions. A tile of 16 rows takes dimension 2·i of every lane's 8 as its rows 0 … 7
and 2·i + 1 as rows 8 … 15, so its words are halves of two neighbouring tokens' words i:

    token 2·quad      word i   [ dim 2i │ dim 2i+1 ]     lower halves → a0 (row quad_row)
    token 2·quad + 1  word i   [ dim 2i │ dim 2i+1 ]     upper halves → a1 (row quad_row + 8)

Head size 96 has one strip of 64 and one of 32, read by 8 bytes a lane: 4 dimensions, 2 tiles.

*Sums* (C): tile i of strip s, in words of a lane:

    c0  dim 64s + 8·quad_row + 2i,     head 2·quad       c1  the same dim, head 2·quad + 1
    c2  dim 64s + 8·quad_row + 2i + 1, head 2·quad       c3  the same dim, head 2·quad + 1

Slots past the row's end hold anything, NaN included. Their scores are replaced by -∞; their weight
is then 0, but 0 · NaN is NaN, so in the one tile where the row ends their values become zeros.

What limits it (an argument; `make gpu` measures). The pool is read once, so the memory should be
the limit: 4.8 TB/s over 132 multiprocessors are 36 KB a microsecond each, and at 700 ns latency
that needs 25 KB in flight in each. A tile of keys and values at D 128 is 8 KB a warp. Registers are
what it lies in, and they are loaded anew the moment the products have consumed them: keys of the
next tile right after the scores, values right after the sums. While a warp waits for its keys its
values are under way too, so without a second set of registers nearly all of its 8 KB are always in
flight. A second set would cost the registers of a third of the warps and gain nothing. At 168
registers a thread three blocks of four warps fit: 96 KB, almost four times the need; two column
tiles need up to 255, two blocks fit, 64 KB. At D 64 a tile is half as large, and four blocks fit,
64 KB. Arithmetic is far from a limit: a tile at D 128 is about 280 instructions of a warp, 70
cycles of a multiprocessor's four schedulers, while its 8 KB take about 400 cycles to arrive; some
50 of them are left out where no peak rises. Merging the warps once a chunk adds about a quarter to
that, and two barriers, during which every warp's next tile is already under way. Reads are of whole
32-byte sectors, 64 or 128 bytes beside each other.

*Waves*, at D 128 and 8 kv heads: 396 blocks are at work at a time. 128 rows are 1024 blocks, the
last 232 of which still are two to a multiprocessor for the most part. 64 rows are 512: the last 116
run with 32 KB in flight in each of as many multiprocessors, 3.7 MB, while the memory takes 3.4 (4.8
TB/s for 700 ns): enough as long as they do not wait, so the tail, a quarter of the work, may be
somewhat slower than the rest. Splitting fills it, but each chunk's partials of 5 KB, written and
read, are 8 % of its 128 KB. One row of 32768 tokens has 64 chunks of 512 and is split over 32
blocks: 256 blocks, two to a multiprocessor, 97 % of them busy, 64 KB in flight, partials 4 %, and
the merge.

Of a pool of 8 bits half as many bytes are in flight, 48 KB at D 128, and the same tokens take half
the time; widening adds some 130 instructions to a tile at D 128, so about 100 cycles of arithmetic
stand beside 200 of memory. With more than eight heads a group, or at D 64, the arithmetic with the
merges takes nearly as long as the memory (docs/cuda-kernel-counts.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from numba import cuda, float32, int32, int64, uint32

from kernels.cuda.attention_chunks import NO_PEAK, SHARERS, TILE_TOKENS, cut_row
from kernels.cuda.attention_decode_pool import make_decode_pool
from kernels.cuda.attention_partials import THREADS, PartialLayout, make_partial_functions
from kernels.cuda.attention_variant import SLACK
from kernels.cuda.instructions.conversions import (
    FULL_WARP,
    PAIR_CONVERSIONS,
    exp2,
    maximum,
)
from kernels.cuda.instructions.tiles import MULTIPLY_TILES, transpose_tile
from kernels.cuda.lanes import lane_and_warp
from kernels.cuda.variant import Pointer, Scalar

HEADS_OF_TILE = 8  # columns of a tensor core's tile
MINUS_INFINITY = float32(-math.inf)


def tensor_layout(head_size: int, group: int) -> PartialLayout:
    """Return how the sums of a block lie in its threads."""
    head_tiles, products = -(-group // HEADS_OF_TILE), head_size // 16

    @cuda.jit(device=True, inline="always")
    def place(entry: Scalar, warp: Scalar, lane: Scalar) -> tuple[Scalar, Scalar]:
        """Return head and dimension of number `warp` of the lane's sums of tile `entry`."""
        head = entry // products * HEADS_OF_TILE + lane % 4 * 2 + warp % 2
        strip, tile = entry % products // 4, entry % products % 4
        dims_of_lane = min(8, (head_size - 64 * strip) // 8)
        return head, 64 * strip + lane // 4 * dims_of_lane + 2 * tile + warp // 2

    return PartialLayout(
        parts=1,
        heads=group,
        entries=head_tiles * products,
        slots=head_tiles,
        heads_of_slot=2,
        place=place,
    )


def make_tensor_decode(
    dtype: str, head_size: int, group: int, block_size: int, kv_dtype: str | None = None
) -> Callable[..., None]:
    """Return the kernel for 16-bit floats; parameters as of `DecodeVariant`."""
    pool_ = make_decode_pool(dtype, kv_dtype, head_size, block_size)
    load_query, load_keys, load_values = pool_.load_query, pool_.load_keys, pool_.load_values
    clear_values, key_tile, value_tile = pool_.clear_values, pool_.key_tile, pool_.value_tile
    has_scales, head_elements = pool_.has_scales, pool_.head_elements
    layout = tensor_layout(head_size, group)
    functions = make_partial_functions(layout, dtype, head_size, group)
    clear, merge_warps, write_out = functions.clear, functions.merge_warps, functions.write_out
    multiply_keys, multiply_values = MULTIPLY_TILES[dtype], MULTIPLY_TILES[pool_.value_dtype]
    pack = PAIR_CONVERSIONS[pool_.value_dtype].pack
    head_tiles = layout.slots
    states = 2 * head_tiles  # heads whose peak and mass a lane keeps
    products = head_size // 16  # tiles of dimensions
    columns = head_size // 32  # vectors of a query that a lane holds, of two products each
    queries_shape, sums_shape = (head_tiles * columns, 4), (layout.entries, 4)
    keys_shape, values_shape = (pool_.key_rows, 4), (pool_.value_rows, 4)
    total_shape = (layout.entries, THREADS)

    @cuda.jit(device=True, inline="always")
    def following(
        tile: Scalar, end: Scalar, splits: Scalar, chunk_tiles: Scalar
    ) -> tuple[Scalar, Scalar]:
        """Return the warp's tile after `tile`, and the end of the chunk that it is of."""
        tile = int32(tile + SHARERS)
        if tile >= end:
            tile = int32(tile + (splits - 1) * chunk_tiles)
            end = int32(end + splits * chunk_tiles)
        return tile, end

    def attention_decode(
        out: Pointer,
        query: Pointer,
        pool: Pointer,
        block_tables: Pointer,
        seq_lens: Pointer,
        partials: Pointer,
        scale_log2e: Scalar,
        query_stride: Scalar,
        table_width: Scalar,
        block_stride: Scalar,
        key_offset: Scalar,
        value_offset: Scalar,
    ) -> None:
        """Attend with the group of kv head blockIdx.y of row blockIdx.x; see DecodeVariant."""
        row, kv_head = int64(cuda.blockIdx.x), int64(cuda.blockIdx.y)
        split, splits = int32(cuda.blockIdx.z), int32(cuda.gridDim.z)
        lane, warp = lane_and_warp()
        quad_row, quad = int32(lane // 4), int32(lane % 4)

        queries = cuda.local.array(queries_shape, uint32)
        for n in range(head_tiles):
            head = HEADS_OF_TILE * n + quad_row
            first = row * query_stride + (kv_head * group + head) * head_size
            for c in range(columns):
                for word in range(4):
                    queries[n * columns + c, word] = uint32(0)
                if head < group:
                    load_query(queries, n * columns + c, query, first, c, quad)

        keys = cuda.local.array(keys_shape, uint32)
        values = cuda.local.array(values_shape, uint32)
        key_scales = cuda.local.array(2, float32)  # of the tokens quad_row, quad_row + 8
        value_scales = cuda.local.array(2, float32)
        scores = cuda.local.array((head_tiles, 4), float32)
        weights = cuda.local.array((head_tiles, 2), uint32)
        sums = cuda.local.array(sums_shape, float32)
        peak = cuda.local.array(states, float32)
        mass = cuda.local.array(states, float32)
        top = cuda.local.array(states, float32)
        shrink = cuda.local.array(states, float32)
        total = cuda.shared.array(total_shape, float32)
        total_peak = cuda.local.array(head_tiles, float32)
        total_mass = cuda.local.array(head_tiles, float32)
        clear(total, total_peak, total_mass)

        # The warp's tiles, of all chunks of this block, one behind the other: `tile` is computed
        # with while `next_tile` is read. Its block was looked up a tile before, on the way through
        # the wait for that tile's keys: where it is asked for right before it is needed, the reads
        # start only when the lookup has come back.
        seq_len = int32(seq_lens[row])
        num_tiles, chunk_tiles = cut_row(seq_len)
        table = int32(row * table_width)
        base = kv_head * head_elements
        next_tile = int32(split * chunk_tiles + warp)
        next_end = int32((split + 1) * chunk_tiles)
        block = int32(0)
        if next_tile < num_tiles:
            block = block_tables[int32(table + next_tile * TILE_TOKENS // block_size)]
            place = int64(block) * block_stride + base
            slot = int32(next_tile * TILE_TOKENS % block_size)
            load_keys(keys, key_scales, pool, key_offset + place, slot, lane)
            load_values(values, value_scales, pool, value_offset + place, slot, lane)
            next_tile, next_end = following(next_tile, next_end, splits, chunk_tiles)
            if next_tile < num_tiles:
                block = block_tables[int32(table + next_tile * TILE_TOKENS // block_size)]

        chunk = split
        while chunk * chunk_tiles < num_tiles:
            for j in range(states):
                peak[j] = NO_PEAK
                mass[j] = float32(0)
            for m in range(head_tiles * products):
                for c in range(4):
                    sums[m, c] = float32(0)
            end = int32(min(num_tiles, (chunk + 1) * chunk_tiles))
            tile = int32(chunk * chunk_tiles + warp)
            while tile < end:
                has_next = next_tile < num_tiles

                # scores = K · Qᵀ
                for n in range(head_tiles):
                    for i in range(4):
                        scores[n, i] = float32(0)
                for m in range(products):
                    a = key_tile(keys, m)
                    for n in range(head_tiles):
                        q, word = n * columns + m // 2, m % 2 * 2
                        multiply_keys(scores, n, a, (queries[q, word], queries[q, word + 1]))
                if has_scales:
                    for n in range(head_tiles):
                        for i in range(4):
                            scores[n, i] *= key_scales[i // 2]

                place = int64(block) * block_stride + base
                slot = int32(next_tile * TILE_TOKENS % block_size)
                if has_next:
                    load_keys(keys, key_scales, pool, key_offset + place, slot, lane)

                # Online softmax of each head over the tile's 16 tokens.
                num_valid = int32(seq_len - tile * TILE_TOKENS)
                valid_of_lane = int32(num_valid - quad_row)
                for n in range(head_tiles):
                    for i in range(4):
                        is_valid = i // 2 * 8 < valid_of_lane
                        score = scores[n, i] * scale_log2e
                        scores[n, i] = score if is_valid else MINUS_INFINITY
                rises = False
                for j in range(states):
                    n, odd = j // 2, j % 2
                    top[j] = maximum(scores[n, odd], scores[n, 2 + odd])
                    rises |= top[j] > peak[j] + SLACK
                if cuda.ballot_sync(FULL_WARP, rises) != 0:
                    for j in range(states):
                        new_peak = maximum(peak[j], top[j])
                        for step in range(3):
                            other = cuda.shfl_xor_sync(FULL_WARP, new_peak, 4 << step)
                            new_peak = maximum(new_peak, other)
                        shrink[j] = exp2(peak[j] - new_peak)
                        peak[j] = new_peak
                        mass[j] *= shrink[j]
                    for m in range(head_tiles * products):
                        for c in range(4):
                            sums[m, c] *= shrink[m // products * 2 + c % 2]
                for j in range(states):
                    n, odd = j // 2, j % 2
                    for i in range(odd, 4, 2):
                        scores[n, i] = exp2(scores[n, i] - peak[j])
                    mass[j] += scores[n, odd] + scores[n, 2 + odd]
                for n in range(head_tiles):
                    for half in range(2):
                        if has_scales:
                            is_valid = 8 * half < valid_of_lane
                            scale = value_scales[half] if is_valid else float32(0)
                            scores[n, 2 * half] *= scale
                            scores[n, 2 * half + 1] *= scale
                        both = pack(scores[n, 2 * half], scores[n, 2 * half + 1])
                        weights[n, half] = transpose_tile(both)
                clear_values(values, num_valid, quad)

                # sums += Vᵀ · weights
                for m in range(products):
                    a = value_tile(values, m)
                    for n in range(head_tiles):
                        multiply_values(sums, n * products + m, a, (weights[n, 0], weights[n, 1]))

                if has_next:
                    load_values(values, value_scales, pool, value_offset + place, slot, lane)
                    next_tile, next_end = following(next_tile, next_end, splits, chunk_tiles)
                    if next_tile < num_tiles:
                        block = block_tables[int32(table + next_tile * TILE_TOKENS // block_size)]
                tile = int32(tile + SHARERS)

            # A lane's masses are of its own tokens: over the quad rows, those of all.
            for j in range(states):
                for step in range(3):
                    mass[j] += cuda.shfl_xor_sync(FULL_WARP, mass[j], 4 << step)
            merge_warps(
                sums, peak, mass, total, total_peak, total_mass, partials, row, kv_head, chunk
            )
            chunk = int32(chunk + splits)

        if splits == 1:
            write_out(out, total, total_mass, row, kv_head)

    return attention_decode
