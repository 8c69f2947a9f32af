"""The merge after split decode attention: the last block of a row to finish takes all its chunks.

    peak, mass, sum  ←  nothing
    for each chunk c of the row:
        top   = max(peak, peak_c)
        mass  = mass · 2^(peak - top) + mass_c · 2^(peak_c - top)
        sum   = sum  · 2^(peak - top) + sum_c  · 2^(peak_c - top)
    out = sum / mass

This is the merge by log-sum-exp (the weight of a chunk is its share of Σ 2^score), kept as peak and
mass apart, and the very instructions by which an unsplit block merges as it goes, in the same
order: the bits agree (`attention_chunks`), whichever block comes last.

Who does what. Blocks of threads that found chunks of a row's unit draw a ticket when all of their
results lie in the partials (drawn in `attention_partials`); those that found none are no part of
it. The one that draws the last number knows that all results are there, and that it sees them
(`instructions.across_blocks`). Each thread merges what it would own were the row not split. The
last ticket sets the count back to 0, for the next launch: a launch that runs to its end leaves
tickets as it found them, and one that does not leaves no device to go on with. Launches that share
tickets must not run side by side. A row of length 0 has no chunk; its first block gives zeros.

What limits it: latency, and how fast one multiprocessor reads from the second cache, where the
partials still are. As many chunks as registers hold are read at a time, of which the loop over
tokens has left plenty: 8 at D 128, 40 KB a block, and 4 at D 256, 36 KB. Up to so many cost a
round, a row of 64 eight, or sixteen. A
kernel of its own, as this once was, took more blocks for the merge but a launch in each layer, of
which a decode step at few rows has a tenth less now.
"""

from __future__ import annotations

from numba import cuda, float32, int32, uint32

from kernels.cuda.attention_chunks import NO_PEAK
from kernels.cuda.attention_partials import (
    THREADS,
    PartialLayout,
    place_of_record,
    scaled_sum,
    shares,
    unchanged,
)
from kernels.cuda.instructions.across_blocks import LOAD_FRESH_WORDS, fence, take_ticket
from kernels.cuda.instructions.conversions import float32_to_word, word_to_float32
from kernels.cuda.instructions.vectors import STORE_WORDS
from kernels.cuda.variant import DeviceFunction, Local, Pointer, Scalar

NUMBERS_AT_ONCE = 80  # registers of a thread for what is being read
MOST_CHUNKS_AT_ONCE = 8


def chunks_at_once(layout: PartialLayout) -> int:
    """Return how many chunks' results are on their way together; a power of two."""
    fitting = min(MOST_CHUNKS_AT_ONCE, NUMBERS_AT_ONCE // layout.record)
    return 1 << (fitting.bit_length() - 1)


def make_merge_chunks(layout: PartialLayout, again: DeviceFunction = unchanged) -> DeviceFunction:
    """Return the device function that merges the chunks of a split row, in one layout."""
    entries, slots, record, width = layout.entries, layout.slots, layout.record, layout.width
    entries_of_slot, vectors = entries // slots, entries // layout.width
    at_once = chunks_at_once(layout)
    words_shape, states_shape = (at_once * vectors, 4), (at_once * slots, 4)
    load_fresh, load_fresh_word = LOAD_FRESH_WORDS[width], LOAD_FRESH_WORDS[1]
    store_words = STORE_WORDS[width]

    @cuda.jit(device=True, inline="always")
    def draws_last(tickets: Pointer, row: Scalar, unit: Scalar, num_blocks: Scalar) -> Scalar:
        """Return whether all of `num_blocks` have come here, this one as the last of them."""
        number = cuda.shared.array(1, int32)
        # From here on all warps have written their results.
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            last = int32(num_blocks - 1)
            fence()
            number[0] = take_ticket(tickets, row * cuda.gridDim.x + unit, last)
            fence()
        cuda.syncthreads()
        return number[0] == int32(num_blocks - 1)

    @cuda.jit(device=True, inline="always")
    def merge_chunks(
        total: Pointer, total_peak: Local, total_mass: Local, partials: Pointer,
        tickets: Pointer, row: Scalar, unit: Scalar, num_chunks: Scalar, split: Scalar,
        splits: Scalar, split_rows: Scalar,
    ) -> Scalar:  # fmt: skip
        """Merge the row's chunks into the row's sums, peaks and masses, if this block is the last.

        Return whether it is: then the row is to be written. `total` is cleared for a row of no
        chunk. All threads of the block must call it.
        """
        num_blocks = min(splits, num_chunks)
        is_last = split == 0
        if split < num_blocks:
            is_last = draws_last(tickets, row, unit, num_blocks)
            if is_last:
                thread = again(cuda.threadIdx.x)
                peak = cuda.local.array(slots, float32)
                mass = cuda.local.array(slots, float32)
                sums = cuda.local.array(entries, float32)
                words = cuda.local.array(words_shape, uint32)
                peaks = cuda.local.array(states_shape, uint32)
                masses = cuda.local.array(states_shape, uint32)
                for slot in range(slots):
                    peak[slot] = NO_PEAK
                    mass[slot] = float32(0)
                for r in range(entries):
                    sums[r] = float32(0)
                for first_chunk in range(0, num_chunks, at_once):
                    # All reads first, so that they are under way together; past the end the last
                    # again.
                    for k in range(at_once):
                        chunk = min(first_chunk + k, num_chunks - 1)
                        first = place_of_record(row, unit, chunk, split_rows, record)
                        for slot in range(slots):
                            state = first + (entries + slot) * THREADS + thread
                            load_fresh_word(peaks, k * slots + slot, partials, state)
                            state += slots * THREADS
                            load_fresh_word(masses, k * slots + slot, partials, state)
                        for v in range(vectors):
                            own = first + v * width * THREADS + thread * width
                            load_fresh(words, k * vectors + v, partials, own)
                    for k in range(at_once):
                        if first_chunk + k < num_chunks:
                            for slot in range(slots):
                                state = k * slots + slot
                                top, shrink, share = shares(
                                    peak[slot], word_to_float32(peaks[state, 0])
                                )
                                peak[slot] = top
                                part = word_to_float32(masses[state, 0])
                                mass[slot] = scaled_sum(mass[slot], shrink, part, share)
                                for r in range(entries_of_slot):
                                    i = slot * entries_of_slot + r
                                    part = word_to_float32(
                                        words[k * vectors + i // width, i % width]
                                    )
                                    sums[i] = scaled_sum(sums[i], shrink, part, share)
                for slot in range(slots):
                    total_peak[slot] = peak[slot]
                    total_mass[slot] = mass[slot]
                for v in range(vectors):
                    for i in range(width):
                        words[v, i] = float32_to_word(sums[v * width + i])
                    own = v * width * THREADS + thread * width
                    store_words(total, own, words, v)
        return is_last

    return merge_chunks
