"""Attention with heads of 512 elements for 16-bit floats, on tensor cores: decode and prompts.

A block of four warps takes the query heads of one kv head through the tiles of 16 tokens of a row,
all warps through the same ones; `attention_shared_tile` draws what they make of one. Shared memory
has room for the keys of a tile and the values of a tile, so either is copied while the other is
computed with:

    keys      scores of t        │ copy t + 1                                │ scores of t + 1
    values    copy t                          │ add what weights weigh of t  │ copy t + 1
              W B                B weights  V B                              W B

    W   wait_for_copies           the keys that this thread has copied are there …
    B   syncthreads               … and everybody's are; everybody has left the values of the tile
                                  before, which the next copies overwrite
    B   the second                everybody's parts of the scores lie in shared memory, and all have
                                  left the keys
    V   wait_for_copies_but_one   the values that this thread has copied are there, the keys of the
                                  next tile may still be on their way …
    B   the third                 … and everybody's values are

Behind the last tile of a block there are no keys to copy: a group of nothing stands for them, or
the values would be the newest one.

While weights are made both copies are on their way, 32 KB of a block. Two barriers would do if
values were waited for before the second; then there is one copy on the way at any time.

The block of the next tile is looked up before the wait, and has come by the time that its copies
start. Decode goes on from chunk to chunk without a pause: the first keys of the next one are copied
while the last of a chunk is computed with. Rows of a prompt are summed as one chunk.

Where the chunks of a row are split over blocks of threads, the last one merges them with the memory
of keys and values (`attention_shared_results`): the barrier before the ticket says that all have
left the last tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from numba import cuda, float32, int32, int64, uint32

from kernels.cuda.attention_chunks import TILE_TOKENS, least_chunk_tiles, make_cut_row
from kernels.cuda.attention_merge import make_merge_chunks
from kernels.cuda.attention_partials import part_of_block
from kernels.cuda.attention_shared_layout import SharedTileVariant, make_find_place
from kernels.cuda.attention_shared_results import make_shared_results
from kernels.cuda.attention_shared_tile import PART_WORDS, STAGES, make_shared_tile
from kernels.cuda.attention_tiles import find_tile
from kernels.cuda.instructions.addresses import anew, multiply_add_wide
from kernels.cuda.instructions.async_copies import (
    commit_copies,
    wait_for_copies,
    wait_for_copies_but_one,
)
from kernels.cuda.instructions.early_launch import fetch_ahead, let_next_begin, wait_for_previous
from kernels.cuda.lanes import lane_and_warp
from kernels.cuda.variant import Pointer, Scalar

KEYS: Final = 0
VALUES: Final = 1
"""Stages of shared memory."""


def make_tensor_wide_decode(variant: SharedTileVariant) -> Callable[..., None]:
    """Return the kernel of decode; arguments as in `DecodeVariant`."""
    group, block_size, head_size = variant.heads, variant.block_size, variant.row_elements
    tile_bytes, head_elements = uint32(2 * TILE_TOKENS * head_size), block_size * head_size
    cut_row = make_cut_row(least_chunk_tiles(None), has_window=False)
    find_place = make_find_place(variant)
    tile_ = make_shared_tile(variant)
    start_copies, load_query, clear_sums = tile_.start_copies, tile_.load_query, tile_.clear
    add_scores = tile_.add_scores
    make_weights, add_weighted = tile_.make_weights, tile_.add_weighted
    results = make_shared_results(variant)
    clear, add_chunk = results.clear, results.add_chunk
    take_merged, write_out = results.take_merged, results.write_out
    merge_chunks = make_merge_chunks(variant.layout)
    tiles_shape, queries_shape = STAGES * tile_.stage_words, (tile_.query_rows, 4)
    sums_shape, total_shape = (tile_.sum_rows, 4), (variant.columns, 4)
    slots, mass_row = variant.slots, variant.columns

    def wide_decode(
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
        _window: Scalar,
        _sinks: Pointer,
        _cap: Scalar,
    ) -> None:
        """Attend with kv head blockIdx.x of a row; see WideDecodeVariant."""
        let_next_begin()
        row, split, splits = part_of_block(split_rows)
        kv_head = int64(cuda.blockIdx.x)
        lane, warp = lane_and_warp()
        keys = key_offset + kv_head * head_elements
        values = value_offset + kv_head * head_elements

        # The row's length and its first block are looked up, and its first tile is fetched, before
        # the launch ahead has ended. A chunk is a multiple of 64 tokens: it begins as a block does.
        seq_len = int32(seq_lens[row])
        _, end_tile, chunk_tiles = cut_row(seq_len, 0)
        first_entry = int32(row * table_width)
        tile = int32(split * chunk_tiles)
        block = int32(0)
        if tile < end_tile:
            block = block_tables[int32(first_entry + tile * TILE_TOKENS // block_size)]
            if cuda.threadIdx.x == 0:
                element = multiply_add_wide(block, int32(block_stride), int64(0))
                fetch_ahead(pool, element + keys, tile_bytes)
                fetch_ahead(pool, element + values, tile_bytes)
        wait_for_previous()

        tiles = cuda.shared.array(tiles_shape, uint32, alignment=16)
        parts = cuda.shared.array(PART_WORDS, uint32, alignment=16)
        fragments = cuda.local.array(queries_shape, uint32)
        words = cuda.local.array((1, 4), uint32)
        scores = cuda.local.array((2, 4), float32)
        weights = cuda.local.array((1, 4), uint32)
        sums = cuda.local.array(sums_shape, float32)
        peak = cuda.local.array(2, float32)
        mass = cuda.local.array(slots, float32)
        total = cuda.local.array(total_shape, float32)
        total_peak = cuda.local.array(slots, float32)
        total_mass = cuda.local.array(slots, float32)
        heads = cuda.local.array(slots, int64)
        clear(total, total_peak, total_mass)
        if tile < end_tile:
            start_copies(tiles, KEYS, pool, block, tile, seq_len, block_stride, keys)
        for r in range(2):
            _, head, _ = find_place((lane >> 2) + 8 * r, 1)
            element = row * query_stride + (kv_head * group + head) * head_size
            # Of a group of one both reads are the same. The compiler is not to see it: it would
            # have what products want beside each other moved there for each of them.
            load_query(fragments, r, query, element, anew(int32(lane)), warp)

        chunk = split
        while tile < end_tile:
            clear_sums(sums, peak)
            end = int32(min(end_tile, (chunk + 1) * chunk_tiles))
            next_chunk = int32(chunk + splits)
            while tile < end:
                next_tile = int32(tile + 1)
                if next_tile == end:
                    next_tile = int32(next_chunk * chunk_tiles)
                has_next, next_block = next_tile < end_tile, int32(0)
                if has_next:
                    entry = int32(first_entry + next_tile * TILE_TOKENS // block_size)
                    next_block = block_tables[entry]
                wait_for_copies()
                cuda.syncthreads()
                start_copies(tiles, VALUES, pool, block, tile, seq_len, block_stride, values)
                add_scores(parts, scores, words, fragments, tiles, KEYS, lane, warp)
                cuda.syncthreads()
                block = next_block
                if has_next:
                    start_copies(tiles, KEYS, pool, block, next_tile, seq_len, block_stride, keys)
                else:
                    commit_copies()
                make_weights(
                    sums, peak, scores, words, weights, parts, tile, seq_len, scale_log2e, lane
                )
                wait_for_copies_but_one()
                cuda.syncthreads()
                add_weighted(sums, words, weights, tiles, VALUES, lane, warp)
                tile = int32(tile + 1)
            tile = int32(next_chunk * chunk_tiles)
            for slot in range(slots):
                mass[slot] = sums[mass_row, 2 * slot]
            add_chunk(
                total, total_peak, total_mass, sums, peak, mass, partials, row, kv_head, chunk,
                splits > 1, split_rows,
            )  # fmt: skip
            chunk = next_chunk

        num_chunks = int32((end_tile + chunk_tiles - 1) // chunk_tiles)
        is_written = True
        if splits > 1:
            is_written = merge_chunks(
                tiles, total_peak, total_mass, partials, tickets, row, kv_head, num_chunks, split,
                splits, split_rows,
            )  # fmt: skip
            if is_written:
                take_merged(total, tiles, num_chunks > 0)
        if is_written:
            for slot in range(slots):
                _, head, is_any = find_place((lane >> 2) + 8 * slot, 1)
                kv_head_of_all = row * cuda.gridDim.x + kv_head
                heads[slot] = kv_head_of_all * group + head if is_any else int64(-1)
            write_out(out, total, 0, total_mass, heads, lane, warp)

    return wide_decode


def make_tensor_wide_prefill(variant: SharedTileVariant) -> Callable[..., None]:
    """Return the kernel of prompts; arguments as in `PrefillVariant`."""
    group, block_size, head_size = variant.heads, variant.block_size, variant.row_elements
    most_tokens, head_elements = variant.tile_tokens, block_size * head_size
    find_place = make_find_place(variant)
    tile_ = make_shared_tile(variant)
    start_copies, load_query, clear_sums = tile_.start_copies, tile_.load_query, tile_.clear
    add_scores = tile_.add_scores
    make_weights, add_weighted = tile_.make_weights, tile_.add_weighted
    write_out = make_shared_results(variant).write_out
    tiles_shape, queries_shape = STAGES * tile_.stage_words, (tile_.query_rows, 4)
    row_tiles, slots, sum_rows = variant.ROW_TILES, variant.slots, tile_.sum_rows
    parts_shape, sums_shape = row_tiles * PART_WORDS, (row_tiles * sum_rows, 4)
    scores_shape, weights_shape = (2 * row_tiles, 4), (row_tiles, 4)

    def wide_prefill(
        out: Pointer,
        query: Pointer,
        pool: Pointer,
        block_tables: Pointer,
        seq_lens: Pointer,
        cu_query_lens: Pointer,
        tile_rows: Pointer,
        tile_tokens: Pointer,
        scale_log2e: Scalar,
        query_stride: Scalar,
        table_width: Scalar,
        block_stride: Scalar,
        key_offset: Scalar,
        value_offset: Scalar,
        _window: Scalar,
        _sinks: Pointer,
        _cap: Scalar,
    ) -> None:
        """Attend with kv head blockIdx.y of query tile blockIdx.x; see WidePrefillVariant."""
        row = int64(tile_rows[cuda.blockIdx.x])
        if row < 0:
            return
        kv_head = int64(cuda.blockIdx.y)
        lane, warp = lane_and_warp()
        keys = key_offset + kv_head * head_elements
        values = value_offset + kv_head * head_elements
        first_token = tile_tokens[cuda.blockIdx.x]
        _, first_query, context, end_token = find_tile(
            row, first_token, most_tokens, seq_lens, cu_query_lens
        )
        first_query = int64(first_query + first_token)
        num_tokens = int32(context + end_token)  # that the last query token of the tile sees
        seen = int32(context + first_token + 1)  # by the first one
        first_entry = int32(row * table_width)

        tiles = cuda.shared.array(tiles_shape, uint32, alignment=16)
        parts = cuda.shared.array(parts_shape, uint32, alignment=16)
        fragments = cuda.local.array(queries_shape, uint32)
        words = cuda.local.array((1, 4), uint32)
        scores = cuda.local.array(scores_shape, float32)
        weights = cuda.local.array(weights_shape, uint32)
        sums = cuda.local.array(sums_shape, float32)
        peak = cuda.local.array(slots, float32)
        mass = cuda.local.array(slots, float32)
        heads = cuda.local.array(slots, int64)
        block = block_tables[first_entry]
        start_copies(tiles, KEYS, pool, block, 0, num_tokens, block_stride, keys)
        for r in range(slots):
            token, head, _ = find_place((lane >> 2) + 8 * r, end_token - first_token)
            element = (first_query + token) * query_stride + (kv_head * group + head) * head_size
            load_query(fragments, r, query, element, lane, warp)

        clear_sums(sums, peak)
        num_tiles = int32((num_tokens + TILE_TOKENS - 1) // TILE_TOKENS)
        for tile in range(num_tiles):
            next_tile, next_block = int32(tile + 1), int32(0)
            if next_tile < num_tiles:
                entry = int32(first_entry + next_tile * TILE_TOKENS // block_size)
                next_block = block_tables[entry]
            wait_for_copies()
            cuda.syncthreads()
            start_copies(tiles, VALUES, pool, block, tile, num_tokens, block_stride, values)
            add_scores(parts, scores, words, fragments, tiles, KEYS, lane, warp)
            cuda.syncthreads()
            block = next_block
            if next_tile < num_tiles:
                start_copies(tiles, KEYS, pool, block, next_tile, num_tokens, block_stride, keys)
            else:
                commit_copies()
            make_weights(sums, peak, scores, words, weights, parts, tile, seen, scale_log2e, lane)
            wait_for_copies_but_one()
            cuda.syncthreads()
            add_weighted(sums, words, weights, tiles, VALUES, lane, warp)

        # Everything about the tile is asked again: there is no register to keep it in.
        row, first_token = int64(tile_rows[cuda.blockIdx.x]), tile_tokens[cuda.blockIdx.x]
        _, first_query, _, end_token = find_tile(
            row, first_token, most_tokens, seq_lens, cu_query_lens
        )
        first_query = int64(first_query + first_token)
        for r in range(slots):
            mass[r] = sums[r // 2 * sum_rows + sum_rows - 1, r % 2 * 2]
            token, head, is_any = find_place((lane >> 2) + 8 * r, end_token - first_token)
            kv_head_of_all = (first_query + token) * cuda.gridDim.y + kv_head
            heads[r] = kv_head_of_all * group + head if is_any else int64(-1)
        write_out(out, sums, sum_rows, mass, heads, lane, warp)

    return wide_prefill
