"""How the results of warps and of chunks merge; both decode kernels are made of it.

A result is a triple: `peak` the largest score, `mass` = Σ 2^(score - peak), and `sums` =
Σ 2^(score - peak) · V. Two merge by scaling both to the larger peak and adding (Milakov and
Gimelshein 2018; Dao et al. 2022, FlashAttention).

Everything here goes lane by lane. The four sharers of a chunk (`attention_chunks`), the warps of a
block of threads, hold sums of different tokens but of the same heads and dimensions, in the same
lanes and registers: rows of four numbers, `sums[entry, 0 … 3]`. To merge them, each warp scales its
own to the common peak and lays them down in shared memory; then every thread adds up a quarter of
its lane's, and owns that for the rest of the kernel. Which quarter is the layout's affair: it says
by `find` which entry and number is number r of those that a warp owns,

    lane's numbers, laid down by all warps      r     0  1  2  3   4  5  6  7   …
                                                of warp 0 │    ·    │    ·    │      added up and
                                                of warp 1 │    ·    │    ·    │      owned by that
                                                of warp 2 │    ·    │    ·    │      warp
                                                of warp 3 │    ·    │    ·    │

and by `place` which head and dimension that is. `width` of them beside each other are laid down,
read and kept in one access of up to 16 bytes. Lanes are neighbours in shared memory, so no access
conflicts. The numbers of a thread belong to `slots` heads, one slot after the other.

*Partials*, the results of chunks when the chunks of a row are split over several blocks, lie in
memory as the threads own them, [chunks, split rows, U units, record] in float32, chunks outermost,
so that they take the room that the longest row has chunks; a unit is what a block of threads works
on, a kv head or a part of its group. The record of a chunk holds the numbers of all 128 threads,
`width` sums of a thread beside each other, so that every warp writes and reads whole lines at once:

    entries / width × [128 threads, width] sums │ slots × [128] peaks │ slots × [128] masses
"""

from __future__ import annotations

from dataclasses import dataclass

from numba import cuda, float32, int32, int64, uint32

from kernels.cuda.attention_chunks import NO_PEAK, SHARERS
from kernels.cuda.attention_variant import SINK_UNIT
from kernels.cuda.instructions.conversions import (
    CONVERSIONS,
    PAIR_CONVERSIONS,
    exp2,
    float32_to_word,
    maximum,
    reciprocal,
    word_to_float32,
)
from kernels.cuda.instructions.exact_float32 import multiply_add, multiply_float32
from kernels.cuda.instructions.vectors import LOAD_WORDS, STORE_WORDS
from kernels.cuda.variant import DeviceFunction, Local, Pointer, Scalar, Scalars

THREADS = 32 * SHARERS  # of a block


@dataclass(frozen=True, slots=True)
class PartialLayout:
    """How the results of a block of threads lie in its threads.

    `parts`: blocks of threads that a group is dealt out to, `heads` to each. `entries`: rows of
    four sums of a lane, and so many numbers does a thread own of them. `slots`: the heads that one
    number of the rows is of, entries / slots rows each. `heads_of_slot`: 2 where numbers 0 and 2 of
    a row are of one head, 1 and 3 of another, else 1; then a warp owns those of number
    warp % heads_of_slot. `width`: numbers of a thread that go together, 1, 2 or 4.
    `are_beside`: whether these are neighbouring dimensions of one head.

    `find(r, warp)`: entry and number of what a thread of a warp owns as its number r.
    `place(r, warp, lane)`: its head in the part and its dimension; a head past the part or the
    group is nobody's.
    """

    parts: int
    heads: int
    entries: int
    slots: int
    heads_of_slot: int
    width: int
    are_beside: bool
    find: DeviceFunction
    place: DeviceFunction

    @property
    def record(self) -> int:
        """Numbers of a chunk's result in a thread."""
        return self.entries + 2 * self.slots

    def num_partials(self, split_rows: int, num_kv_heads: int, num_chunks: int) -> int:
        """Return how many float32 so many rows of up to so many chunks leave for the merge."""
        units = num_kv_heads * self.parts
        return num_chunks * split_rows * units * self.record * THREADS


@dataclass(frozen=True, slots=True)
class PartialFunctions:
    """Device functions for one layout; what they do stands where they are defined."""

    clear: DeviceFunction
    merge_warps: DeviceFunction
    write_out: DeviceFunction


@cuda.jit(device=True, inline="always")
def shares(peak: Scalar, other: Scalar) -> tuple[Scalar, Scalar, Scalar]:
    """Return the common peak of two results, and what to scale either by."""
    top = maximum(peak, other)
    return top, exp2(peak - top), exp2(other - top)


@cuda.jit(device=True, inline="always")
def scaled_sum(total: Scalar, shrink: Scalar, part: Scalar, share: Scalar) -> Scalar:
    """Return total · shrink + part · share, rounded the same way in every kernel.

    The product on the right is rounded, the rest is one fused step; the compiler has no choice.
    """
    return multiply_add(total, shrink, multiply_float32(part, share))


