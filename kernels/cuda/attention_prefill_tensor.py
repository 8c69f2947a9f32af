"""Prefill attention on tensor cores, for 16-bit floats: see `attention_prefill` for what it does.

*Rows.* The query tokens of a tile times the heads of the group are the rows of a matrix, counted
token by token: place p of a row of the batch is token p // group, head p % group. A block of
threads takes 128 places, a warp 32 of them, as two tiles of 16 for the tensor cores, or for D 256
one tile (`attention_prefill_layout` says why). Where the group does not divide 128 the last places
belong to the next tile and are computed for nothing (at most 11 of 128).

    place     0 … 31   32 … 63   64 … 95   96 … 127
    warp         0        1         2         3          of its 32 places, lane l has the fragments
                                                         of l // 4, + 8, + 16, + 24: `r` = 0 … 3
    D 256      0   1    2   3     4   5     6   7        of its 16, of l // 4 and + 8: `r` = 0, 1

*The loop* runs over tiles of 32 keys, 64 for D 64, 16 for D 256. Two stages of shared memory hold
the keys and values of a tile each; copies run one tile ahead of the arithmetic:

    stage 0   copy 0 │ compute 0 │ copy 2    │ compute 2 │
    stage 1          │ copy 1    │ compute 1 │ copy 3    │ …
                     W B         W B         W B

    W   wait_for_copies   the copies that this thread has started are done …
    B   syncthreads       … and everybody's are; everybody has also left the tile before, whose
                          stage the next copies, started right behind, will overwrite

One barrier a tile is enough. Keys past the row's end arrive as zeros and are not read: a score is
masked anyway, but a value of NaN would make NaN of a weight of zero. So do keys before the window
of the tile's first token, where the loop begins.

*A tile.* scores = Q · Kᵀ, weights = 2^(scale · scores - peak), sums += weights · V. A fragment of
scores, packed, is a fragment of weights (see `instructions.tiles`), so nothing passes through
shared memory in between. The mass Σ weights is one product more, of the weights with ones: it sums
what the values are weighted with, rounded as it is, needs no shuffles, and spares the registers in
which float32 weights would wait for being added. The peak follows the largest score only once that
is ahead by 8, since any peak serves that keeps powers of two in range: then the sums have to be
rescaled at the first tile and hardly ever again. A warp leaves out tiles of keys behind its last
token, or before its first one's window; only those that reach past the first, or before the window
of the last, are masked.

*Shared memory*, and how tiles come from there, is the affair of `attention_prefill_pool`.

*Registers* are what the kernel is short of: for D 128 a warp's sums take 136 a thread, its scores
32, its queries 64. Half of the queries (beside a pool of 8 bits nearly all) are therefore *parked*
in shared memory, each thread's fragments in vectors of its own; no barrier concerns them. What
addresses and masks are made of is made again where it is needed, starting from a second read of
`tile_tokens`: the compiler would keep it in registers through the loop otherwise.

*The argument for 250 TFLOP/s at D 128 on an H200* (not a measurement; that at D 256 is in
`attention_prefill_layout`). Per warp and tile of keys there are 132 products of 4096 flop. What the
units of a multiprocessor need for four warps, one on each scheduler, in cycles:

    tensor cores    132 products; mma.sync does about 62 % of the chip's 4096 flop a cycle   ~ 850
    shared memory   4 · (32 ldmatrix + 8 parked vectors) · 512 bytes at 128 bytes a cycle      640
    powers of two   36 instructions of 8 cycles                                                290
    issue           132 products + 40 reads + about 300 others                               ~ 470

With one tile of 16 rows a warp the reads of shared memory would take 1024 for as many products,
more than the tensor cores' time; two make them fewer, and eight warps in two blocks that wait at
different barriers fill each other's gaps. 850 cycles for four warps are 2470 flop a cycle, 570
TFLOP/s on 132 multiprocessors at 1.75 GHz; 250 leave room for more than half of the time to be
lost. From the second cache a block reads 16 KB for 32 keys, 128 flop for a byte: 2 TB/s at 250
TFLOP/s, of about 5. Tiles on the diagonal are computed in full: 32 keys of thousands.

A pool of 8 bits halves the reads of shared memory and of the second cache, neither of which is the
limit, and adds about 350 instructions a tile to widen and scale: what is gained with it is memory
for longer contexts, and decode.
"""

from __future__ import annotations

from collections.abc import Callable

from numba import cuda, float32, int32, int64, uint32

