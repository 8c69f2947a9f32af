"""Rows of many experts, put in order: what `route_experts` leaves for the products behind it.

In a mixture each of T tokens goes through C of E experts: T · C *pairs*, pair t · C + c being token
t and the c-th of its experts. What they are is known on the device alone, and a launch cannot wait
for it. So pairs are listed expert by expert, and the list is cut into *tiles* of as many as a block
of threads multiplies at once (its `columns`); the grid has as many tiles as there could be:

    expert            0 │ 1 │ 2 (nobody) │ 3                 T = 4, C = 2, tiles of 8: pairs of
    order   [T·C]   2 5 │ 0 │            │ 1 3 4 6 7         tokens 1 2 │ 0 │ │ 0 1 2 3 3
    tiles   [n, 3]  expert 0, from place 0, 2 pairs │ 1, 2, 1 │ 3, 3, 5 │ 0 pairs │ …

A tile without pairs ends its blocks at once. Which place a pair has in its expert's list has no say
in what it gets: a product's bits depend on its row of x alone (`quantized_matmul`).

Everything around the order lies by pairs, so nothing is copied into it and back: a product reads
its x at pair // share (share = C: rows of tokens, 1: rows of pairs) and writes y at the pair.

    x [T, K] ─→ gate, up ─→ [T·C, F] ─→ down ─→ [T·C, hidden] ─→ add_experts ─→ [T, hidden]
         share = C                share = 1
"""

from __future__ import annotations

from typing import Final

from numba import cuda, int32, int64

from kernels.cuda.variant import Pointer, Scalar, Scalars

TILE_NUMBERS: Final = 3
"""Of a tile: its expert, the place of its first pair, how many pairs it has."""
MAX_EXPERTS: Final = 512
MAX_EXPERTS_PER_TOKEN: Final = 32


def most_tiles(num_pairs: int, num_experts: int, tile_pairs: int) -> int:
    """Return how many tiles there can be, however the pairs fall to experts."""
    used = min(num_pairs, num_experts)
    return (num_pairs + used * (tile_pairs - 1)) // tile_pairs


@cuda.jit(device=True, inline="always")
def tile_of_block(tiles: Pointer) -> Scalars:
    """Return the expert of tile blockIdx.x, the place of its first pair and that behind its last.

    All int64; where there is no pair both places are the same.
    """
    at = TILE_NUMBERS * int64(cuda.blockIdx.x)
    first = int64(tiles[at + 1])
    return int64(tiles[at]), first, first + tiles[at + 2]


@cuda.jit(device=True, inline="always")
def row_of_pair(order: Pointer, place: Scalar, share: Scalar) -> Scalar:
    """Return the row of x that the pair at `place` reads, int64. `share`: pairs of a row."""
    return int64(int32(order[place]) // int32(share))
