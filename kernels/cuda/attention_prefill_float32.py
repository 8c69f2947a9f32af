"""Prefill attention in float32 on ordinary cores: see `attention_prefill` for what it does.

A block of threads takes 16 places of (query token, head), counted token by token, four a warp. The
loop runs over tiles of 32 keys. For the scores a lane owns a key, so that a score needs no shuffle;
for the sums it owns the dimensions lane, lane + 32, …, and the weights pass through shared memory
in between (at D 256 as below):

    scores    lane k:   Σ_d query[place, d] · K[k, d]         queries read by all lanes at once
    weights   [4 places a warp, 32 keys]                      written by key, read by place
    sums      lane i:   Σ_k weight[place, k] · V[k, i]        weights read by all lanes at once

Keys and values have one buffer each. The copies of one run while the other is computed with:

    keys      copy 0 │ compute 0 │ copy 1    │ compute 1 │        W   wait_for_copies
    values           │ copy 0    │ compute 0 │ copy 1    │ …      B   syncthreads
                     W B         W B         W B

Each barrier says two things: what was copied is there for everybody, and everybody has left the
buffer that the next copies overwrite. Tokens past the row's end, or before all windows of the tile,
arrive as zeros and are not read.

Vectors of 16 bytes trade places within a row of keys, v at v ^ (r % 8) in row r, so that eight
lanes that read the same vector of eight keys hit different eighths of 128 bytes.

*D 256.* All of that would be 82 KB of shared memory, of 48 that arrays may take whose sizes are in
the code. So a tile has 16 keys there and a warp three places: 45 KB. Two lanes share a key: lane k
takes the even vectors of its dimensions, lane k + 16 the odd ones, so that the queries' two do not
meet in a bank; a shuffle adds the halves of a score.

What limits it, by argument: shared memory. For 16 multiplications of scores a warp reads one vector
of keys a lane, four cycles, and four of queries, a cycle each: half the float32 rate. For 64 of the
sums it reads 16 words of values and four vectors of weights, 20 cycles for 16. It is there to be
exact, for tests and small models.
"""

from __future__ import annotations

from collections.abc import Callable

from numba import cuda, float32, int32, int64, uint32

from kernels.cuda.attention_caps import exactly_capped
from kernels.cuda.attention_prefill_window import MINUS_INFINITY, make_prefill_window
from kernels.cuda.attention_tiles import find_tile, keys_seen
from kernels.cuda.attention_variant import SINK_UNIT
from kernels.cuda.instructions.async_copies import commit_copies, copy_async, wait_for_copies
from kernels.cuda.instructions.conversions import FULL_WARP, exp2, maximum, word_to_float32
from kernels.cuda.instructions.vectors import load_vector
from kernels.cuda.lanes import lane_and_warp
from kernels.cuda.variant import Pointer, Scalar

WARPS = 4
THREADS = 32 * WARPS
# By head size; keys of a tile are the lanes of a warp, or half as many.
WARP_ROWS = {64: 4, 96: 4, 128: 4, 256: 3}
TILE_KEYS = {64: 32, 96: 32, 128: 32, 256: 16}


def tile_rows(head_size: int) -> int:
    """Return the places of a block of threads."""
    return WARPS * WARP_ROWS[head_size]


