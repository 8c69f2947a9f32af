"""What a block of threads does with the sums of a chunk, and with those of a row at its end.

Chunks are those of `attention_chunks`: a row's bits follow from its length because each chunk is
summed by itself and chunks are merged in their order. Here all warps of a block work on the same
tokens, so there is nothing to merge among them, and a thread's sums stay in its registers, those of
the chunk beside those of the row so far:

    row is one block of threads    total  ←  total merged with the chunk's sums        registers
    row is split over blocks       partials[chunk]  ←  the chunk's sums                memory
        the last one to finish     shared memory  ←  all of them merged (`attention_merge`)
                                   total  ←  shared memory

Both ways run the same instructions on the same numbers. `sums` are as `attention_shared_layout`
draws them; in the partials a thread's numbers lie slot by slot, as `attention_partials` says:

    r of slot 0, on tensor cores     sums[0, 0], sums[0, 1], sums[1, 0], sums[1, 1], …
    r of slot 1                      sums[0, 2], sums[0, 3], sums[1, 2], sums[1, 3], …
"""

from __future__ import annotations

from dataclasses import dataclass

from numba import cuda, float32, uint32

from kernels.cuda.attention_chunks import NO_PEAK
from kernels.cuda.attention_partials import (
    THREADS,
    place_of_record,
    quotient,
    scaled_sum,
    shares,
)
from kernels.cuda.attention_shared_layout import VECTOR, WARPS, SharedTileVariant
from kernels.cuda.instructions.conversions import (
    PAIR_CONVERSIONS,
    float32_to_word,
    word_to_float32,
)
from kernels.cuda.instructions.vectors import load_vector, store_vector, store_word
from kernels.cuda.variant import DeviceFunction, Local, Pointer, Scalar


@dataclass(frozen=True, slots=True)
class SharedResults:
    """Device functions for one variant; what they do stands where they are defined."""

    clear: DeviceFunction
    add_chunk: DeviceFunction
    take_merged: DeviceFunction
    write_out: DeviceFunction


def make_shared_results(variant: SharedTileVariant) -> SharedResults:
    """Return the functions."""
    slots, columns, own = variant.slots, variant.columns, variant.own
    layout, is_float32 = variant.layout, variant.is_float32
    entries, record = layout.entries, layout.record
    vectors = entries // slots // VECTOR  # of a slot
    rows = VECTOR // own  # that have one of its vectors
    pack: DeviceFunction = None if is_float32 else PAIR_CONVERSIONS[variant.dtype].pack
    sum_elements = variant.sum_elements
    warp_elements = sum_elements // WARPS

    @cuda.jit(device=True, inline="always")
    def clear(total: Local, peak: Local, mass: Local) -> None:
        """Begin with the result of no token at all."""
        for n in range(columns):
            for c in range(4):
                total[n, c] = float32(0)
        for slot in range(slots):
            peak[slot] = NO_PEAK
            mass[slot] = float32(0)

    @cuda.jit(device=True, inline="always")
    def add_chunk(
        total: Local, total_peak: Local, total_mass: Local, sums: Local, peak: Local, mass: Local,
        partials: Pointer, row: Scalar, unit: Scalar, chunk: Scalar, is_split: Scalar,
        split_rows: Scalar,
    ) -> None:  # fmt: skip
        """Merge a chunk's result into the row's, or leave it in `partials`."""
        if is_split:
            words = cuda.local.array((1, 4), uint32)
            first = place_of_record(row, unit, chunk, split_rows, record)
            for slot in range(slots):
                for v in range(vectors):
                    for k in range(VECTOR):
                        part = sums[v * rows + k // own, slot * own + k % own]
                        words[0, k] = float32_to_word(part)
                    place = ((slot * vectors + v) * THREADS + cuda.threadIdx.x) * VECTOR
                    store_vector(partials, first + place, words, 0)
                state = first + (entries + slot) * THREADS + cuda.threadIdx.x
                partials[state] = peak[slot]
                partials[state + slots * THREADS] = mass[slot]
        else:
            for slot in range(slots):
                top, shrink, share = shares(total_peak[slot], peak[slot])
                total_peak[slot] = top
                total_mass[slot] = scaled_sum(total_mass[slot], shrink, mass[slot], share)
                for n in range(columns):
                    for k in range(own):
                        c = slot * own + k
                        total[n, c] = scaled_sum(total[n, c], shrink, sums[n, c], share)

    @cuda.jit(device=True, inline="always")
    def take_merged(total: Local, merged: Pointer, is_any: Scalar) -> None:
        """Read what `merge_chunks` has left for this thread in shared memory, if there is any.

        What stood in `total` is of no account, so that nobody keeps it while chunks are merged.
        """
        words = cuda.local.array((1, 4), uint32)
        for slot in range(slots):
            for v in range(vectors):
                for k in range(VECTOR):
                    words[0, k] = uint32(0)
                if is_any:
                    place = ((slot * vectors + v) * THREADS + cuda.threadIdx.x) * VECTOR
                    load_vector(words, 0, merged, place)
                for k in range(VECTOR):
                    part = word_to_float32(words[0, k])
                    total[v * rows + k // own, slot * own + k % own] = part

    @cuda.jit(device=True, inline="always")
    def write_out(
        out: Pointer, total: Local, stride: Scalar, mass: Local, heads: Local, lane: Scalar,
        warp: Scalar,
    ) -> None:  # fmt: skip
        """Write what this thread has of the output.

        `stride`: rows of `total` from one tile of places to the next.
        `heads`: of each slot, which of all heads of all tokens its place is; -1: nobody's.
        """
        words = cuda.local.array((1, 4), uint32)
        for slot in range(slots):
            if heads[slot] >= 0:
                element = heads[slot] * sum_elements
                for n in range(columns):
                    if is_float32:
                        for k in range(4):
                            words[0, k] = float32_to_word(quotient(total[n, k], mass[0]))
                        store_vector(out, element + 128 * n + 4 * lane, words, 0)
                    else:
                        m, c = slot // 2 * stride + n, slot % 2 * 2
                        low = quotient(total[m, c], mass[slot])
                        high = quotient(total[m, c + 1], mass[slot])
                        place = warp_elements * warp + 8 * n + 2 * (lane & 3)
                        store_word(out, element + place, pack(low, high))

    return SharedResults(clear, add_chunk, take_merged, write_out)