@cuda.jit(device=True, inline="always")
def quotient(total: Scalar, mass: Scalar) -> Scalar:
    """Return total / mass, and 0 for a row without tokens, whose mass is 0."""
    return total * reciprocal(mass) if mass != float32(0) else float32(0)


@cuda.jit(device=True, inline="always")
def unchanged(number: Scalar) -> Scalar:
    """Return the number: a place is computed where the compiler likes."""
    return number


@cuda.jit(device=True, inline="always")
def part_of_block(split_rows: Scalar) -> Scalars:
    """Return the row that this block of threads works on, its split of that, and of how many.

    The first `split_rows` rows have gridDim.y blocks for each unit, the others one: of these
    gridDim.y share a plane of the grid. The row is int64, the others int32.
    """
    plane, place, splits = int32(cuda.blockIdx.z), int32(cuda.blockIdx.y), int32(cuda.gridDim.y)
    if plane < split_rows:
        return int64(plane), place, splits
    row = int64(split_rows + (plane - split_rows) * splits + place)
    return row, int32(0), int32(1)


@cuda.jit(device=True, inline="always")
def place_of_record(
    row: Scalar, unit: Scalar, chunk: Scalar, split_rows: Scalar, record: int
) -> Scalar:
    """Return where in the partials a chunk's results begin, int64."""
    place = (int64(chunk) * split_rows + row) * cuda.gridDim.x + unit
    return place * (record * THREADS)


