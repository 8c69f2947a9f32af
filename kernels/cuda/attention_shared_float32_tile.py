"""A tile of tokens in float32, on ordinary cores: what a warp makes of it for its place.

A lane owns vectors of four elements, every 128th, of the query, of a token's row and of the sums:

    vector of a row    0 … 31 │ 32 … 63 │ 64 … 95 │ 96 … 127 │ 128 … 143        of 576 elements,
    lane               0 … 31 │ 0 … 31  │ 0 … 31  │ 0 … 31   │ 0 … 15 │ zeros   the first 512 of
                       what is summed too                    │ scores alone     which are summed

so a row of latents is read once, into registers: a score is 20 products in each lane and a sum over
the warp by a butterfly of shuffles, and the weight multiplies the very words that are still there.
Of heads of 512 the rows of values are read together with those of keys, into other registers.

Tokens past what a place sees are not read: their rows are zeros, their scores -∞.
"""

from __future__ import annotations

import math
from typing import Final

from numba import cuda, float32, int32, uint32

from kernels.cuda.attention_chunks import TILE_TOKENS
from kernels.cuda.attention_shared_layout import VECTOR, SharedTileVariant
from kernels.cuda.instructions.addresses import multiply_add_wide
from kernels.cuda.instructions.conversions import exp2, maximum, word_to_float32
from kernels.cuda.instructions.vectors import load_vector
from kernels.cuda.lanes import warp_sum
from kernels.cuda.variant import DeviceFunction, Local, Pointer, Scalar

AT_ONCE: Final = {256: 4, 512: 2}
"""Tokens whose rows are read together, by what is summed. Four of 512 are beyond the 255 registers
that capability 8.0 has for its two copies of the loop."""
MINUS_INFINITY: Final = float32(-math.inf)


def reads_of_row(variant: SharedTileVariant) -> int:
    """Return how many vectors of a row a lane has."""
    return -(-variant.row_elements // (32 * VECTOR))


def _make_load_row(variant: SharedTileVariant) -> DeviceFunction:
    """Return what reads a lane's vectors: load_row(words, i, source, element, is_wanted, lane).

    `words` from row i on; `element` is the row's first. Zeros where it is not wanted.
    """
    reads, vectors = reads_of_row(variant), variant.row_elements // VECTOR

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


def make_attend_tile(variant: SharedTileVariant) -> DeviceFunction:
    """Return what takes a warp's place through a tile of tokens."""
    reads, sum_rows = reads_of_row(variant), variant.columns
    row_elements, block_size = variant.row_elements, variant.block_size
    load_row = _make_load_row(variant)
    at_once, has_values = AT_ONCE[variant.sum_elements], variant.HAS_KV_HEADS
    of_sums = at_once * reads if has_values else 0  # of the words, the first row that is summed
    words_shape = (of_sums + at_once * reads, VECTOR)

    @cuda.jit(device=True, inline="always")
    def attend_tile(
        sums: Local, peak: Local, mass: Local, query: Local, pool: Pointer, block_tables: Pointer,
        first_entry: Scalar, block_stride: Scalar, offset: Scalar, to_values: Scalar, tile: Scalar,
        seen: Scalar, lane: Scalar,
    ) -> None:  # fmt: skip
        """Add the tile's tokens before `seen`, of which there is one at least.

        `offset`: in a block, of the rows for scores. `to_values`: from these to those of values, of
        a variant that has such.
        """
        words = cuda.local.array(words_shape, uint32)
        scores = cuda.local.array(at_once, float32)
        first_token = int32(tile * TILE_TOKENS)
        block = block_tables[int32(first_entry + first_token // block_size)]
        element = multiply_add_wide(block, int32(block_stride), offset)
        element += first_token % block_size * row_elements
        # As many turns as hold a token that is seen, which is not known to the compiler: it would
        # have the reads of all turns in registers at once.
        left = min(int32(seen - first_token), int32(TILE_TOKENS))
        while left > 0:
            for t in range(at_once):
                load_row(words, t * reads, pool, element + t * row_elements, t < left, lane)
            if has_values:
                for t in range(at_once):
                    row = element + to_values + t * row_elements
                    load_row(words, of_sums + t * reads, pool, row, t < left, lane)
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
                        part = word_to_float32(words[of_sums + t * reads + n, k])
                        sums[n, k] += weight * part
            left = int32(left - at_once)
            element += at_once * row_elements

    return attend_tile


def make_load_query(variant: SharedTileVariant) -> DeviceFunction:
    """Return what reads a lane's part of a query, times what turns scores to powers of two."""
    reads, words_shape = reads_of_row(variant), (reads_of_row(variant), VECTOR)
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