from kernels.cuda.attention_caps import share_of_cap, steeper_anew
from kernels.cuda.attention_prefill_layout import LAYOUTS, TILE_ROWS
from kernels.cuda.attention_prefill_pool import make_prefill_pool, sum_columns
from kernels.cuda.attention_prefill_window import MINUS_INFINITY, make_prefill_window
from kernels.cuda.attention_tiles import find_tile, keys_seen
from kernels.cuda.attention_variant import SINK_UNIT, SLACK
from kernels.cuda.instructions.async_copies import commit_copies, copy_async, wait_for_copies
from kernels.cuda.instructions.conversions import (
    FULL_WARP,
    PAIR_CONVERSIONS,
    exp2,
    maximum,
    reciprocal,
    word_to_float32,
)
from kernels.cuda.instructions.tiles import MULTIPLY_TILES
from kernels.cuda.instructions.vectors import load_vector, load_word, store_vector
from kernels.cuda.lanes import lane_and_warp
from kernels.cuda.variant import Pointer, Scalar

ONE_TWICE = {"bfloat16": 0x3F80_3F80, "float16": 0x3C00_3C00}


def make_tensor_prefill(
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
    """Return the kernel with its compile-time parameters bound."""
    layout = LAYOUTS[head_size]
    keys, threads = layout.keys, layout.threads
    row_tiles, warp_rows = layout.row_tiles, layout.warp_rows
    lane_rows = 2 * row_tiles
    parked = layout.parked if kv_dtype is None else layout.parked_8_bits
    window_ = make_prefill_window(keys, has_window=has_window)
    first_seen_of, is_read, sees = window_.first_seen, window_.is_read, window_.sees
    is_cut, is_hidden, no_peak = window_.is_cut, window_.is_hidden, window_.no_peak
    pool_ = make_prefill_pool(dtype, kv_dtype, head_size, block_size, is_read)
    query_words, store_row = pool_.query_words, pool_.store_row
    key_place_of, value_place_of = pool_.key_place, pool_.value_place
    copy_scales, add_keys, add_values = pool_.copy_scales, pool_.add_keys, pool_.add_values
    has_scales, head_elements, stage = pool_.has_scales, pool_.head_elements, pool_.stage
    shift, mask, vector_elements = pool_.shift, pool_.mask, pool_.vector
    most_tokens = TILE_ROWS // group  # of a tile
    block_shift = block_size.bit_length() - 1
    steps = head_size // 16
    resident = steps - parked
    columns = sum_columns(head_size)
    mass = columns - 1
    key_tiles = keys // 8
    half_stage = keys * head_size  # elements: first the keys, then the values
    vectors = head_size // vector_elements  # of a token's row
    # Rows that are copied at a time, a multiple of 8, so that they are all swizzled alike.
    copy_rows = threads // vectors // 8 * 8
    copiers = copy_rows * vectors
    # Sizes of arrays.
    parked_elements = threads * vector_elements  # of a fragment
    shared_elements = 2 * stage + parked * row_tiles * parked_elements
    element_type = pool_.element
    resident_fragments = row_tiles * resident
    score_fragments = row_tiles * key_tiles
    sum_fragments = row_tiles * columns
    one_twice = ONE_TWICE[pool_.value_dtype]
    multiply = MULTIPLY_TILES[pool_.value_dtype]
    pack = PAIR_CONVERSIONS[pool_.value_dtype].pack

    def attention_prefill(
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
        window: Scalar,
        sinks: Pointer,
        cap: Scalar,
    ) -> None:
        """Attend with kv head blockIdx.x for tile blockIdx.y; arguments as in PrefillVariant."""
        tile = cuda.blockIdx.y
        row = tile_rows[tile]
        if row < 0:
            return
        kv_head = int32(cuda.blockIdx.x)
        thread = cuda.threadIdx.x
        lane, warp = lane_and_warp()
        first_token = tile_tokens[tile]
        seq_len, first_query, context, end_token = find_tile(
            row, first_token, most_tokens, seq_lens, cu_query_lens
        )
        first_place = int32(first_token * group + warp * warp_rows)
        first_position, visible_keys = keys_seen(first_place, warp_rows, group, context, end_token)

        tiles = cuda.shared.array(shared_elements, element_type, alignment=16)
        queries = cuda.local.array((resident_fragments, 4), uint32)
        left = cuda.local.array((row_tiles, 4), uint32)
        words = cuda.local.array((1, 4), uint32)
        scores = cuda.local.array((score_fragments, 4), float32)
        weights = cuda.local.array((row_tiles, 4), uint32)
        sums = cuda.local.array((sum_fragments, 4), float32)
        elements = cuda.local.array(lane_rows, int64)  # where the queries of `r` begin
        peak = cuda.local.array(lane_rows, float32)
        shrink = cuda.local.array(lane_rows, float32)
        ones = (uint32(one_twice), uint32(one_twice))

        # The queries as fragments of tiles A. Lanes without a token take the last one.
        parking = int64(2 * stage + thread * vector_elements)
        for r in range(lane_rows):
            place = int32(first_place + 8 * r + (lane >> 2))
            token = int64(first_query + min(place // group, end_token - 1))
            head = kv_head * group + place % group
            elements[r] = token * query_stride + head * head_size
            for step in range(resident):
                both = query_words(query, elements[r] + 16 * step, lane & 3)
                for half in range(2):
                    queries[r // 2 * resident + step, 2 * half + r % 2] = both[half]
            peak[r] = no_peak
        for m in range(row_tiles):
            for step in range(parked):
                for i in range(2):
                    element = elements[2 * m + i] + 16 * (resident + step)
                    both = query_words(query, element, lane & 3)
                    for half in range(2):
                        words[0, 2 * half + i] = both[half]
                store_vector(tiles, parking + (m * parked + step) * parked_elements, words, 0)
        for n in range(sum_fragments):
            for i in range(4):
                sums[n, i] = float32(0)

        # Where this lane's row of the first 8 × 8 tiles lies in a stage, of keys and of values.
        key_place = int32(key_place_of(lane))
        value_place = int32(half_stage + value_place_of(lane))
        # What this thread copies of each `copy_rows` tokens: a vector, from where to where.
        copied_token = int32(thread // vectors)
        vector = int32(thread % vectors)
        copied_slot = int32(copied_token % block_size)
        copy_source = int32(kv_head * head_elements + copied_slot * head_size)
        copy_source = int32(copy_source + vector_elements * vector)
        swizzled = vector ^ (copied_token >> shift & mask)
        copy_target = int32(copied_token * head_size + vector_elements * swizzled)
        first_entry = int32(row * table_width)
        last_key = int32(seq_len - 1)
        num_tiles = int32((context + end_token - 1) // keys + 1)
        first_seen = first_seen_of(context, first_token, window)
        factor = cap if has_cap else scale_log2e  # of scores

        # One step early, to start the first copies.
        for t in range(int32(first_seen // keys - 1), num_tiles):
            wait_for_copies()
            cuda.syncthreads()
            next_tile = int32(t + 1)
            if next_tile < num_tiles:
                if thread < copiers:
                    target = int64((next_tile & 1) * stage + copy_target)
                    first_slot = int32(next_tile * keys) & (block_size - 1)  # 0, or the other half
                    for first in range(0, keys, copy_rows):
                        key = int32(next_tile * keys + first + copied_token)
                        entry = int32(first_entry + (min(key, last_key) >> block_shift))
                        base = int64(block_tables[entry]) * block_stride + copy_source
                        source = base + (first_slot + first % block_size) * head_size
                        is_wanted = key <= last_key and is_read(key, first_seen)
                        element = target + first * head_size
                        copy_async(tiles, element, pool, source + key_offset, is_wanted)
                        element += half_stage
                        copy_async(tiles, element, pool, source + value_offset, is_wanted)
                if has_scales:
                    copy_scales(
                        tiles, int64((next_tile & 1) * stage + 2 * half_stage), pool, block_tables,
                        first_entry, block_stride, key_offset, value_offset, kv_head,
                        int32(next_tile * keys), first_seen, last_key,
                    )  # fmt: skip
                commit_copies()
            first_key = int32(t * keys)
            if t >= 0 and sees(first_key, first_position, visible_keys, window):
                # scores[tiles of rows, keys / 8] = Q · Kᵀ
                base = int32((t & 1) * stage)
                for n in range(score_fragments):
                    for i in range(4):
                        scores[n, i] = float32(0)
                place = int32(base + key_place)
                for step in range(steps):
                    for m in range(row_tiles):
                        if step < resident:
                            for i in range(4):
                                left[m, i] = queries[m * resident + step, i]
                        else:
                            number = m * parked + step - resident
                            load_vector(left, m, tiles, parking + number * parked_elements)
                    add_keys(scores, words, left, tiles, place, step)
                if has_scales:
                    # Of the keys 8n + 2 · quad and the next, in this lane's columns.
                    scales = int64(base + 2 * half_stage + 8 * (lane & 3))
                    for n in range(key_tiles):
                        for i in range(2):
                            scale = word_to_float32(load_word(tiles, scales + 32 * n + 4 * i))
                            for r in range(lane_rows):
                                scores[r // 2 * key_tiles + n, r % 2 * 2 + i] *= scale

                if has_cap:
                    # In this order: fragment by fragment takes a register more than there are.
                    steep = steeper_anew(scale_log2e, cap)
                    for i in range(4):
                        for n in range(score_fragments):
                            scores[n, i] = share_of_cap(scores[n, i], steep)

                if is_cut(first_key, first_position, visible_keys, window):
                    row_place = tile_tokens[tile] * group + warp * warp_rows + (lane >> 2)
                    for r in range(lane_rows):
                        position = context + int32(row_place + 8 * r) // group
                        reach = int32(position - first_key - 2 * (lane & 3))
                        for n in range(key_tiles):
                            for i in range(2):
                                if is_hidden(8 * n + i, reach, window):
                                    fragment = r // 2 * key_tiles + n
                                    scores[fragment, r % 2 * 2 + i] = MINUS_INFINITY

                # What stands in `scores` becomes the weights, 2 to the power of score - peak.
                rises = False
                for r in range(lane_rows):
                    top = MINUS_INFINITY
                    for n in range(key_tiles):
                        for i in range(2):
                            top = maximum(top, scores[r // 2 * key_tiles + n, r % 2 * 2 + i])
                    for bit in range(2):
                        top = maximum(top, cuda.shfl_xor_sync(FULL_WARP, top, 1 << bit))
                    top *= factor
                    old = peak[r]
                    if top > old + SLACK:
                        peak[r] = top
                    shrink[r] = exp2(old - peak[r])
                    rises |= shrink[r] != float32(1)
                    for n in range(key_tiles):
                        for i in range(2):
                            score = scores[r // 2 * key_tiles + n, r % 2 * 2 + i]
                            weight = exp2(score * factor - peak[r])
                            scores[r // 2 * key_tiles + n, r % 2 * 2 + i] = weight
                if cuda.ballot_sync(FULL_WARP, rises) != 0:
                    for n in range(sum_fragments):
                        for i in range(4):
                            sums[n, i] *= shrink[n // columns * 2 + i // 2]

                # sums[tiles of rows, D / 8 and the mass] += weights · (V, 1)
                place = int32(base + value_place)
                for pair in range(key_tiles // 2):
                    for m in range(row_tiles):
                        for i in range(4):
                            n = m * key_tiles + 2 * pair + i // 2
                            j = i % 2 * 2
                            weights[m, i] = pack(scores[n, j], scores[n, j + 1])
                        a = (weights[m, 0], weights[m, 1], weights[m, 2], weights[m, 3])
                        multiply(sums, m * columns + mass, a, ones)
                    if has_scales:
                        scales = int64(base + 2 * half_stage + 4 * keys + 8 * (lane & 3))
                        for half in range(2):
                            first_scale = scales + 32 * (2 * pair + half)
                            low = word_to_float32(load_word(tiles, first_scale))
                            high = word_to_float32(load_word(tiles, first_scale + 4))
                            for r in range(lane_rows):
                                n, j = r // 2 * key_tiles + 2 * pair + half, r % 2 * 2
                                both = pack(scores[n, j] * low, scores[n, j + 1] * high)
                                weights[r // 2, 2 * half + r % 2] = both
                    add_values(sums, words, weights, tiles, place, pair)

        # Everything about the tile is asked again, see *Registers*.
        row, first_token = tile_rows[tile], tile_tokens[tile]
        _, first_query, _, end_token = find_tile(
            row, first_token, most_tokens, seq_lens, cu_query_lens
        )
        row_place = first_token * group + warp * warp_rows + (lane >> 2)
        for r in range(lane_rows):
            place = int32(row_place + 8 * r)
            token = place // group
            if token < end_token:
                heads = int64(cuda.gridDim.x * group)
                head = kv_head * group + place % group
                whole = sums[r // 2 * columns + mass, r % 2 * 2]
                if has_sinks:
                    whole += exp2(sinks[head] * SINK_UNIT - peak[r])
                share = reciprocal(whole)
                element = ((first_query + token) * heads + head) * head_size
                store_row(out, element, sums, r // 2 * columns, r % 2 * 2, share, lane & 3)

    return attention_prefill
