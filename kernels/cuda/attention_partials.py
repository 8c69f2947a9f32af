"""How the results of warps and of chunks merge; both decode kernels and the merge are made of it.

A result is a triple: `peak` the largest score, `mass` = Σ 2^(score - peak), and `sums` =
Σ 2^(score - peak) · V. Two merge by scaling both to the larger peak and adding (Milakov and
Gimelshein 2018; Dao et al. 2022, FlashAttention).

Everything here goes lane by lane. The four sharers of a chunk (`attention_chunks`), the warps of a
block of threads, hold sums of different tokens but of the same heads and dimensions, in the same
lanes and registers: rows of four numbers, `sums[entry, 0 … 3]`. To merge them, each warp scales its
own to the common peak and lays them down in shared memory; then every thread adds up a quarter of
its lane's, number `warp` of each row, and owns that for the rest of the kernel:

                       sums[entry, 0]   sums[entry, 1]   sums[entry, 2]   sums[entry, 3]
    laid down by       all warps        all warps        all warps        all warps
    added up, owned    by warp 0        by warp 1        by warp 2        by warp 3

Lanes are neighbours in shared memory, so no access conflicts. Which head and dimension an entry is
of is the kernel's affair; it says so by `place`, and only the very last step asks. The entries of a
thread belong to `slots` heads, one slot after the other.

*Partials*, the results of chunks when the chunks of a row are split over several blocks, lie in
memory as the threads own them, [S, 64 chunks, U units, record, 128 threads] in float32, so that
every warp writes and reads 128 bytes at once; a unit is what a block of threads works on, a kv head
or a part of its group. The record of a chunk in a thread:

    entries × sum │ slots × peak │ slots × mass
"""

from __future__ import annotations

from dataclasses import dataclass

from numba import cuda, float32

from kernels.cuda.attention_chunks import MAX_CHUNKS, NO_PEAK, SHARERS
from kernels.cuda.instructions.conversions import CONVERSIONS, exp2, maximum, reciprocal
from kernels.cuda.instructions.exact_float32 import multiply_add, multiply_float32
from kernels.cuda.variant import DeviceFunction, Local, Pointer, Scalar

THREADS = 32 * SHARERS  # of a block


@dataclass(frozen=True, slots=True)
class PartialLayout:
    """How the results of a block of threads lie in its threads.

    `parts`: blocks of threads that a group is dealt out to, `heads` to each. `entries`: rows of
    four sums of a lane. `slots`: the heads that one number of the rows is of, entries / slots rows
    each. `heads_of_slot`: 2 where numbers 0 and 2 of a row are of one head, 1 and 3 of another,
    else 1. `place(entry, warp, lane)`: head in the part and dimension of what a thread owns; a head
    past the part or the group is nobody's.
    """

    parts: int
    heads: int
    entries: int
    slots: int
    heads_of_slot: int
    place: DeviceFunction

    @property
    def record(self) -> int:
        """Numbers of a chunk's result in a thread."""
        return self.entries + 2 * self.slots

    def num_partials(self, num_rows: int, num_kv_heads: int) -> int:
        """Return how many float32 a split launch leaves for the merge."""
        units = num_kv_heads * self.parts
        return num_rows * MAX_CHUNKS * units * self.record * THREADS


@dataclass(frozen=True, slots=True)
class PartialFunctions:
    """Device functions for one layout; what they do stands where they are defined."""

    clear: DeviceFunction
    merge_warps: DeviceFunction
    find_output: DeviceFunction
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


