"""A tile of 16 tokens in shared memory, and what a block of threads makes of it on tensor cores.

*In shared memory* a stage is 16 rows of D elements, D / 8 vectors of 16 bytes, and one vector of
nothing behind each row: so a row is an odd number of vectors, and `ldmatrix`, whose eight lanes
read the same vector of eight rows, hits different eighths of 128 bytes. Eight threads copy a row,
neighbouring vectors at a time:

    token        row 0   │ v0 v1 … v7 │ v8 … │ … v71 │ – │           thread t copies of row t // 8
                 row 1   │ v0 v1 … v7 │ v8 … │ … v71 │ – │           the vectors t % 8, t % 8 + 8, …
                  …

*Scores* (C, 16 places by 16 tokens) = queries (A) · rows (B). The steps of 16 elements go round
among the warps, so a warp needs a quarter of the queries and holds those in registers:

    step     0   1   2   3   4   5   6  …  35         D 576: nine steps a warp; for other
    warp     0   1   2   3   0   1   2      3         shapes warps 2 and 3 may have one less

A warp lays its part of the scores down in shared memory, a vector of a lane beside that of the
next, and reads all four parts of its own lane: they are added in the order of the warps. So all
warps have the same scores, and each makes the weights of them for itself: 8 numbers a lane.

*Sums* (C, 16 places by S/4 elements of a warp) += weights (A) · rows (B), the first S elements of
these, which may be the rows of the scores or others. The scores, packed, are the weights' fragment,
and rows in shared memory are read transposed. One product more, with ones, is the mass: it sums
what rows are weighted with, rounded as it is.

For prompts there are two tiles of places, `row_tiles`, and all that is read of rows from shared
memory is multiplied with both.

The peak of a place follows its largest score only once that is ahead by `SLACK`, as in the other
kernels; places have each their own, so that what a place gets never depends on its neighbours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from numba import cuda, float32, int32, uint32

from kernels.cuda.attention_chunks import NO_PEAK, TILE_TOKENS
from kernels.cuda.attention_prefill_tensor import ONE_TWICE
from kernels.cuda.attention_shared_layout import VECTOR, WARPS, SharedTileVariant
from kernels.cuda.attention_variant import SLACK
from kernels.cuda.instructions.addresses import anew, multiply_add_wide
from kernels.cuda.instructions.async_copies import commit_copies, copy_async
from kernels.cuda.instructions.conversions import (
    FULL_WARP,
    PAIR_CONVERSIONS,
    exp2,
    float32_to_word,
    maximum,
    word_to_float32,
)
from kernels.cuda.instructions.exact_float32 import multiply_add
from kernels.cuda.instructions.tiles import MULTIPLY_TILES, load_tiles, load_transposed_tiles
from kernels.cuda.instructions.vectors import load_vector, load_word, store_vector
from kernels.cuda.variant import DeviceFunction, Local, Pointer, Scalar

STAGES: Final = 2
STEP: Final = 16
"""Elements of a step, which a product sums over."""
PART_WORDS: Final = WARPS * 2 * 32 * VECTOR
"""Of shared memory, for the parts of the scores of a tile of places."""
MINUS_INFINITY: Final = float32(-math.inf)


@dataclass(frozen=True, slots=True)
class SharedTile:
    """Numbers and device functions of one variant; what these do stands where they are defined.

    `stage_words`: of a tile of rows in shared memory. `query_rows`: of four words, a lane's
    queries. `sum_rows`: of a lane's sums of a tile of places, the last of which is the masses.
    """

    stage_words: int
    query_rows: int
    sum_rows: int
    start_copies: DeviceFunction
    load_query: DeviceFunction
    clear: DeviceFunction
    add_scores: DeviceFunction
    make_weights: DeviceFunction
    add_weighted: DeviceFunction


def make_shared_tile(variant: SharedTileVariant) -> SharedTile:
    """Return the functions for a variant of 16 bits."""
    heads = variant.heads
    places_of_unit = 0 if variant.HAS_KV_HEADS else variant.block_places
    row_elements, block_size = variant.row_elements, variant.block_size
    row_words = row_elements // 2 + VECTOR
    stage_words = TILE_TOKENS * row_words
    vectors = row_elements // 8
    copies = -(-vectors // 8)  # of a thread
    steps = row_elements // STEP
    own_steps = -(-steps // WARPS)
    warp_words = variant.sum_elements // 8  # of a row, what a warp sums
    row_tiles, columns = variant.ROW_TILES, variant.columns
    units_are_second = variant.UNITS_ARE_SECOND
    sum_rows = columns + 1  # of a tile of places
    multiply = MULTIPLY_TILES[variant.dtype]
    pack = PAIR_CONVERSIONS[variant.dtype].pack
    ones = ONE_TWICE[variant.dtype]

    @cuda.jit(device=True, inline="always")
    def start_copies(
        tiles: Pointer, stage: Scalar, pool: Pointer, block: Scalar, tile: Scalar,
        num_tokens: Scalar, block_stride: Scalar, offset: Scalar,
    ) -> None:  # fmt: skip
        """Start copying a tile, which is in `block`, to a stage; zeros for tokens past the end.

        `offset`: in a block, of its first row.
        """
        thread = anew(cuda.threadIdx.x)  # where it copies is computed here, not kept
        row, vector = thread // 8, thread % 8
        first_token = int32(tile * TILE_TOKENS)
        slot = int32(first_token % block_size + row)
        source = multiply_add_wide(block, int32(block_stride), offset)
        source += int32(slot * row_elements + 8 * vector)
        target = int32(stage * stage_words + row * row_words + VECTOR * vector)
        is_wanted = int32(first_token + row) < num_tokens
        for i in range(copies):
            if 8 * i + 7 < vectors or 8 * i + vector < vectors:
                copy_async(tiles, target + 8 * VECTOR * i, pool, source + 64 * i, is_wanted)
        commit_copies()

    @cuda.jit(device=True, inline="always")
    def load_query(
        fragments: Local, r: Scalar, queries: Pointer, element: Scalar, lane: Scalar, warp: Scalar
    ) -> None:
        """Read a warp's steps of the query at `element`, of the lane's place number r."""
        first = element + STEP * warp + 2 * (lane & 3)
        for i in range(own_steps):
            n = r // 2 * own_steps + i
            for half in range(2):
                fragments[n, 2 * half + r % 2] = uint32(0)
            if WARPS * i + WARPS - 1 < steps or WARPS * i + warp < steps:
                for half in range(2):
                    word = load_word(queries, first + WARPS * STEP * i + 8 * half)
                    fragments[n, 2 * half + r % 2] = word

    @cuda.jit(device=True, inline="always")
    def clear(sums: Local, peak: Local) -> None:
        """Begin with no token."""
        for n in range(row_tiles * sum_rows):
            for c in range(4):
                sums[n, c] = float32(0)
        for r in range(2 * row_tiles):
            peak[r] = NO_PEAK

    @cuda.jit(device=True, inline="always")
    def add_scores(
        parts: Pointer, scores: Local, words: Local, fragments: Local, tiles: Pointer,
        stage: Scalar, lane: Scalar, warp: Scalar,
    ) -> None:  # fmt: skip
        """Multiply the warp's steps, and lay its part of the scores down in `parts`."""
        for n in range(2 * row_tiles):
            for c in range(4):
                scores[n, c] = float32(0)
        row = (lane >> 4 << 3) + (lane & 7)
        first = int32(stage * stage_words + row * row_words + VECTOR * (lane >> 3 & 1))
        first = int32(first + STEP // 2 * warp)
        for i in range(own_steps):
            if WARPS * i + WARPS - 1 < steps or WARPS * i + warp < steps:
                load_tiles(words, 0, tiles, first + WARPS * STEP // 2 * i)
                for m in range(row_tiles):
                    n = m * own_steps + i
                    a = (fragments[n, 0], fragments[n, 1], fragments[n, 2], fragments[n, 3])
                    multiply(scores, 2 * m, a, (words[0, 0], words[0, 1]))
                    multiply(scores, 2 * m + 1, a, (words[0, 2], words[0, 3]))
        for n in range(2 * row_tiles):
            for c in range(4):
                words[0, c] = float32_to_word(scores[n, c])
            store_vector(parts, ((2 * row_tiles * warp + n) * 32 + lane) * VECTOR, words, 0)

    @cuda.jit(device=True, inline="always")
    def make_weights(
        sums: Local, peak: Local, scores: Local, words: Local, weights: Local, parts: Pointer,
        tile: Scalar, seen: Scalar, scale_log2e: Scalar, lane: Scalar,
    ) -> None:  # fmt: skip
        """Make weights of everybody's parts of the scores; sums shrink where a peak has risen.

        `seen`: how many tokens of the row the block's first query token sees; the next one sees one
        more. Of places that are nobody's any number will do: rows past the end are zeros.
        """
        for n in range(2 * row_tiles):
            for part in range(WARPS):
                place = (2 * row_tiles * part + n) * 32 + lane
                load_vector(words, 0, parts, place * VECTOR)
                for c in range(4):
                    score = word_to_float32(words[0, c])
                    scores[n, c] = score if part == 0 else scores[n, c] + score
        first_token = int32(tile * TILE_TOKENS)
        if int32(first_token + TILE_TOKENS) > seen:
            # Computed here, not kept: there is no register to spare.
            unit = cuda.blockIdx.y if units_are_second else cuda.blockIdx.x
            place = anew(int32(unit * places_of_unit + (lane >> 2)))
            for r in range(2 * row_tiles):
                token = int32(place + 8 * r) // heads
                left = int32(seen + token - first_token - 2 * (lane & 3))
                for n in range(2):
                    for c in range(2):
                        if 8 * n + c >= left:
                            scores[r // 2 * 2 + n, r % 2 * 2 + c] = MINUS_INFINITY

        rises = False
        for r in range(2 * row_tiles):
            top = MINUS_INFINITY
            for n in range(2):
                for c in range(2):
                    top = maximum(top, scores[r // 2 * 2 + n, r % 2 * 2 + c])
            for bit in range(2):
                top = maximum(top, cuda.shfl_xor_sync(FULL_WARP, top, 1 << bit))
            top *= scale_log2e
            rises |= top > peak[r] + SLACK
            weights[r // 2, r % 2] = float32_to_word(top)
        if cuda.ballot_sync(FULL_WARP, rises) != 0:
            for r in range(2 * row_tiles):
                top, old = word_to_float32(weights[r // 2, r % 2]), peak[r]
                if top > old + SLACK:
                    peak[r] = top
                shrink = exp2(old - peak[r])
                for n in range(sum_rows):
                    for c in range(2):
                        sums[r // 2 * sum_rows + n, r % 2 * 2 + c] *= shrink
        for r in range(2 * row_tiles):
            for n in range(2):
                m, c = r // 2 * 2 + n, r % 2 * 2
                low = multiply_add(scores[m, c], scale_log2e, -peak[r])
                high = multiply_add(scores[m, c + 1], scale_log2e, -peak[r])
                weights[r // 2, 2 * n + r % 2] = pack(exp2(low), exp2(high))

    @cuda.jit(device=True, inline="always")
    def add_weighted(
        sums: Local, words: Local, weights: Local, tiles: Pointer, stage: Scalar, lane: Scalar,
        warp: Scalar,
    ) -> None:  # fmt: skip
        """Add what the weights weigh of a stage's rows to the sums."""
        first = int32(stage * stage_words + (lane & 15) * row_words + VECTOR * (lane >> 4))
        first = int32(first + warp_words * warp)
        for m in range(row_tiles):
            a = (weights[m, 0], weights[m, 1], weights[m, 2], weights[m, 3])
            multiply(sums, m * sum_rows + columns, a, (uint32(ones), uint32(ones)))
        for pair in range(columns // 2):
            load_transposed_tiles(words, 0, tiles, first + 8 * pair)
            for m in range(row_tiles):
                n = m * sum_rows + 2 * pair
                a = (weights[m, 0], weights[m, 1], weights[m, 2], weights[m, 3])
                multiply(sums, n, a, (words[0, 0], words[0, 1]))
                multiply(sums, n + 1, a, (words[0, 2], words[0, 3]))

    return SharedTile(
        stage_words, row_tiles * own_steps, sum_rows, start_copies, load_query, clear, add_scores,
        make_weights, add_weighted,
    )  # fmt: skip
