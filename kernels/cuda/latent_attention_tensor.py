"""Attention over latents for 16-bit floats, on tensor cores: what decode and prompts run.

A block of four warps takes one unit of query heads (`attention_shared_layout`) through the tiles of
16 tokens of a row, all warps through the same ones; `attention_shared_tile` draws what they make of
one. Two stages of shared memory hold a tile each, and copies run one tile ahead:

    stage 0   copy 0 │ compute 0     │ copy 2        │ compute 2     │
    stage 1          │ copy 1        │ compute 1     │ copy 3        │ …
                     W B  parts  B   W B  parts  B   W B

    W   wait_for_copies   the copies that this thread has started are done …
    B   syncthreads       … and everybody's are; everybody has also left the tile before, whose
                          stage the next copies overwrite, and read the parts of its scores
    B   the second        everybody's parts of the scores lie in shared memory

The block of the next tile is looked up before the wait, and has come by the time that its copies
start. Decode goes on from chunk to chunk without a pause: the first tile of the next one is copied
while the last of a chunk is computed with. Rows of a prompt are summed as one chunk; their blocks
have twice the places, in the registers that decode needs for what chunks merge to.

*Registers* are what prompts are short of at R 512: of 255 the sums take 136 and the queries 72.
What masks and addresses are made of is made again where it is needed.

Where the chunks of a row are split over blocks of threads, the last one merges them with the memory
of the stages (`attention_shared_results`): the barrier before the ticket says that all have left
the last tile.
"""

from __future__ import annotations

from collections.abc import Callable

from numba import cuda, float32, int32, int64, uint32

from kernels.cuda.attention_chunks import TILE_TOKENS, least_chunk_tiles, make_cut_row
from kernels.cuda.attention_merge import make_merge_chunks
from kernels.cuda.attention_partials import part_of_block
from kernels.cuda.attention_shared_layout import make_find_place
from kernels.cuda.attention_shared_results import make_shared_results
from kernels.cuda.attention_shared_tile import PART_WORDS, STAGES, make_shared_tile
from kernels.cuda.attention_tiles import find_tile
from kernels.cuda.instructions.addresses import multiply_add_wide
from kernels.cuda.instructions.async_copies import wait_for_copies
from kernels.cuda.instructions.early_launch import fetch_ahead, let_next_begin, wait_for_previous
from kernels.cuda.lanes import lane_and_warp
from kernels.cuda.latent_attention_layout import LatentAttentionVariant
from kernels.cuda.variant import Pointer, Scalar


