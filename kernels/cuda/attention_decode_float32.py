"""Decode attention for float32: products and sums on the ordinary cores, in float32 throughout.

Who does what. One block of threads works on up to four query heads of one kv head of one row, three
at head size 256; its warps hold their queries and sums in registers and share the row's tokens
(`attention_chunks`). A larger group is dealt out to `parts` blocks, one beside the other in the
grid, which read the same tokens at about the same time, so that the second cache can serve all but
one.

A lane owns four neighbouring dimensions of queries, keys, values and sums, 16 bytes, or twice four:

    head size 128     lane         0  │ 1 …  31                        one token a read of the warp
                      dimension  0 … 3│ 4 … 127
    head size 96      the same; the lanes 24 … 31 read nothing and hold zeros
    head size 64      lanes 0 … 15: token 2t,   lanes 16 … 31: token 2t + 1          two tokens
    head size 256     as at 128, and again 128 dimensions further          a token in two reads

so a score is four products in each lane, eight at head size 256, and a sum over the token's lanes,
by a butterfly of shuffles that leaves the same bits in all of them. At head size 64 the halves of
the warp have common peaks but sums and masses of their own, which are added at the end of a chunk.

Four reads of keys and four of values are under way at a time, 4 KB a warp: of four tokens, of eight
at head size 64, of two at 256. Three blocks, 12 warps, fit a multiprocessor: up to 48 KB in flight,
but none while a warp computes. The limit should be the shuffles, five a score, beside four products
or eight: this kernel is for small models and for comparison, and has no tensor cores because those
round float32 to 11 bits.

Tokens past the row's end, or before its window, are not read: their keys and values are zeros,
their scores -∞.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

from numba import cuda, float32, int32, int64, uint32

from kernels.cuda.attention_caps import exactly_capped
from kernels.cuda.attention_chunks import (
    NO_PEAK,
    SHARERS,
    TILE_TOKENS,
    least_chunk_tiles,
    make_cut_row,
)
from kernels.cuda.attention_merge import make_merge_chunks
from kernels.cuda.attention_partials import (
    THREADS,
    PartialLayout,
    make_partial_functions,
    part_of_block,
)
from kernels.cuda.instructions.conversions import FULL_WARP, exp2, maximum, word_to_float32
from kernels.cuda.instructions.early_launch import let_next_begin, wait_for_previous
from kernels.cuda.instructions.vectors import load_vector
from kernels.cuda.lanes import lane_and_warp
from kernels.cuda.variant import Pointer, Scalar

READ_DIMS = 128  # of a warp that reads one token
# By vectors of a token that a lane has; queries and sums of four heads of two are beyond the 255
# registers that capability 8.0 has for the loop's two copies.
HEADS_OF_BLOCK = {1: 4, 2: 3}
READS_AT_ONCE = 4
WARP_BYTES_IN_FLIGHT = 2 * READS_AT_ONCE * 32 * 16  # of keys and of values, 16 a lane
MINUS_INFINITY = float32(-math.inf)


def reads_of_token(head_size: int) -> int:
    """Return how many vectors of a token a lane has, and in how many reads a warp has them."""
    return -(-head_size // READ_DIMS)


@cache  # as `tensor_layout`
def float32_layout(head_size: int, group: int) -> PartialLayout:
    """Return how the sums of a block lie in its threads."""
    vectors = reads_of_token(head_size)
    parts = -(-group // HEADS_OF_BLOCK[vectors])
    heads = -(-group // parts)

    @cuda.jit(device=True, inline="always")
    def find(r: Scalar, warp: Scalar) -> tuple[Scalar, Scalar]:
        """Return where a warp's number r is: in entry r, of which a warp has one dimension."""
        return r, warp

    @cuda.jit(device=True, inline="always")
    def place(r: Scalar, warp: Scalar, lane: Scalar) -> tuple[Scalar, Scalar]:
        """Return head and dimension; the dimension is past the end where a lane has none."""
        return r, 4 * lane + warp

    @cuda.jit(device=True, inline="always")
    def place_of_two(r: Scalar, warp: Scalar, lane: Scalar) -> tuple[Scalar, Scalar]:
        """Return the same where a head has two entries, of 128 dimensions each."""
        return r // 2, r % 2 * READ_DIMS + 4 * lane + warp

    return PartialLayout(
        parts=parts,
        heads=heads,
        entries=heads * vectors,
        slots=heads,
        heads_of_slot=1,
        width=math.gcd(heads * vectors, 4),
        are_beside=False,
        find=find,
        place=place if vectors == 1 else place_of_two,
    )