def make_float32_prefill(
    head_size: int,
    group: int,
    block_size: int,
    *,
    has_window: bool,
    has_sinks: bool = False,
    has_cap: bool = False,
) -> Callable[..., None]:
    """Return the kernel with its compile-time parameters bound."""
    warp_rows, tile_keys = WARP_ROWS[head_size], TILE_KEYS[head_size]
    rows = tile_rows(head_size)
    most_tokens = rows // group  # of a tile
    key_bits = tile_keys.bit_length() - 1
    parts = 32 // tile_keys  # lanes that share a key
    vectors = head_size // 4  # of a token's row
    dims = head_size // 32  # of a lane
    tile_elements = tile_keys * head_size
    query_elements = rows * head_size
    copies = tile_keys * vectors // THREADS  # of a tile, by a thread
    block_shift = block_size.bit_length() - 1
    query_vectors = rows * vectors
    weight_elements = rows * tile_keys
    window_ = make_prefill_window(tile_keys, has_window=has_window)
    first_seen_of, is_read, sees = window_.first_seen, window_.is_read, window_.sees
    is_hidden, no_peak = window_.is_hidden, window_.no_peak

    @cuda.jit(device=True, inline="always")
    def start_copies(
        target: Pointer,
        is_swizzled: bool,
        pool: Pointer,
        block_tables: Pointer,
        first_entry: int,
        block_stride: int,
        offset: int,
        first_seen: int,
        seq_len: int,
        first_key: int,
    ) -> None:
        """Start copying a tile's keys or values, `offset` elements into each block."""
        for i in range(copies):
            number = int32(i * THREADS + cuda.threadIdx.x)
            key = int32(number // vectors)
            vector = int32(number % vectors)
            token = int32(first_key + key)
            entry = int32(first_entry + (min(token, seq_len - 1) >> block_shift))
            slot = int32((token & (block_size - 1)) * head_size + 4 * vector)
            source = int64(block_tables[entry]) * block_stride + offset + slot
            place = vector ^ (key & 7) if is_swizzled else vector
            element = int32(key * head_size + 4 * place)
            is_wanted = token < seq_len and is_read(token, first_seen)
            copy_async(target, element, pool, source, is_wanted)
        commit_copies()

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
        row = int64(tile_rows[cuda.blockIdx.y])
        if row < 0:
            return
        kv_head = int64(cuda.blockIdx.x)
        thread = cuda.threadIdx.x
        lane, warp = lane_and_warp()
        lane_key, part = int32(lane & (tile_keys - 1)), int32(lane >> key_bits)
        first_token = tile_tokens[cuda.blockIdx.y]
        seq_len, first_query, context, end_token = find_tile(
            row, first_token, most_tokens, seq_lens, cu_query_lens
        )
        num_tiles = int32((context + end_token - 1) // tile_keys + 1)
        first_place = int32(first_token * group + warp * warp_rows)
        first_position, visible_keys = keys_seen(first_place, warp_rows, group, context, end_token)
        first_seen = first_seen_of(context, first_token, window)
        first_tile = int32(first_seen // tile_keys)

        queries = cuda.shared.array(query_elements, float32, alignment=16)
        keys = cuda.shared.array(tile_elements, float32, alignment=16)
        values = cuda.shared.array(tile_elements, float32, alignment=16)
        weights = cuda.shared.array(weight_elements, float32, alignment=16)
        words = cuda.local.array((2, 4), uint32)
        scores = cuda.local.array(warp_rows, float32)
        sums = cuda.local.array((warp_rows, dims), float32)
        peak = cuda.local.array(warp_rows, float32)
        mass = cuda.local.array(warp_rows, float32)  # of the lane's keys
        for r in range(warp_rows):
            peak[r] = no_peak
            mass[r] = float32(0)
            for i in range(dims):
                sums[r, i] = float32(0)

        # The queries and the first keys. Places without a token take the last one.
        for number in range(thread, query_vectors, THREADS):
            place = first_token * group + number // vectors
            token = int64(first_query + min(place // group, end_token - 1))
            element = token * query_stride + (kv_head * group + place % group) * head_size
            copy_async(queries, number * 4, query, element + number % vectors * 4, True)
        first_entry = int32(row * table_width)
        head_offset = kv_head * (block_size * head_size)
        key_offset += head_offset
        value_offset += head_offset
        start_copies(
            keys, True, pool, block_tables, first_entry, block_stride, key_offset, first_seen,
            seq_len, first_tile * tile_keys,
        )  # fmt: skip

        warp_weights = int32(warp * (warp_rows * tile_keys))
        # Two, for the compiler makes something else of one that is not from 0 on, if it were 0.
        tiles = range(first_tile, num_tiles) if has_window else range(num_tiles)
        for t in tiles:
            wait_for_copies()
            cuda.syncthreads()
            first_key = int32(t * tile_keys)
            start_copies(
                values, False, pool, block_tables, first_entry, block_stride, value_offset,
                first_seen, seq_len, first_key,
            )  # fmt: skip
            if sees(first_key, first_position, visible_keys, window):
                for r in range(warp_rows):
                    scores[r] = float32(0)
                for step in range(vectors // parts):
                    vector = parts * step + part
                    load_vector(words, 0, keys, lane_key * head_size + 4 * (vector ^ (lane & 7)))
                    for r in range(warp_rows):
                        load_vector(
                            words, 1, queries, (warp * warp_rows + r) * head_size + 4 * vector
                        )
                        for i in range(4):
                            key_element = word_to_float32(words[0, i])
                            scores[r] += key_element * word_to_float32(words[1, i])

                for r in range(warp_rows):
                    place = first_place + r
                    for bit in range(key_bits, 5):
                        scores[r] += cuda.shfl_xor_sync(FULL_WARP, scores[r], 1 << bit)
                    score = scores[r] * scale_log2e
                    if has_cap:
                        score = exactly_capped(score, cap)
                    if is_hidden(first_key + lane_key, context + place // group, window):
                        score = MINUS_INFINITY
                    top = maximum(peak[r], score)
                    for bit in range(key_bits):
                        top = maximum(top, cuda.shfl_xor_sync(FULL_WARP, top, 1 << bit))
                    shrink = exp2(peak[r] - top)
                    peak[r] = top
                    weight = exp2(score - top)
                    mass[r] = mass[r] * shrink + weight
                    for i in range(dims):
                        sums[r, i] *= shrink
                    if part == 0:
                        weights[warp_weights + r * tile_keys + lane_key] = weight

            wait_for_copies()
            cuda.syncthreads()
            if t + 1 < num_tiles:
                start_copies(
                    keys, True, pool, block_tables, first_entry, block_stride, key_offset,
                    first_seen, seq_len, int32(first_key + tile_keys),
                )  # fmt: skip
            if sees(first_key, first_position, visible_keys, window):
                for first in range(0, tile_keys, 4):
                    for r in range(warp_rows):
                        load_vector(words, 0, weights, warp_weights + r * tile_keys + first)
                        for k in range(4):
                            weight = word_to_float32(words[0, k])
                            for i in range(dims):
                                value = values[(first + k) * head_size + 32 * i + lane]
                                sums[r, i] += weight * value

        for r in range(warp_rows):
            for bit in range(key_bits):
                mass[r] += cuda.shfl_xor_sync(FULL_WARP, mass[r], 1 << bit)
        for r in range(warp_rows):
            place = first_place + r
            token = place // group
            if token < end_token:
                heads = int64(cuda.gridDim.x * group)
                if has_sinks:
                    sink = sinks[kv_head * group + place % group] * SINK_UNIT
                    mass[r] += exp2(sink - peak[r])
                element = (first_query + token) * heads + kv_head * group + place % group
                for i in range(dims):
                    out[element * head_size + 32 * i + lane] = sums[r, i] / mass[r]

    return attention_prefill