def make_partial_functions(
    layout: PartialLayout,
    dtype: str,
    head_size: int,
    group: int,
    sum_unit: float = 1.0,
    again: DeviceFunction = unchanged,
    *,
    has_sinks: bool = False,
) -> PartialFunctions:
    """Return the device functions of decode attention in one layout.

    The warps' sums are in units of 1 / `sum_unit`; whatever is merged of them is in ones. `again`:
    `addresses.anew` where places are to be computed in the merge alone.
    """
    parts, heads, find, place = layout.parts, layout.heads, layout.find, layout.place
    entries, slots, record = layout.entries, layout.slots, layout.record
    width, beside = layout.width, layout.width if layout.are_beside else 1
    heads_of_slot, entries_of_slot = layout.heads_of_slot, entries // slots
    states = slots * heads_of_slot  # heads of a lane before the merge
    from_float32, one = CONVERSIONS[dtype][1], float32(sum_unit)
    load_words, store_words = LOAD_WORDS[width], STORE_WORDS[width]
    store_output = STORE_WORDS[max(1, beside // 2)]
    pack: DeviceFunction = PAIR_CONVERSIONS[dtype].pack if beside > 1 else None
    words_of_warp = entries * SHARERS * 32  # that one lays down
    laid_down_shape = SHARERS * words_of_warp

    @cuda.jit(device=True, inline="always")
    def clear(total: Pointer, total_peak: Local, total_mass: Local) -> None:
        """Begin with the result of no token at all."""
        nothing = cuda.local.array((1, 4), uint32)
        for k in range(width):
            nothing[0, k] = uint32(0)
        for r in range(0, entries, width):
            store_words(total, r * THREADS + cuda.threadIdx.x * width, nothing, 0)
        for slot in range(slots):
            total_peak[slot] = NO_PEAK
            total_mass[slot] = float32(0)

    @cuda.jit(device=True, inline="always")
    def merge_warps(
        sums: Local, peak: Local, mass: Local,
        total: Pointer, total_peak: Local, total_mass: Local,
        partials: Pointer, row: Scalar, unit: Scalar, chunk: Scalar, is_split: Scalar,
        split_rows: Scalar,
    ) -> None:  # fmt: skip
        """Merge the warps' results into the chunk's, and that into the row's or into `partials`.

        `sums` [entries, 4], `peak` and `mass` [slots · heads_of_slot] of the warp; `peak` is used
        up. `total` [entries · threads] in shared memory, which each thread touches its own part of
        once a chunk and has no registers to spare for, and `total_peak`, `total_mass` [slots] are
        the row's so far. All threads of the block must call it.
        """
        thread = again(cuda.threadIdx.x)
        lane, warp = thread % 32, thread // 32
        peaks = cuda.shared.array((SHARERS, states, 32), float32)
        tops = cuda.shared.array((SHARERS, states, 32), float32)
        masses = cuda.shared.array((SHARERS, states, 32), float32)
        laid_down = cuda.shared.array(laid_down_shape, float32, alignment=16)
        words = cuda.local.array((1, 4), uint32)

        # Shared memory is written in two rounds. What the first writes is read before the second
        # barrier, what the second writes after it: so the next chunk's first round, which some
        # warps begin while others still read here, disturbs nobody.
        for j in range(states):
            peaks[warp, j, lane] = peak[j]
        cuda.syncthreads()
        for j in range(states):
            top = peaks[0, j, lane]
            for other in range(1, SHARERS):
                top = maximum(top, peaks[other, j, lane])
            peak[j] = exp2(peak[j] - top)  # from here on what to scale by
            tops[warp, j, lane] = top
            masses[warp, j, lane] = mass[j] * peak[j]
            peak[j] *= one
        for owner in range(SHARERS):
            for r in range(0, entries, width):
                for k in range(width):
                    i, number = find(r + k, owner)
                    j = i // entries_of_slot * heads_of_slot + number % heads_of_slot
                    words[0, k] = float32_to_word(sums[i, number] * peak[j])
                laid = (owner * entries + r) * 32 + lane * width
                store_words(laid_down, warp * words_of_warp + laid, words, 0)
        cuda.syncthreads()

        first = place_of_record(again(row), again(unit), chunk, split_rows, record)
        shrink = cuda.local.array(slots, float32)
        share = cuda.local.array(slots, float32)
        for slot in range(slots):
            j = heads_of_slot * slot + warp % heads_of_slot
            chunk_peak = tops[warp, j, lane]
            chunk_mass = masses[0, j, lane]
            for other in range(1, SHARERS):
                chunk_mass += masses[other, j, lane]
            if is_split:
                state = first + (entries + slot) * THREADS + thread
                partials[state] = chunk_peak
                partials[state + slots * THREADS] = chunk_mass
            top, shrink[slot], share[slot] = shares(total_peak[slot], chunk_peak)
            total_peak[slot] = top
            total_mass[slot] = scaled_sum(total_mass[slot], shrink[slot], chunk_mass, share[slot])
        chunk_sums = cuda.local.array(4, float32)
        for r in range(0, entries, width):
            laid = (warp * entries + r) * 32 + lane * width
            own = r * THREADS + thread * width
            for other in range(SHARERS):
                load_words(words, 0, laid_down, other * words_of_warp + laid)
                for k in range(width):
                    part = word_to_float32(words[0, k])
                    chunk_sums[k] = part if other == 0 else chunk_sums[k] + part
            if is_split:
                for k in range(width):
                    words[0, k] = float32_to_word(chunk_sums[k])
                store_words(partials, first + own, words, 0)
            else:
                load_words(words, 0, total, own)
                for k in range(width):
                    # Chosen, not indexed: these loops are too long to be unrolled, and what is
                    # indexed by what is not known to the compiler cannot be a register.
                    old_share, new_share = shrink[0], share[0]
                    for slot in range(1, slots):
                        is_later = (r if beside > 1 else r + k) >= slot * entries_of_slot
                        old_share = shrink[slot] if is_later else old_share
                        new_share = share[slot] if is_later else new_share
                    so_far = word_to_float32(words[0, k])
                    so_far = scaled_sum(so_far, old_share, chunk_sums[k], new_share)
                    words[0, k] = float32_to_word(so_far)
                store_words(total, own, words, 0)

    @cuda.jit(device=True, inline="always")
    def in_group(unit: Scalar, head: Scalar) -> Scalar:
        """Return which head of its group a unit's head is."""
        return unit % parts * heads + head

    @cuda.jit(device=True, inline="always")
    def find_output(
        row: Scalar, unit: Scalar, r: Scalar, warp: Scalar, lane: Scalar
    ) -> tuple[Scalar, Scalar]:
        """Return whether a thread's number r is anybody's, and its index in `out` [S, H, D]."""
        head, dim = place(r, warp, lane)
        head_of_group = in_group(unit, head)
        is_output = head < heads and head_of_group < group and dim < head_size
        kv_head_of_all = row * (cuda.gridDim.x // parts) + unit // parts
        return is_output, (kv_head_of_all * group + head_of_group) * head_size + dim

    @cuda.jit(device=True, inline="always")
    def write_out(
        out: Pointer, total: Pointer, total_peak: Local, total_mass: Local, row: Scalar,
        unit: Scalar, sinks: Pointer,
    ) -> None:  # fmt: skip
        """Write what this thread owns of the row's output; masses with sinks are used up."""
        lane = cuda.threadIdx.x % 32
        warp = cuda.threadIdx.x // 32
        if has_sinks:
            for slot in range(slots):
                head, _ = place(slot * entries_of_slot, warp, lane)
                head_of_group = in_group(unit, head)
                if head < heads and head_of_group < group:
                    sink = sinks[unit // parts * group + head_of_group] * SINK_UNIT
                    total_mass[slot] += exp2(sink - total_peak[slot])
        words = cuda.local.array((1, 4), uint32)
        results = cuda.local.array(4, float32)
        for first in range(0, entries, width):
            load_words(words, 0, total, first * THREADS + cuda.threadIdx.x * width)
            for k in range(width):
                mass = total_mass[0]
                for slot in range(1, slots):
                    mass = total_mass[slot] if first + k >= slot * entries_of_slot else mass
                results[k] = quotient(word_to_float32(words[0, k]), mass)
            for r in range(first, first + width, beside):
                is_output, output = find_output(row, unit, r, warp, lane)
                if is_output:
                    if beside == 1:
                        out[output] = from_float32(results[r - first])
                    else:
                        for k in range(0, beside, 2):
                            words[0, k // 2] = pack(results[k], results[k + 1])
                        store_output(out, output, words, 0)

    return PartialFunctions(clear, merge_warps, write_out)
