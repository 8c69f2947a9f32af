"""Attention over latents in float32, on ordinary cores: what decode and prompts run.

A warp has one place, a query head of a token (`latent_attention_layout`), and goes through the
tokens of its row by itself, some at a time; the four warps of a block go through the same ones at
about the same time, so that the first cache can serve three of them. A lane owns vectors of four
elements, every 128th, of the query, of a token's row and of the sums:

    vector of a row    0 … 31 │ 32 … 63 │ 64 … 95 │ 96 … 127 │ 128 … 143        R 512, P 64
    lane               0 … 31 │ 0 … 31  │ 0 … 31  │ 0 … 31   │ 0 … 15 │ zeros
                       the latent, also what is summed       │ turns

so a row is read once, into registers: a score is 20 products in each lane and a sum over the warp
by a butterfly of shuffles, and the weight multiplies the very words that are still there. No shared
memory is used but by the merge of chunks, and no barrier.

Tokens past what a place sees are not read: their rows are zeros, their scores -∞.

This kernel is for small models and for comparison. What limits it, by argument: instructions. A
token costs a warp 20 multiplications for the score, 16 for the sums and five shuffles for each of
its heads, and nothing that is read is shared between heads but by the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from numba import cuda, float32, int32, int64, uint32

from kernels.cuda.attention_chunks import (
    TILE_TOKENS,
    least_chunk_tiles,
    make_cut_row,
)
from kernels.cuda.attention_merge import make_merge_chunks
from kernels.cuda.attention_partials import THREADS, part_of_block
from kernels.cuda.attention_tiles import find_tile
from kernels.cuda.instructions.addresses import multiply_add_wide
from kernels.cuda.instructions.conversions import exp2, maximum, word_to_float32
from kernels.cuda.instructions.early_launch import let_next_begin, wait_for_previous
from kernels.cuda.instructions.vectors import load_vector
from kernels.cuda.lanes import lane_and_warp, warp_sum
from kernels.cuda.latent_attention_layout import (
    VECTOR,
    LatentAttentionVariant,
    make_find_place,
)
from kernels.cuda.latent_attention_results import make_latent_results
from kernels.cuda.variant import DeviceFunction, Local, Pointer, Scalar

AT_ONCE: Final = {256: 4, 512: 2}
"""Tokens whose rows are read together, by R. Four of R 512 are beyond the 255 registers that
capability 8.0 has for its two copies of the loop."""
MINUS_INFINITY: Final = float32(-math.inf)


def _reads(variant: LatentAttentionVariant) -> int:
    """Return how many vectors of a row a lane has."""
    return -(-variant.row_elements // (32 * VECTOR))


def _make_load_row(variant: LatentAttentionVariant) -> DeviceFunction:
    """Return what reads a lane's vectors: load_row(words, i, source, element, is_wanted, lane).

    `words` from row i on; `element` is the row's first. Zeros where it is not wanted.
    """
    reads, vectors = _reads(variant), variant.row_elements // VECTOR

    @cuda.jit(device=True, inline="always")
    def load_row(
        words: Local, i: Scalar, source: Pointer, element: Scalar, is_wanted: Scalar, lane: Scalar
    ) -> None:
        for j in range(reads):
            for k in range(VECTOR):
                words[i + j, k] = uint32(0)
            if is_wanted and 32 * j + lane < vectors:
                load_vector(words, i + j, source, element + VECTOR * (32 * j + lane))

    return load_row


def _make_attend_tile(variant: LatentAttentionVariant) -> DeviceFunction:
    """Return what takes a warp's place through a tile of tokens."""
    reads, sum_rows = _reads(variant), variant.columns
    row_elements, block_size = variant.row_elements, variant.block_size
    load_row = _make_load_row(variant)
    at_once = AT_ONCE[variant.rank]
    words_shape = (at_once * reads, VECTOR)

    @cuda.jit(device=True, inline="always")
    def attend_tile(
        sums: Local, peak: Local, mass: Local, query: Local, pool: Pointer, block_tables: Pointer,
        first_entry: Scalar, block_stride: Scalar, layer_offset: Scalar, tile: Scalar,
        seen: Scalar, lane: Scalar,
    ) -> None:  # fmt: skip
        """Add the tile's tokens before `seen`, of which there is one at least."""
        words = cuda.local.array(words_shape, uint32)
        scores = cuda.local.array(at_once, float32)
        first_token = int32(tile * TILE_TOKENS)
        block = block_tables[int32(first_entry + first_token // block_size)]
        element = multiply_add_wide(block, int32(block_stride), layer_offset)
        element += first_token % block_size * row_elements
        # As many turns as hold a token that is seen, which is not known to the compiler: it would
        # have the reads of all turns in registers at once.
        left = min(int32(seen - first_token), int32(TILE_TOKENS))
        while left > 0:
            for t in range(at_once):
                load_row(words, t * reads, pool, element + t * row_elements, t < left, lane)
            top = peak[0]
            for t in range(at_once):
                score = float32(0)
                for j in range(reads):
                    for k in range(VECTOR):
                        score += query[j, k] * word_to_float32(words[t * reads + j, k])
                score = warp_sum(score)
                scores[t] = score if t < left else MINUS_INFINITY
                top = maximum(top, scores[t])
            shrink = exp2(peak[0] - top)
            peak[0] = top
            mass[0] *= shrink
            for n in range(sum_rows):
                for k in range(VECTOR):
                    sums[n, k] *= shrink
            for t in range(at_once):
                weight = exp2(scores[t] - top)
                mass[0] += weight
                for n in range(sum_rows):
                    for k in range(VECTOR):
                        sums[n, k] += weight * word_to_float32(words[t * reads + n, k])
            left = int32(left - at_once)
            element += at_once * row_elements

    return attend_tile


def _make_load_query(variant: LatentAttentionVariant) -> DeviceFunction:
    """Return what reads a lane's part of a query, times what turns scores to powers of two."""
    reads, words_shape = _reads(variant), (_reads(variant), VECTOR)
    load_row = _make_load_row(variant)

    @cuda.jit(device=True, inline="always")
    def load_query(
        query: Local, queries: Pointer, element: Scalar, scale_log2e: Scalar, lane: Scalar
    ) -> None:
        words = cuda.local.array(words_shape, uint32)
        load_row(words, 0, queries, element, True, lane)
        for j in range(reads):
            for k in range(VECTOR):
                query[j, k] = word_to_float32(words[j, k]) * scale_log2e

    return load_query


def make_float32_latent_decode(variant: LatentAttentionVariant) -> Callable[..., None]:
    """Return the kernel of decode in float32; arguments as in `LatentDecodeVariant`."""
    num_heads, places, row_elements = variant.num_heads, variant.places, variant.row_elements
    cut_row = make_cut_row(least_chunk_tiles(None), has_window=False)
    find_place = make_find_place(variant)
    load_query, attend_tile = _make_load_query(variant), _make_attend_tile(variant)
    results = make_latent_results(variant)
    clear, add_chunk = results.clear, results.add_chunk
    take_merged, write_out = results.take_merged, results.write_out
    merge_chunks = make_merge_chunks(variant.layout)
    query_shape, sums_shape = (_reads(variant), VECTOR), (variant.columns, VECTOR)
    merged_shape = variant.layout.entries * THREADS

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
        wait_for_previous()
        row, split, splits = part_of_block(split_rows)
        unit = int64(cuda.blockIdx.x)
        lane, warp = lane_and_warp()
        _, head, is_any = find_place(unit * places + warp, 1)
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
        chunk = split
        while chunk * chunk_tiles < end_tile:
            clear(sums, peak, mass)
            end = int32(min(end_tile, (chunk + 1) * chunk_tiles))
            for tile in range(int32(chunk * chunk_tiles), end):
                attend_tile(
                    sums, peak, mass, query, pool, block_tables, first_entry, block_stride,
                    layer_offset, tile, seq_len, lane,
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
            heads[0] = row * num_heads + head if is_any else int64(-1)
            write_out(out, total, 0, total_mass, heads, lane, warp)

    return latent_decode


def make_float32_latent_prefill(variant: LatentAttentionVariant) -> Callable[..., None]:
    """Return the kernel of prompts in float32; arguments as in `LatentPrefillVariant`."""
    num_heads, places, row_elements = variant.num_heads, variant.places, variant.row_elements
    most_tokens = variant.tile_tokens
    find_place = make_find_place(variant)
    load_query, attend_tile = _make_load_query(variant), _make_attend_tile(variant)
    results = make_latent_results(variant)
    clear, write_out = results.clear, results.write_out
    query_shape, sums_shape = (_reads(variant), VECTOR), (variant.columns, VECTOR)

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
        lane, warp = lane_and_warp()
        first_token = tile_tokens[cuda.blockIdx.x]
        _, first_query, context, end_token = find_tile(
            row, first_token, most_tokens, seq_lens, cu_query_lens
        )
        token, head, is_any = find_place(
            int64(cuda.blockIdx.y) * places + warp, end_token - first_token
        )
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
        for tile in range(int32((seen + TILE_TOKENS - 1) // TILE_TOKENS)):
            attend_tile(
                sums, peak, mass, query, pool, block_tables, first_entry, block_stride,
                layer_offset, tile, seen, lane,
            )  # fmt: skip
        heads[0] = token * num_heads + head if is_any else int64(-1)
        write_out(out, sums, 0, mass, heads, lane, warp)

    return latent_prefill
