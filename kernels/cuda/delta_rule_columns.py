"""Some columns of a value head's memory in the registers of a warp, and what a token does there.

A lane has four neighbouring columns of every eighth group of rows, so a warp has 16 columns; of
more than 128 rows every 16th group, and 8 columns, so that a lane has 64 numbers at most:

    memory [Dk, Dv]        columns 0 … 3   4 … 7   8 … 11  12 … 15
                rows 0 … 3      lane 0    lane 1    lane 2    lane 3
                     4 … 7           4         5         6         7
                     …
                    28 … 31         28        29        30        31
                    32 … 35          0         1  …

So the warp reads 64 bytes of eight rows at once, its keys as eight neighbouring vectors from shared
memory, and each of a lane's vectors of keys meets 16 numbers of the memory. What a token does,
column by column (c) and over all rows (d):

    recalled[c] = α · Σ_d memory[d, c] · k[d]            sums over the lanes of a column: 3 shuffles
    change[c]   = β · (v[c] − recalled[c])
    memory[d,c] = α · memory[d, c] + k[d] · change[c]
    out[c]      = Σ_d memory[d, c] · q[d]

The first sum is of the memory before it has faded, so that the fading, which waits for nothing, can
be done while the shuffles are under way. Where nothing is recalled (Mamba-2), change[c] = β · v[c]
and that sum is left out. All of it is rounded as written, products fused where a sum stands beside
them: the compiler has no choice that could differ from kernel to kernel. Columns do not know of
each other, rows are summed in one order, so a column's bits are the same whatever warps are beside
its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from numba import cuda, float32, int32

from kernels.cuda.head_lanes import make_load_run
from kernels.cuda.instructions.conversions import FULL_WARP
from kernels.cuda.instructions.elements import LOAD_FLOATS, STORE_FLOATS
from kernels.cuda.instructions.exact_float32 import add_float32, multiply_add, multiply_float32
from kernels.cuda.variant import DeviceFunction, Local, Pointer, Scalar, Scalars

VECTOR: Final = 4
"""Columns of a lane."""
MANY_ROWS: Final = 128
"""With more, more lanes share a column."""


def row_groups(key_size: int) -> int:
    """Return how many lanes share a column."""
    return 8 if key_size <= MANY_ROWS else 16


def warp_columns(key_size: int) -> int:
    """Return how many columns a warp has."""
    return 32 // row_groups(key_size) * VECTOR


@dataclass(frozen=True, slots=True)
class MemoryColumns:
    """Device functions, all for a whole warp; `memory`: a lane's rows, [`lane_rows`, 4].

    `load(memory, states, first, pitch, lane)`: from `states`, where the warp's columns begin at
    `first` and rows are `pitch` apart; `store(states, first, pitch, memory, lane)`; `clear(memory)`
    is an empty one. `apply(memory, staged, at, value_at, beta, alpha, lane)`: what a token does; q
    of the head begins at `staged[at]`, k behind it, the warp's v at `value_at`, shared memory. It
    returns what comes out of column `column_of(lane)` of the warp, which several lanes have: those
    but one are no `is_writer(lane)`.
    """

    lane_rows: int
    load: DeviceFunction
    store: DeviceFunction
    clear: DeviceFunction
    apply: DeviceFunction
    column_of: DeviceFunction
    is_writer: DeviceFunction


def make_memory_columns(key_size: int, *, recalls: bool = True) -> MemoryColumns:
    """Return what a warp does with its columns, of Dk rows."""
    groups = row_groups(key_size)
    quads = 32 // groups  # lanes of a row
    quad_bits = quads.bit_length() - 1
    shared_bits = 8 - quads  # of lanes, in which those differ that have the same sum in the end
    rows = key_size // groups
    run = 4 if key_size % (4 * groups) == 0 else 2  # rows that are neighbours
    piece_rows, pieces = run * groups, rows // run
    load_run = make_load_run("float32", run)
    load_floats, store_floats = LOAD_FLOATS["float32"], STORE_FLOATS["float32"]

    @cuda.jit(device=True, inline="always")
    def place_of(lane: Scalar, row: Scalar, pitch: Scalar) -> Scalar:
        """Return where one of a lane's rows is, from the warp's first column on."""
        of_head = piece_rows * (row // run) + run * (lane >> quad_bits) + row % run
        return of_head * pitch + VECTOR * (lane & (quads - 1))

    @cuda.jit(device=True, inline="always")
    def load(memory: Local, states: Pointer, first: Scalar, pitch: Scalar, lane: Scalar) -> None:
        for row in range(rows):
            load_floats(memory, row, states, first + place_of(lane, row, pitch))

    @cuda.jit(device=True, inline="always")
    def store(states: Pointer, first: Scalar, pitch: Scalar, memory: Local, lane: Scalar) -> None:
        for row in range(rows):
            store_floats(states, first + place_of(lane, row, pitch), memory, row)

    @cuda.jit(device=True, inline="always")
    def clear(memory: Local) -> None:
        for row in range(rows):
            for c in range(VECTOR):
                memory[row, c] = float32(0)

    @cuda.jit(device=True, inline="always")
    def column_of(lane: Scalar) -> Scalar:
        return int32(VECTOR * (lane & (quads - 1)) + ((lane >> 3) & 2) + ((lane >> 3) & 1))

    @cuda.jit(device=True, inline="always")
    def is_writer(lane: Scalar) -> Scalar:
        return lane & shared_bits == 0

    @cuda.jit(device=True, inline="always")
    def add_up(sums: Local, lane: Scalar) -> Scalar:
        """Return the sum of column `column_of(lane)`: each lane gives away what is others'.

        Four or five shuffles, where a butterfly of all four columns would take three times as many.
        """
        low, high = _halves(sums[0], sums[2], lane & 16)
        first = add_float32(low, cuda.shfl_xor_sync(FULL_WARP, high, 16))
        low, high = _halves(sums[1], sums[3], lane & 16)
        second = add_float32(low, cuda.shfl_xor_sync(FULL_WARP, high, 16))
        low, high = _halves(first, second, lane & 8)
        total = add_float32(low, cuda.shfl_xor_sync(FULL_WARP, high, 8))
        for bit in range(quad_bits, 3):
            total = add_float32(total, cuda.shfl_xor_sync(FULL_WARP, total, 1 << bit))
        return total

    @cuda.jit(device=True, inline="always")
    def apply(
        memory: Local,
        staged: Pointer,
        at: Scalar,
        value_at: Scalar,
        beta: Scalar,
        alpha: Scalar,
        lane: Scalar,
    ) -> Scalar:
        queries = cuda.local.array((pieces, run), float32)
        keys = cuda.local.array((pieces, run), float32)
        change = cuda.local.array((1, VECTOR), float32)
        sums = cuda.local.array(VECTOR, float32)
        own = int32(at + run * (lane >> quad_bits))
        for piece in range(pieces):
            load_run(keys, piece, staged, own + key_size + piece_rows * piece)
        load_floats(change, 0, staged, value_at + VECTOR * (lane & (quads - 1)))
        for c in range(VECTOR):
            sums[c] = float32(0)
        if recalls:
            for row in range(rows):
                for c in range(VECTOR):
                    sums[c] = multiply_add(memory[row, c], keys[row // run, row % run], sums[c])
            for bit in range(quad_bits, 5):
                for c in range(VECTOR):
                    sums[c] = add_float32(sums[c], cuda.shfl_xor_sync(FULL_WARP, sums[c], 1 << bit))
        for c in range(VECTOR):
            rest = change[0, c]
            if recalls:
                rest = multiply_add(-alpha, sums[c], rest)
            change[0, c] = multiply_float32(beta, rest)
            sums[c] = float32(0)
        for piece in range(pieces):
            load_run(queries, piece, staged, own + piece_rows * piece)
        for row in range(rows):
            key, query = keys[row // run, row % run], queries[row // run, row % run]
            for c in range(VECTOR):
                faded = multiply_float32(alpha, memory[row, c])
                memory[row, c] = multiply_add(key, change[0, c], faded)
                sums[c] = multiply_add(memory[row, c], query, sums[c])
        return add_up(sums, lane)

    return MemoryColumns(rows, load, store, clear, apply, column_of, is_writer)


@cuda.jit(device=True, inline="always")
def _halves(first: Scalar, second: Scalar, takes_second: Scalar) -> Scalars:
    """Return what a lane keeps of two columns, and what it gives away."""
    if takes_second != 0:
        return second, first
    return first, second
