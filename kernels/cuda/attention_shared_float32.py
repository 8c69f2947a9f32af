"""Attention of heads that share rows in float32, on ordinary cores: latents, and heads of 512.

A warp has one place, a query head of a token (`attention_shared_layout`), and goes through the
tokens of its row by itself, some at a time (`attention_shared_float32_tile`); the four warps of a
block go through the same ones at about the same time, so that the first cache can serve three of
them. No shared memory is used but by the merge of chunks, and no barrier.

These kernels are for small models and for comparison. What limits them, by argument: instructions.
A token costs a warp 20 multiplications for the score (16 of heads of 512), 16 for the sums and five
shuffles for each of its heads, and nothing that is read is shared between heads but by the cache.

The two kinds differ in where rows lie, and in what a launch says about that: so each has kernels of
its own, of a few lines, around the same two functions.
"""

from __future__ import annotations

from collections.abc import Callable

from numba import cuda, float32, int32, int64

from kernels.cuda.attention_chunks import TILE_TOKENS, least_chunk_tiles, make_cut_row
from kernels.cuda.attention_merge import make_merge_chunks
from kernels.cuda.attention_partials import THREADS, part_of_block
from kernels.cuda.attention_shared_float32_tile import (
    make_attend_tile,
    make_load_query,
    reads_of_row,
)
from kernels.cuda.attention_shared_layout import VECTOR, SharedTileVariant, make_find_place
from kernels.cuda.attention_shared_results import make_shared_results
from kernels.cuda.attention_tiles import find_tile
from kernels.cuda.instructions.early_launch import let_next_begin, wait_for_previous
from kernels.cuda.lanes import lane_and_warp
from kernels.cuda.variant import DeviceFunction, Pointer, Scalar, Scalars