def make_partial_functions(
    layout: PartialLayout, dtype: str, head_size: int, group: int
) -> PartialFunctions:
    """Return the device functions of decode attention in one layout."""
    parts, heads, place = layout.parts, layout.heads, layout.place
    entries, slots, record = layout.entries, layout.slots, layout.record
    heads_of_slot, entries_of_slot = layout.heads_of_slot, entries // slots
    states = slots * heads_of_slot  # heads of a lane before the merge
    from_float32 = CONVERSIONS[dtype][1]

    @cuda.jit(device=True, inline="always")
    def clear(total: Local, total_peak: Local, total_mass: Local) -> None:
        """Begin with the result of no token at all."""
        for i in range(entries):
            total[i, cuda.threadIdx.x] = float32(0)
        for slot in range(slots):
            total_peak[slot] = NO_PEAK
            total_mass[slot] = float32(0)

    @cuda.jit(device=True, inline="always")
    def merge_warps(
        sums: Local, peak: Local, mass: Local,
        total: Local, total_peak: Local, total_mass: Local,
        partials: Pointer, row: Scalar, unit: Scalar, chunk: Scalar,
    ) -> None:  # fmt: skip
        """Merge the warps' results into the chunk's, and that into the row's or into `partials`.

        `sums` [entries, 4], `peak` and `mass` [slots · heads_of_slot] of the warp; `peak` is used
        up. `total` [entries, threads] in shared memory, which each thread touches its own column
        of once a chunk and has no registers to spare for, and `total_peak`, `total_mass` [slots]
        are the row's so far. All threads of the block must call it.
        """
        lane = cuda.threadIdx.x % 32
        warp = cuda.threadIdx.x // 32
        peaks = cuda.shared.array((SHARERS, states, 32), float32)
        tops = cuda.shared.array((SHARERS, states, 32), float32)
        masses = cuda.shared.array((SHARERS, states, 32), float32)
        laid_down = cuda.shared.array((SHARERS, entries, 4, 32), float32)

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
        for i in range(entries):
            for number in range(4):
                j = i // entries_of_slot * heads_of_slot + number % heads_of_slot
                laid_down[warp, i, number, lane] = sums[i, number] * peak[j]
        cuda.syncthreads()

        is_split = cuda.gridDim.z > 1
        first = (row * MAX_CHUNKS + chunk) * cuda.gridDim.y + unit
        first = first * (record * THREADS) + cuda.threadIdx.x
        shrink = cuda.local.array(slots, float32)
        share = cuda.local.array(slots, float32)
        for slot in range(slots):
            j = heads_of_slot * slot + warp % heads_of_slot
            chunk_peak = tops[warp, j, lane]
            chunk_mass = masses[0, j, lane]
            for other in range(1, SHARERS):
                chunk_mass += masses[other, j, lane]
            if is_split:
                partials[first + (entries + slot) * THREADS] = chunk_peak
                partials[first + (entries + slots + slot) * THREADS] = chunk_mass
            top, shrink[slot], share[slot] = shares(total_peak[slot], chunk_peak)
            total_peak[slot] = top
            total_mass[slot] = scaled_sum(total_mass[slot], shrink[slot], chunk_mass, share[slot])
        for i in range(entries):
            slot = i // entries_of_slot
            chunk_sum = laid_down[0, i, warp, lane]
            for other in range(1, SHARERS):
                chunk_sum += laid_down[other, i, warp, lane]
            if is_split:
                partials[first + i * THREADS] = chunk_sum
            else:
                so_far = total[i, cuda.threadIdx.x]
                so_far = scaled_sum(so_far, shrink[slot], chunk_sum, share[slot])
                total[i, cuda.threadIdx.x] = so_far

    @cuda.jit(device=True, inline="always")
    def find_output(
        row: Scalar, unit: Scalar, entry: Scalar, warp: Scalar, lane: Scalar
    ) -> tuple[Scalar, Scalar]:
        """Return whether a thread's entry is anybody's, and its index in `out` [S, H, D]."""
        head, dim = place(entry, warp, lane)
        head_of_group = unit % parts * heads + head
        is_output = head < heads and head_of_group < group and dim < head_size
        kv_head_of_all = row * (cuda.gridDim.y // parts) + unit // parts
        return is_output, (kv_head_of_all * group + head_of_group) * head_size + dim

    @cuda.jit(device=True, inline="always")
    def write_out(out: Pointer, total: Local, total_mass: Local, row: Scalar, unit: Scalar) -> None:
        """Write what this thread owns of the row's output."""
        lane = cuda.threadIdx.x % 32
        warp = cuda.threadIdx.x // 32
        for i in range(entries):
            is_output, output = find_output(row, unit, i, warp, lane)
            # Chosen, not indexed: this loop is too long to be unrolled, and what is indexed by what
            # is not known to the compiler cannot be a register.
            mass = total_mass[0]
            for slot in range(1, slots):
                mass = total_mass[slot] if i >= slot * entries_of_slot else mass
            if is_output:
                value = quotient(total[i, cuda.threadIdx.x], mass)
                out[output] = from_float32(value)

    return PartialFunctions(clear, merge_warps, find_output, write_out)
