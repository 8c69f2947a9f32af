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
their reads would pass the first cache twice, and hold no more bytes in flight. What lasts longer
than a tile, queries first of all, is where `attention_decode_room` has room for it.

Fragments, with `quad_row` = lane // 4 and `quad` = lane % 4 (drawn in `instructions.tiles`), of a
pool of 16 bits; those of 8 bits are drawn in `attention_decode_pool`, which reads both:

*Keys* (A of the first product). A lane reads 16 bytes of token `quad_row` and of token
`quad_row` + 8 for every 32 dimensions; the four lanes of a quad row read 64 bytes of a token:

    dimension of a token     0 … 7 │ 8 … 15 │ 16 … 23 │ 24 … 31 │ 32 …
    lane of the quad row       0   │   1    │    2    │    3    │  0, the next vector
    words of its vector     0 1 2 3

The order of the dimensions is free as long as queries agree: words 0 and 1 go into one product, 2
and 3 into the next, and queries (B) are read the same way, a head where the keys have a token.

*Scores* (C). Lane holds tokens `quad_row` and `quad_row` + 8 of the heads 2·quad and 2·quad + 1.
Scaling them and taking the peak off is one step, of which the power of two is a weight (`powers`).
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

Head size 96 has one strip of 64 and one of 32, read by 8 bytes a lane: 4 dimensions, 2 tiles. The
sums (C) are drawn in `attention_decode_layout`.

Slots past the row's end hold anything, NaN included, and so may those before a window. In the one
tile where the row ends, and the one where the window begins, they are left out
(`attention_decode_masks`).

What limits it (an argument; `make gpu` measures). The pool is read once, so memory should be the
limit: 4.8 TB/s over 132 multiprocessors are 36 KB a microsecond each, which at 700 ns latency needs
25 KB in flight in each. A tile of keys and values at D 128 is 8 KB a warp. Registers are what it
lies in, and they are loaded anew the moment the products have consumed them: keys of the next tile
right after the scores, values right after the sums. While a warp waits for its keys its values are
under way too, so without a second set of registers nearly all of its 8 KB are always in flight. At
168 registers a thread three blocks of four warps fit: 96 KB, almost four times the need; two column
tiles need up to 255, two blocks fit, 64 KB. At D 64 a tile is half as large, and four blocks fit,
64 KB; and at D 256, whose tile is 16 KB a warp, two of them, 128 KB, of which one block alone has
64. Arithmetic is far from a limit: a tile at D 128 is about 170 instructions of a warp, 45
cycles of a multiprocessor's four schedulers, while its 8 KB take about 400 cycles to arrive; some
70 more run where a peak rises, and a dozen where the row ends. Merging the warps once a chunk adds
about a fifth to that, and two barriers, during which every warp's next tile is already under way.
Reads are of whole 32-byte sectors, 64 or 128 bytes beside each other.