def make_tensor_latent_decode(variant: LatentAttentionVariant) -> Callable[..., None]:
    """Return the kernel of decode for 16-bit floats; arguments as in `LatentDecodeVariant`."""
    num_heads, block_size, places = variant.num_heads, variant.block_size, variant.block_places
    row_elements = variant.row_elements
    tile_bytes = uint32(2 * TILE_TOKENS * row_elements)
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
    parts_shape, mass_row = PART_WORDS, variant.columns

    def latent_decode(
        out: Pointer,
        queries: Pointer,
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
        layer_offset: Scalar,
    ) -> None:
        """Attend with unit blockIdx.x of a row; see LatentDecodeVariant."""
        let_next_begin()
        row, split, splits = part_of_block(split_rows)
        unit = int64(cuda.blockIdx.x)
        lane, warp = lane_and_warp()

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
                element = multiply_add_wide(block, int32(block_stride), layer_offset)
                fetch_ahead(pool, element, tile_bytes)
        wait_for_previous()

        tiles = cuda.shared.array(tiles_shape, uint32, alignment=16)
        parts = cuda.shared.array(parts_shape, uint32, alignment=16)
        fragments = cuda.local.array(queries_shape, uint32)
        words = cuda.local.array((1, 4), uint32)
        scores = cuda.local.array((2, 4), float32)
        weights = cuda.local.array((1, 4), uint32)
        sums = cuda.local.array(sums_shape, float32)
        peak = cuda.local.array(2, float32)
        mass = cuda.local.array(2, float32)
        total = cuda.local.array(total_shape, float32)
        total_peak = cuda.local.array(2, float32)
        total_mass = cuda.local.array(2, float32)
        heads = cuda.local.array(2, int64)
        clear(total, total_peak, total_mass)
        stage = int32(0)
        if tile < end_tile:
            start_copies(tiles, stage, pool, block, tile, seq_len, block_stride, layer_offset)
        for r in range(2):
            _, head, _ = find_place(unit * places + (lane >> 2) + 8 * r, 1)
            element = row * query_stride + head * row_elements
            load_query(fragments, r, queries, element, lane, warp)

        chunk = split
        while tile < end_tile:
            clear_sums(sums, peak)
            end = int32(min(end_tile, (chunk + 1) * chunk_tiles))
            next_chunk = int32(chunk + splits)
            while tile < end:
                next_tile = int32(tile + 1)
                if next_tile == end:
                    next_tile = int32(next_chunk * chunk_tiles)
                has_next = next_tile < end_tile
                if has_next:
                    entry = int32(first_entry + next_tile * TILE_TOKENS // block_size)
                    block = block_tables[entry]
                wait_for_copies()
                cuda.syncthreads()
                if has_next:
                    start_copies(
                        tiles, stage ^ 1, pool, block, next_tile, seq_len, block_stride,
                        layer_offset,
                    )  # fmt: skip
                add_scores(parts, scores, words, fragments, tiles, stage, lane, warp)
                cuda.syncthreads()
                make_weights(
                    sums, peak, scores, words, weights, parts, tile, seq_len, scale_log2e, lane
                )
                add_weighted(sums, words, weights, tiles, stage, lane, warp)
                stage = int32(stage ^ 1)
                tile = int32(tile + 1)
            tile = int32(next_chunk * chunk_tiles)
            for r in range(2):
                mass[r] = sums[mass_row, 2 * r]
            add_chunk(
                total, total_peak, total_mass, sums, peak, mass, partials, row, unit, chunk,
                splits > 1, split_rows,
            )  # fmt: skip
            chunk = next_chunk

        num_chunks = int32((end_tile + chunk_tiles - 1) // chunk_tiles)
        is_written = True
        if splits > 1:
            is_written = merge_chunks(
                tiles, total_peak, total_mass, partials, tickets, row, unit, num_chunks, split,
                splits, split_rows,
            )  # fmt: skip
            if is_written:
                take_merged(total, tiles, num_chunks > 0)
        if is_written:
            for r in range(2):
                _, head, is_any = find_place(unit * places + (lane >> 2) + 8 * r, 1)
                heads[r] = row * num_heads + head if is_any else int64(-1)
            write_out(out, total, 0, total_mass, heads, lane, warp)

    return latent_decode


def make_tensor_latent_prefill(variant: LatentAttentionVariant) -> Callable[..., None]:
    """Return the kernel of prompts for 16-bit floats; arguments as in `LatentPrefillVariant`."""
    num_heads, block_size, places = variant.num_heads, variant.block_size, variant.block_places
    row_elements, most_tokens = variant.row_elements, variant.tile_tokens
    find_place = make_find_place(variant)
    tile_ = make_shared_tile(variant)
    start_copies, load_query, clear_sums = tile_.start_copies, tile_.load_query, tile_.clear
    add_scores = tile_.add_scores
    make_weights, add_weighted = tile_.make_weights, tile_.add_weighted
    write_out = make_shared_results(variant).write_out
    tiles_shape, queries_shape = STAGES * tile_.stage_words, (tile_.query_rows, 4)
    row_tiles, rows, sum_rows = variant.ROW_TILES, variant.slots, tile_.sum_rows
    parts_shape, sums_shape = row_tiles * PART_WORDS, (row_tiles * sum_rows, 4)
    scores_shape, weights_shape = (2 * row_tiles, 4), (row_tiles, 4)

    def latent_prefill(
        out: Pointer,
        queries: Pointer,
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
        layer_offset: Scalar,
    ) -> None:
        """Attend with unit blockIdx.y of query tile blockIdx.x; see LatentPrefillVariant."""
        row = int64(tile_rows[cuda.blockIdx.x])
        if row < 0:
            return
        unit = int64(cuda.blockIdx.y)
        lane, warp = lane_and_warp()
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
        peak = cuda.local.array(rows, float32)
        mass = cuda.local.array(rows, float32)
        heads = cuda.local.array(rows, int64)
        start_copies(
            tiles, 0, pool, block_tables[first_entry], 0, num_tokens, block_stride, layer_offset
        )
        for r in range(rows):
            token, head, _ = find_place(
                unit * places + (lane >> 2) + 8 * r, end_token - first_token
            )
            element = (first_query + token) * query_stride + head * row_elements
            load_query(fragments, r, queries, element, lane, warp)

        clear_sums(sums, peak)
        num_tiles = int32((num_tokens + TILE_TOKENS - 1) // TILE_TOKENS)
        for tile in range(num_tiles):
            next_tile, stage = int32(tile + 1), int32(tile & 1)
            block = int32(0)
            if next_tile < num_tiles:
                entry = int32(first_entry + next_tile * TILE_TOKENS // block_size)
                block = block_tables[entry]
            wait_for_copies()
            cuda.syncthreads()
            if next_tile < num_tiles:
                start_copies(
                    tiles, stage ^ 1, pool, block, next_tile, num_tokens, block_stride,
                    layer_offset,
                )  # fmt: skip
            add_scores(parts, scores, words, fragments, tiles, stage, lane, warp)
            cuda.syncthreads()
            make_weights(sums, peak, scores, words, weights, parts, tile, seen, scale_log2e, lane)
            add_weighted(sums, words, weights, tiles, stage, lane, warp)

        # Everything about the tile is asked again: there is no register to keep it in.
        row, first_token = int64(tile_rows[cuda.blockIdx.x]), tile_tokens[cuda.blockIdx.x]
        _, first_query, _, end_token = find_tile(
            row, first_token, most_tokens, seq_lens, cu_query_lens
        )
        first_query = int64(first_query + first_token)
        for r in range(rows):
            mass[r] = sums[r // 2 * sum_rows + sum_rows - 1, r % 2 * 2]
            token, head, is_any = find_place(
                unit * places + (lane >> 2) + 8 * r, end_token - first_token
            )
            heads[r] = (first_query + token) * num_heads + head if is_any else int64(-1)
        write_out(out, sums, sum_rows, mass, heads, lane, warp)

    return latent_prefill