def make_float32_decode(
    head_size: int,
    group: int,
    block_size: int,
    *,
    has_window: bool,
    has_sinks: bool = False,
    has_cap: bool = False,
) -> Callable[..., None]:
    """Return the kernel for float32; parameters as of `DecodeVariant`."""
    cut_row = make_cut_row(least_chunk_tiles(None), has_window=has_window)
    layout = float32_layout(head_size, group)
    functions = make_partial_functions(layout, "float32", head_size, group, has_sinks=has_sinks)
    clear, merge_warps, write_out = functions.clear, functions.merge_warps, functions.write_out
    merge_chunks = make_merge_chunks(layout)
    parts, heads = layout.parts, layout.heads
    total_shape = layout.entries * THREADS
    token_lanes = 16 if head_size == 64 else 32
    tokens_of_read = 32 // token_lanes
    vectors = reads_of_token(head_size)
    reads = READS_AT_ONCE // vectors  # of tokens, or of two
    tokens_of_turn = reads * tokens_of_read
    # Dimensions of a lane, in rows of four: of a head or token one row behind the other.
    dims, rows_shape = 4 * vectors, (layout.entries, 4)
    steps = token_lanes.bit_length() - 1  # shuffles over the lanes of a token
    halves = tokens_of_read - 1  # shuffles over the tokens of a read: none or one

    @cuda.jit(device=True, inline="always")
    def load(words: Pointer, i: Scalar, source: Pointer, element: Scalar, wanted: Scalar) -> None:
        """words[i] = the vector at `source[element]`, zeros where it is not wanted."""
        for word in range(4):
            words[i, word] = uint32(0)
        if wanted:
            load_vector(words, i, source, element)

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
        """Attend with unit blockIdx.x, a part of a group, of a row; see DecodeVariant."""
        let_next_begin()
        wait_for_previous()
        row, split, splits = part_of_block(split_rows)
        unit = int64(cuda.blockIdx.x)
        kv_head, part = unit // parts, unit % parts
        lane, warp = lane_and_warp()
        dim = int32(lane % token_lanes * 4)
        token_of_lane = int32(lane // token_lanes)
        has_dims = dim < head_size

        queries = cuda.local.array(rows_shape, float32)
        words = cuda.local.array(rows_shape, uint32)
        for i in range(heads * vectors):
            head = part * heads + i // vectors
            first = row * query_stride + (kv_head * group + head) * head_size + dim
            first += i % vectors * READ_DIMS
            load(words, i, query, first, has_dims and head < group)
            for d in range(4):
                queries[i, d] = word_to_float32(words[i, d]) * scale_log2e

        keys = cuda.local.array((READS_AT_ONCE, 4), uint32)
        values = cuda.local.array((READS_AT_ONCE, 4), uint32)
        scores = cuda.local.array(reads, float32)
        sums = cuda.local.array(rows_shape, float32)
        peak = cuda.local.array(heads, float32)
        mass = cuda.local.array(heads, float32)
        total = cuda.shared.array(total_shape, float32, alignment=16)
        total_peak = cuda.local.array(heads, float32)
        total_mass = cuda.local.array(heads, float32)
        clear(total, total_peak, total_mass)

        seq_len = int32(seq_lens[row])
        first_tile, end_tile, chunk_tiles = cut_row(seq_len, window)
        chunk = split
        while first_tile + chunk * chunk_tiles < end_tile:
            for h in range(heads):
                peak[h] = NO_PEAK
                mass[h] = float32(0)
                for d in range(dims):
                    sums[h * vectors + (d >> 2), d & 3] = float32(0)

            end = int32(min(end_tile, first_tile + (chunk + 1) * chunk_tiles))
            tile = int32(first_tile + chunk * chunk_tiles + warp)
            while tile < end:
                first_token = int32(tile * TILE_TOKENS)
                block = int64(block_tables[row * table_width + first_token // block_size])
                place = block * block_stride + kv_head * (block_size * head_size) + dim
                place += (first_token % block_size + token_of_lane) * head_size
                # As many turns as hold a token of the row. That is not known to the compiler, which
                # otherwise has the reads of all turns in registers at once.
                num_tokens = int32(min(TILE_TOKENS, seq_len - first_token))
                num_before = int32(seq_len - first_token - window)  # the window, if above zero
                while num_tokens > 0:
                    # Of the turn's tokens, this lane's own are valid up to here, and from here on.
                    num_valid = int32(num_tokens - token_of_lane)
                    first_valid = int32(num_before - token_of_lane)
                    # All reads first, so that they are under way together.
                    for i in range(READS_AT_ONCE):
                        t = i // vectors
                        wanted = has_dims and t * tokens_of_read < num_valid
                        if has_window:
                            wanted = wanted and t * tokens_of_read >= first_valid
                        element = place + t * tokens_of_read * head_size
                        element += i % vectors * READ_DIMS
                        load(keys, i, pool, key_offset + element, wanted)
                        load(values, i, pool, value_offset + element, wanted)
                    for h in range(heads):
                        top = peak[h]
                        for t in range(reads):
                            score = float32(0)
                            for d in range(dims):
                                key = word_to_float32(keys[t * vectors + (d >> 2), d & 3])
                                score += queries[h * vectors + (d >> 2), d & 3] * key
                            for step in range(steps):
                                score += cuda.shfl_xor_sync(FULL_WARP, score, 1 << step)
                            if has_cap:
                                score = exactly_capped(score, cap)
                            is_valid = t * tokens_of_read < num_valid
                            if has_window:
                                is_valid = is_valid and t * tokens_of_read >= first_valid
                            scores[t] = score if is_valid else MINUS_INFINITY
                            top = maximum(top, scores[t])
                        for step in range(halves):
                            top = maximum(top, cuda.shfl_xor_sync(FULL_WARP, top, 16 >> step))
                        shrink = exp2(peak[h] - top)
                        peak[h] = top
                        mass[h] *= shrink
                        for d in range(dims):
                            sums[h * vectors + (d >> 2), d & 3] *= shrink
                        for t in range(reads):
                            weight = exp2(scores[t] - top)
                            mass[h] += weight
                            for d in range(dims):
                                value = word_to_float32(values[t * vectors + (d >> 2), d & 3])
                                sums[h * vectors + (d >> 2), d & 3] += weight * value
                    num_tokens = int32(num_tokens - tokens_of_turn)
                    num_before = int32(num_before - tokens_of_turn)
                    place += tokens_of_turn * head_size
                tile = int32(tile + SHARERS)

            for h in range(heads):
                for step in range(halves):
                    mass[h] += cuda.shfl_xor_sync(FULL_WARP, mass[h], 16 >> step)
                    for d in range(4):  # a head has one row where a read has two tokens
                        sums[h, d] += cuda.shfl_xor_sync(FULL_WARP, sums[h, d], 16 >> step)
            merge_warps(
                sums, peak, mass, total, total_peak, total_mass,
                partials, row, unit, chunk, splits > 1, split_rows,
            )  # fmt: skip
            chunk = int32(chunk + splits)

        num_chunks = int32((end_tile - first_tile + chunk_tiles - 1) // chunk_tiles)
        if splits == 1 or merge_chunks(
            total, total_peak, total_mass, partials, tickets, row, unit, num_chunks, split, splits,
            split_rows,
        ):  # fmt: skip
            write_out(out, total, total_peak, total_mass, row, unit, sinks)

    return attention_decode