def _make_find_unit(variant: SharedTileVariant) -> DeviceFunction:
    """Return what says which heads a unit has: find_unit(unit, num_units), int64.

    It gives the kv head, which of its places is the unit's first, and how many kv heads there are.
    """
    places, parts, has_kv_heads = variant.block_places, variant.parts, variant.HAS_KV_HEADS

    @cuda.jit(device=True, inline="always")
    def find_unit(unit: Scalar, num_units: Scalar) -> Scalars:
        if has_kv_heads:
            return int64(unit // parts), int64(unit % parts * places), int64(num_units // parts)
        return int64(0), int64(unit) * places, int64(1)

    return find_unit


def _make_attend_row(variant: SharedTileVariant) -> DeviceFunction:
    """Return what a block of threads of decode does."""
    heads_of_kv, row_elements = variant.heads, variant.row_elements
    head_elements = variant.block_size * row_elements
    cut_row = make_cut_row(least_chunk_tiles(None), has_window=False)
    find_place, find_unit = make_find_place(variant), _make_find_unit(variant)
    load_query, attend_tile = make_load_query(variant), make_attend_tile(variant)
    results = make_shared_results(variant)
    clear, add_chunk = results.clear, results.add_chunk
    take_merged, write_out = results.take_merged, results.write_out
    merge_chunks = make_merge_chunks(variant.layout)
    query_shape, sums_shape = (reads_of_row(variant), VECTOR), (variant.columns, VECTOR)
    merged_shape = variant.layout.entries * THREADS

    @cuda.jit(device=True, inline="always")
    def attend_row(
        out: Pointer, queries: Pointer, pool: Pointer, block_tables: Pointer, seq_lens: Pointer,
        partials: Pointer, tickets: Pointer, split_rows: Scalar, scale_log2e: Scalar,
        query_stride: Scalar, table_width: Scalar, block_stride: Scalar, offset: Scalar,
        to_values: Scalar,
    ) -> None:  # fmt: skip
        """Attend with unit blockIdx.x of a row; `offset`, `to_values`: as `attend_tile`."""
        row, split, splits = part_of_block(split_rows)
        unit = int64(cuda.blockIdx.x)
        lane, warp = lane_and_warp()
        kv_head, first_place, kv_heads = find_unit(cuda.blockIdx.x, cuda.gridDim.x)
        _, head, is_any = find_place(first_place + warp, 1)
        head += kv_head * heads_of_kv
        query = cuda.local.array(query_shape, float32)
        load_query(query, queries, row * query_stride + head * row_elements, scale_log2e, lane)

        sums = cuda.local.array(sums_shape, float32)
        peak = cuda.local.array(1, float32)
        mass = cuda.local.array(1, float32)
        total = cuda.local.array(sums_shape, float32)
        total_peak = cuda.local.array(1, float32)
        total_mass = cuda.local.array(1, float32)
        heads = cuda.local.array(1, int64)
        merged = cuda.shared.array(merged_shape, float32, alignment=16)
        clear(total, total_peak, total_mass)
        seq_len = int32(seq_lens[row])
        _, end_tile, chunk_tiles = cut_row(seq_len, 0)
        first_entry = int32(row * table_width)
        first_row = offset + kv_head * head_elements
        chunk = split
        while chunk * chunk_tiles < end_tile:
            clear(sums, peak, mass)
            end = int32(min(end_tile, (chunk + 1) * chunk_tiles))
            for tile in range(int32(chunk * chunk_tiles), end):
                attend_tile(
                    sums, peak, mass, query, pool, block_tables, first_entry, block_stride,
                    first_row, to_values, tile, seq_len, lane,
                )  # fmt: skip
            add_chunk(
                total, total_peak, total_mass, sums, peak, mass, partials, row, unit, chunk,
                splits > 1, split_rows,
            )  # fmt: skip
            chunk = int32(chunk + splits)

        num_chunks = int32((end_tile + chunk_tiles - 1) // chunk_tiles)
        is_written = True
        if splits > 1:
            is_written = merge_chunks(
                merged, total_peak, total_mass, partials, tickets, row, unit, num_chunks, split,
                splits, split_rows,
            )  # fmt: skip
            if is_written:
                take_merged(total, merged, num_chunks > 0)
        if is_written:
            heads[0] = row * kv_heads * heads_of_kv + head if is_any else int64(-1)
            write_out(out, total, 0, total_mass, heads, lane, warp)

    return attend_row


def _make_attend_tokens(variant: SharedTileVariant) -> DeviceFunction:
    """Return what a block of threads of prompts does."""
    heads_of_kv, row_elements = variant.heads, variant.row_elements
    head_elements, most_tokens = variant.block_size * row_elements, variant.tile_tokens
    find_place, find_unit = make_find_place(variant), _make_find_unit(variant)
    load_query, attend_tile = make_load_query(variant), make_attend_tile(variant)
    results = make_shared_results(variant)
    clear, write_out = results.clear, results.write_out
    query_shape, sums_shape = (reads_of_row(variant), VECTOR), (variant.columns, VECTOR)

    @cuda.jit(device=True, inline="always")
    def attend_tokens(
        out: Pointer, queries: Pointer, pool: Pointer, block_tables: Pointer, seq_lens: Pointer,
        cu_query_lens: Pointer, row: Scalar, tile_tokens: Pointer, scale_log2e: Scalar,
        query_stride: Scalar, table_width: Scalar, block_stride: Scalar, offset: Scalar,
        to_values: Scalar,
    ) -> None:  # fmt: skip
        """Attend with unit blockIdx.y of query tile blockIdx.x, which is of `row`."""
        lane, warp = lane_and_warp()
        first_token = tile_tokens[cuda.blockIdx.x]
        _, first_query, context, end_token = find_tile(
            row, first_token, most_tokens, seq_lens, cu_query_lens
        )
        kv_head, first_place, kv_heads = find_unit(cuda.blockIdx.y, cuda.gridDim.y)
        token, head, is_any = find_place(first_place + warp, end_token - first_token)
        head += kv_head * heads_of_kv
        token += first_token
        seen = int32(context + token + 1)
        token = int64(first_query + token)
        query = cuda.local.array(query_shape, float32)
        load_query(query, queries, token * query_stride + head * row_elements, scale_log2e, lane)

        sums = cuda.local.array(sums_shape, float32)
        peak = cuda.local.array(1, float32)
        mass = cuda.local.array(1, float32)
        heads = cuda.local.array(1, int64)
        clear(sums, peak, mass)
        first_entry = int32(row * table_width)
        first_row = offset + kv_head * head_elements
        for tile in range(int32((seen + TILE_TOKENS - 1) // TILE_TOKENS)):
            attend_tile(
                sums, peak, mass, query, pool, block_tables, first_entry, block_stride, first_row,
                to_values, tile, seen, lane,
            )  # fmt: skip
        heads[0] = token * kv_heads * heads_of_kv + head if is_any else int64(-1)
        write_out(out, sums, 0, mass, heads, lane, warp)

    return attend_tokens


def make_float32_latent_decode(variant: SharedTileVariant) -> Callable[..., None]:
    """Return the kernel of decode over latents; arguments as in `LatentDecodeVariant`."""
    attend_row = _make_attend_row(variant)

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
        """See LatentDecodeVariant."""
        let_next_begin()
        wait_for_previous()
        attend_row(
            out, queries, pool, block_tables, seq_lens, partials, tickets, split_rows, scale_log2e,
            query_stride, table_width, block_stride, layer_offset, 0,
        )  # fmt: skip

    return latent_decode


def make_float32_latent_prefill(variant: SharedTileVariant) -> Callable[..., None]:
    """Return the kernel of prompts over latents; arguments as in `LatentPrefillVariant`."""
    attend_tokens = _make_attend_tokens(variant)

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
        """See LatentPrefillVariant."""
        row = int64(tile_rows[cuda.blockIdx.x])
        if row < 0:
            return
        attend_tokens(
            out, queries, pool, block_tables, seq_lens, cu_query_lens, row, tile_tokens,
            scale_log2e, query_stride, table_width, block_stride, layer_offset, 0,
        )  # fmt: skip

    return latent_prefill


def make_float32_wide_decode(variant: SharedTileVariant) -> Callable[..., None]:
    """Return the kernel of decode with heads of 512; arguments as in `DecodeVariant`."""
    attend_row = _make_attend_row(variant)

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
        """See DecodeVariant."""
        let_next_begin()
        wait_for_previous()
        attend_row(
            out, query, pool, block_tables, seq_lens, partials, tickets, split_rows, scale_log2e,
            query_stride, table_width, block_stride, key_offset, value_offset - key_offset,
        )  # fmt: skip

    return wide_decode


def make_float32_wide_prefill(variant: SharedTileVariant) -> Callable[..., None]:
    """Return the kernel of prompts with heads of 512; arguments as in `PrefillVariant`."""
    attend_tokens = _make_attend_tokens(variant)

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
        """See PrefillVariant."""
        row = int64(tile_rows[cuda.blockIdx.x])
        if row < 0:
            return
        attend_tokens(
            out, query, pool, block_tables, seq_lens, cu_query_lens, row, tile_tokens, scale_log2e,
            query_stride, table_width, block_stride, key_offset, value_offset - key_offset,
        )  # fmt: skip

    return wide_prefill