Of a pool of 8 bits half as many bytes are in flight, 64 KB at D 256, 48 KB at D 128 and 32 KB at
D 64, and the same tokens take half the time; placing bytes adds some 110 instructions to a tile at
D 128 (float8 some 190), so about 60 cycles of arithmetic stand beside 200 of memory
(docs/cuda-kernel-counts.md).
"""

from __future__ import annotations

from collections.abc import Callable

from numba import cuda, float32, int32, int64, uint32

from kernels.cuda.attention_caps import share_of_cap
from kernels.cuda.attention_chunks import (
    NO_PEAK,
    SHARERS,
    TILE_TOKENS,
    least_chunk_tiles,
    make_cut_row,
)
from kernels.cuda.attention_decode_layout import tensor_layout
from kernels.cuda.attention_decode_masks import make_decode_masks
from kernels.cuda.attention_decode_pool import make_decode_pool
from kernels.cuda.attention_decode_room import make_decode_room
from kernels.cuda.attention_merge import make_merge_chunks
from kernels.cuda.attention_partials import THREADS, make_partial_functions, part_of_block
from kernels.cuda.attention_variant import SLACK
from kernels.cuda.instructions.addresses import kept, multiply_add_wide
from kernels.cuda.instructions.conversions import FULL_WARP, PAIR_CONVERSIONS, exp2, maximum
from kernels.cuda.instructions.early_launch import fetch_ahead, let_next_begin, wait_for_previous
from kernels.cuda.instructions.exact_float32 import multiply_add
from kernels.cuda.instructions.placed_bytes import MINUS_OFFSET
from kernels.cuda.instructions.tiles import MULTIPLY_TILES, transpose_tile
from kernels.cuda.lanes import lane_and_warp
from kernels.cuda.variant import Pointer, Scalar


def make_tensor_decode(
    dtype: str,
    head_size: int,
    group: int,
    block_size: int,
    kv_dtype: str | None = None,
    *,
    has_window: bool,
    has_sinks: bool = False,
    has_cap: bool = False,
) -> Callable[..., None]:
    """Return the kernel for 16-bit floats; parameters as of `DecodeVariant`."""
    cut_row = make_cut_row(least_chunk_tiles(kv_dtype), has_window=has_window)
    pool_ = make_decode_pool(dtype, kv_dtype, head_size, block_size)
    load_keys, load_values = pool_.load_keys, pool_.load_values
    key_tile, value_tile = pool_.key_tile, pool_.value_tile
    has_scales, has_offsets = pool_.has_scales, pool_.has_offsets
    load_scales, first_scale = pool_.load_scales, pool_.first_scale
    head_elements, key_dims = pool_.head_elements, pool_.key_dims
    tile_bytes = uint32(pool_.tile_bytes)
    score_unit, weight_unit = float32(pool_.score_unit), float32(pool_.weight_unit)
    layout = tensor_layout(head_size, group)
    head_tiles = layout.slots
    room = make_decode_room(pool_, head_size, group, head_tiles)
    make_queries, query_tile, again = room.make_queries, room.query_tile, room.again
    load_queries, share_queries = room.load_queries, room.share_queries
    begin_of_chunk, find_row, steeper = room.begin_of_chunk, room.find_row, room.steeper
    functions = make_partial_functions(
        layout, dtype, head_size, group, pool_.sum_unit, again, has_sinks=has_sinks
    )
    clear, merge_warps, write_out = functions.clear, functions.merge_warps, functions.write_out
    merge_chunks = make_merge_chunks(layout, again)
    multiply_keys, multiply_values = MULTIPLY_TILES[dtype], MULTIPLY_TILES[pool_.value_dtype]
    pack = PAIR_CONVERSIONS[pool_.value_dtype].pack
    masks = make_decode_masks(pool_, head_tiles)
    hide_from, hide_before = masks.hide_from, masks.hide_before
    minus_offset = (MINUS_OFFSET, MINUS_OFFSET, MINUS_OFFSET, MINUS_OFFSET)
    states, total_shape = 2 * head_tiles, layout.entries * THREADS  # heads that a lane has peaks of
    products = head_size // 16  # tiles of dimensions
    vectors_shape, sums_shape = (head_tiles, 4), (layout.entries, 4)
    keys_shape, values_shape = (pool_.key_rows, 4), (pool_.value_rows, 4)

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
        tickets: Pointer,
        split_rows: Scalar,
        scale_log2e: Scalar,
        query_stride: Scalar,
        table_width: Scalar,
        block_stride: Scalar,
        key_offset: Scalar,
        value_offset: Scalar,
        window: Scalar,
        sinks: Pointer,
        cap: Scalar,
    ) -> None:
        """Attend with the group of kv head blockIdx.x of a row; see DecodeVariant."""
        let_next_begin()
        row, split, splits = part_of_block(split_rows)
        row, kv_head = again(row), again(int64(cuda.blockIdx.x))
        lane, warp = lane_and_warp()
        quad_row, quad = int32(lane // 4), int32(lane % 4)

        # The warp's tiles, of all chunks of this block, one behind the other: `tile` is computed
        # with while `next_tile` is read. Its block was looked up a tile before, on the way through
        # the wait for that tile's keys: where it is asked for right before it is needed, the reads
        # start only when the lookup has come back. That of the first tile, and the row's length,
        # are looked up before the launch ahead has ended, and the tile is fetched meanwhile.
        seq_len = int32(seq_lens[row])
        first_tile, end_tile, chunk_tiles = cut_row(seq_len, window)
        first_tile, end_tile = again(first_tile), again(end_tile)
        chunk_tiles = again(chunk_tiles)
        table = int32(row * table_width)
        stride = int32(block_stride)
        of_head = kv_head * head_elements
        next_tile = int32(first_tile + split * chunk_tiles + warp)
        next_end = int32(first_tile + (split + 1) * chunk_tiles)
        block = int32(0)
        if next_tile < end_tile:
            block = block_tables[int32(table + next_tile * TILE_TOKENS // block_size)]
            if lane == 0:
                of_tile = of_head + next_tile * TILE_TOKENS % block_size * head_size
                element = multiply_add_wide(block, stride, key_offset + of_tile)
                fetch_ahead(pool, element, tile_bytes)
                element = multiply_add_wide(block, stride, value_offset + of_tile)
                fetch_ahead(pool, element, tile_bytes)
        wait_for_previous()

        queries = make_queries()
        place, first_head = row * query_stride, kv_head * group
        load_queries(queries, query, place, first_head, quad_row, quad)

        vectors = cuda.local.array(vectors_shape, uint32)
        keys = cuda.local.array(keys_shape, uint32)
        values = cuda.local.array(values_shape, uint32)
        key_scales = cuda.local.array(2, float32)  # of the tokens quad_row, quad_row + 8
        value_scales = cuda.local.array(2, float32)
        key_factors = cuda.local.array(2, float32)  # what a score is to be multiplied by
        value_factors = cuda.local.array(2, float32)  # what a weight is
        scores = cuda.local.array((head_tiles, 4), float32)
        starts = cuda.local.array((head_tiles, 4), float32)
        powers = cuda.local.array((head_tiles, 4), float32)
        offsets = cuda.local.array((head_tiles, 4), float32)
        weights = cuda.local.array((head_tiles, 2), uint32)
        sums = cuda.local.array(sums_shape, float32)
        peak = cuda.local.array(states, float32)
        mass = cuda.local.array(states, float32)
        shrink = cuda.local.array(states, float32)
        total = cuda.shared.array(total_shape, float32, alignment=16)
        total_peak = cuda.local.array(head_tiles, float32)
        total_mass = cuda.local.array(head_tiles, float32)
        clear(total, total_peak, total_mass)

        # What the keys' offset adds to each score is the same for all tokens: begun with, less.
        for n in range(head_tiles):
            for i in range(4):
                starts[n, i] = float32(0)
            if has_offsets:
                for m in range(products):
                    b = query_tile(queries, vectors, n, m, lane)
                    multiply_keys(starts, n, minus_offset, b)
        unit = scale_log2e * score_unit

        first_key = kept(key_offset + of_head + quad_row * head_size + quad * key_dims)
        first_value = kept(value_offset + of_head + quad * 2 * head_size + quad_row * 8)
        key_scale = kept(key_offset + of_head + first_scale + 4 * quad_row)
        value_scale = kept(value_offset + of_head + first_scale + 4 * quad_row)
        if next_tile < end_tile:
            slot = next_tile * TILE_TOKENS % block_size
            element = multiply_add_wide(block, stride, first_key) + slot * head_size
            load_keys(keys, pool, element, lane)
            element = multiply_add_wide(block, stride, first_value) + slot * head_size
            load_values(values, pool, element, lane)
            load_scales(key_scales, pool, multiply_add_wide(block, stride, key_scale) + slot * 4)
            element = multiply_add_wide(block, stride, value_scale) + slot * 4
            load_scales(value_scales, pool, element)
            next_tile, next_end = following(next_tile, next_end, splits, chunk_tiles)
            if next_tile < end_tile:
                block = block_tables[int32(table + next_tile * TILE_TOKENS // block_size)]
        share_queries(queries, query, place, first_head, quad_row, quad, warp)

        chunk = split
        while begin_of_chunk(chunk, chunk_tiles, first_tile) < end_tile:
            for j in range(states):
                peak[j] = NO_PEAK
                mass[j] = float32(0)
            for m in range(head_tiles * products):
                for c in range(4):
                    sums[m, c] = float32(0)
            for n in range(head_tiles):
                for c in range(4):
                    offsets[n, c] = float32(0)
            end = int32(min(end_tile, begin_of_chunk(chunk + 1, chunk_tiles, first_tile)))
            tile = int32(begin_of_chunk(chunk, chunk_tiles, first_tile) + warp)
            while tile < end:
                has_next = next_tile < end_tile

                # scores = K · Qᵀ
                for n in range(head_tiles):
                    for i in range(4):
                        scores[n, i] = starts[n, i]
                for m in range(products):
                    a = key_tile(keys, m)
                    for n in range(head_tiles):
                        multiply_keys(scores, n, a, query_tile(queries, vectors, n, m, lane))
                factor = steeper(unit, cap) if has_cap else unit
                for half in range(2):
                    key_factors[half] = factor * key_scales[half] if has_scales else factor
                    value_factors[half] = value_scales[half] * weight_unit if has_scales else unit

                slot = next_tile * TILE_TOKENS % block_size
                if has_next:
                    element = multiply_add_wide(block, stride, first_key) + slot * head_size
                    load_keys(keys, pool, element, lane)
                    element = multiply_add_wide(block, stride, key_scale) + slot * 4
                    load_scales(key_scales, pool, element)

                # Of a score with a cap all factors are in its share of that.
                if has_cap:
                    for n in range(head_tiles):
                        for i in range(4):
                            scores[n, i] = share_of_cap(scores[n, i], key_factors[i // 2])
                    for half in range(2):
                        key_factors[half] = cap

                # Online softmax of each head over the tile's 16 tokens.
                num_valid = int32(seq_len - tile * TILE_TOKENS)
                if num_valid < TILE_TOKENS:
                    hide_from(scores, key_factors, value_factors, values, num_valid, quad_row, quad)
                num_before = int32(num_valid - window)
                if has_window and num_before > 0:
                    hide_before(
                        scores, key_factors, value_factors, values, num_before, quad_row, quad
                    )
                rises = False
                for n in range(head_tiles):
                    for i in range(4):
                        j = 2 * n + i % 2
                        powers[n, i] = multiply_add(scores[n, i], key_factors[i // 2], -peak[j])
                    for odd in range(2):
                        rises |= maximum(powers[n, odd], powers[n, 2 + odd]) > SLACK
                if cuda.ballot_sync(FULL_WARP, rises) != 0:
                    for j in range(states):
                        n, odd = j // 2, j % 2
                        new_peak = maximum(
                            scores[n, odd] * key_factors[0], scores[n, 2 + odd] * key_factors[1]
                        )
                        new_peak = maximum(peak[j], new_peak)
                        for step in range(3):
                            other = cuda.shfl_xor_sync(FULL_WARP, new_peak, 4 << step)
                            new_peak = maximum(new_peak, other)
                        shrink[j] = exp2(peak[j] - new_peak)
                        peak[j] = new_peak
                        mass[j] *= shrink[j]
                        for i in range(odd, 4, 2):
                            powers[n, i] = multiply_add(
                                scores[n, i], key_factors[i // 2], -new_peak
                            )
                            if has_offsets:
                                offsets[n, i] *= shrink[j]
                    for m in range(head_tiles * products):
                        for c in range(4):
                            sums[m, c] *= shrink[m // products * 2 + c % 2]
                for n in range(head_tiles):
                    for i in range(4):
                        powers[n, i] = exp2(powers[n, i])
                    for odd in range(2):
                        mass[2 * n + odd] += powers[n, odd] + powers[n, 2 + odd]
                    for half in range(2):
                        low, high = powers[n, 2 * half], powers[n, 2 * half + 1]
                        if has_scales:
                            low *= value_factors[half]
                            high *= value_factors[half]
                        weights[n, half] = transpose_tile(pack(low, high))
                    if has_offsets:
                        b = (weights[n, 0], weights[n, 1])
                        multiply_values(offsets, n, minus_offset, b)

                # sums += Vᵀ · weights
                for m in range(products):
                    a = value_tile(values, m)
                    for n in range(head_tiles):
                        multiply_values(sums, n * products + m, a, (weights[n, 0], weights[n, 1]))

                if has_next:
                    element = multiply_add_wide(block, stride, first_value) + slot * head_size
                    load_values(values, pool, element, lane)
                    element = multiply_add_wide(block, stride, value_scale) + slot * 4
                    load_scales(value_scales, pool, element)
                    next_tile, next_end = following(next_tile, next_end, splits, chunk_tiles)
                    if next_tile < end_tile:
                        block = block_tables[int32(table + next_tile * TILE_TOKENS // block_size)]
                tile = int32(tile + SHARERS)

            # A lane's masses are of its own tokens: over the quad rows, those of all.
            for j in range(states):
                for step in range(3):
                    mass[j] += cuda.shfl_xor_sync(FULL_WARP, mass[j], 4 << step)
            if has_offsets:
                for m in range(head_tiles * products):
                    for c in range(4):
                        sums[m, c] += offsets[m // products, c]
            merge_warps(
                sums, peak, mass, total, total_peak, total_mass,
                partials, row, kv_head, chunk, splits > 1, split_rows,
            )  # fmt: skip
            chunk = int32(chunk + splits)
        row, split = find_row(row, split, split_rows)
        num_chunks = int32((end_tile - first_tile + chunk_tiles - 1) // chunk_tiles)
        if splits == 1 or merge_chunks(
            total, total_peak, total_mass, partials, tickets, row, kv_head, num_chunks, split,
            splits, split_rows,
        ):  # fmt: skip
            write_out(out, total, total_peak, total_mass, row, kv_head, sinks)

    return attention_decode
