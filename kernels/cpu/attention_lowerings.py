"""The three ways to compute a row block with a super-block, under one set of signatures.

A `Lowering` is the functions that attention is made of (`kernels.cpu.attention`), all callable from
compiled code:

    begin(rows)                                                             before an item
    prepare(places, first, limit, key_dim, value_dim, memory)               once a super-block
    super_block(rows, queries, stride, places, positions, key_dim, value_dim, states, out, memory,
                cap)                                                        once a super-block
    end()                                                                   after an item

and in `super_block` (`kernels.cpu.attention_blocks`)

    scores(rows, queries, stride, places, key_dim, out)                     once a row block
    weights(scores, positions, sees_all, state, out, dim, places, weights, cap)    once a row
    values(rows, weights, places, dim, out, states, is_same)                once a row block

`key_dim`, `value_dim` (elsewhere `dim`): D' and V'. `first`, `limit`: from where the item's first
token sees, and to where its last one does. `memory`: room for a super-block in bfloat16; of
`super_block` the worker's. `is_same`: whether Place.COUNTS is the same for all rows; otherwise it
is what any of them sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernels.cpu.amx_tiles import release_tiles
from kernels.cpu.attention_amx import (
    amx_scores,
    amx_values,
    blank_unseen,
    configure_attention_tiles,
)
from kernels.cpu.attention_blocks import one_by_one, side_by_side
from kernels.cpu.attention_context import count_seen
from kernels.cpu.attention_places import Place
from kernels.cpu.attention_rows import FIRST, LIMIT
from kernels.cpu.attention_sizes import (
    PAIR_ROW_BYTES,
    ROW_BLOCK,
    SCORE_ROW_BYTES,
    STATE_BYTES,
    SUB_BLOCKS,
)
from kernels.cpu.attention_tile import TILE_ROWS, FloatTiles
from kernels.cpu.attention_weights import row_weights, weights_of_row
from kernels.cpu.compiled import inlined, int64_at, word
from kernels.cpu.eight_bits import WIDEN
from kernels.cpu.instruction_set import InstructionSet
from kernels.cpu.kv_layout import SUB_BLOCK_TOKENS, VALUE_BYTES


@dataclass(frozen=True, slots=True)
class Lowering:
    """What attention to a pool is made of; the functions as above.

    `to_pairs`: queries and weights are bfloat16. `value_bytes`: of the pool.
    """

    begin: Any
    prepare: Any
    super_block: Any
    end: Any
    to_pairs: bool
    value_bytes: int


def lowering(dtype: str, chosen: InstructionSet) -> Lowering:
    """Return the functions for a pool of a type on an instruction set."""
    has_scales, is_float = dtype in WIDEN, dtype == "float32"
    to_pairs = not is_float and (chosen.has_bf16_dot or chosen.has_amx)
    emit = weights_of_row(to_pairs=to_pairs, scaled=has_scales)
    weights = row_weights(emit)

    def blocks(scores: Any, values: Any) -> Any:  # noqa: ANN401 - Numba's objects
        return one_by_one(scores, weights, values, to_pairs=to_pairs)

    if to_pairs and chosen.has_amx:
        prepare = _expansion(dtype) if has_scales else _hide_unseen
        super_block = side_by_side(emit, weights, blocks(_amx_scores, _amx_values))
        return Lowering(
            _begin_tiles, prepare, super_block, release_tiles, to_pairs, VALUE_BYTES[dtype]
        )
    storage = "float32" if is_float else "pairs" if to_pairs else "bfloat16"
    scores, values = _vector_functions(FloatTiles(storage, chosen), to_pairs=to_pairs)
    prepare = _expansion(dtype) if has_scales else _leave_in_place
    return Lowering(
        _no_tiles, prepare, blocks(scores, values), _nothing, to_pairs, VALUE_BYTES[dtype]
    )


def _vector_functions(tiles: FloatTiles, *, to_pairs: bool) -> tuple[Any, Any]:
    """Return `scores` and `values` of tiles of vectors, up to 4 rows at a time."""
    score_tile, value_tile = tiles.scores, tiles.values
    row_bytes = PAIR_ROW_BYTES if to_pairs else SCORE_ROW_BYTES

    @inlined()
    def scores(rows: int, queries: int, stride: int, places: int, dim: int, out: int) -> None:
        for r in range(0, rows, TILE_ROWS):
            here, count = queries + r * stride, min(TILE_ROWS, rows - r)
            score_tile(count, here, stride, places, dim, out + r * SCORE_ROW_BYTES)

    @inlined()
    def values(
        rows: int,
        weights: int,
        places: int,
        dim: int,
        out: int,
        states: int,
        is_same: bool,
    ) -> None:
        r = 0
        while r < rows:
            end = min(rows, r + TILE_ROWS)
            if not is_same:
                # Rows of one token see the same, and rows of another something else.
                state = states + r * STATE_BYTES
                limit = word(state, LIMIT)
                count_seen(places, word(state, FIRST), limit)
                stop = r + 1
                while stop < end and word(states + stop * STATE_BYTES, LIMIT) == limit:
                    stop += 1
                end = stop
            value_tile(end - r, weights + r * row_bytes, places, dim, out + 4 * r * dim)
            r = end

    return scores, values


@inlined()
def _no_tiles(rows: int) -> None:
    """Do nothing: vectors need no setting up."""


@inlined()
def _nothing() -> None:
    """Do nothing."""


@inlined()
def _leave_in_place(
    places: int, first: int, limit: int, key_dim: int, value_dim: int, memory: int
) -> None:
    """Do nothing: K and V are read where they lie."""


def _expansion(dtype: str) -> Any:  # noqa: ANN401 - Numba's objects
    """Return what expands the sub-blocks of a pool of eight bits to bfloat16."""
    widen = WIDEN[dtype]

    @inlined()
    def expand(
        places: int, first: int, limit: int, key_dim: int, value_dim: int, memory: int
    ) -> None:
        words = int64_at(places)
        count_seen(places, first, limit)
        count = SUB_BLOCK_TOKENS * (key_dim + value_dim)
        for j in range(SUB_BLOCKS):
            out = memory + 2 * j * count
            if words[Place.COUNTS + j] > 0:
                widen(words[Place.KEYS + j], count, out)
            words[Place.KEYS + j] = out
            words[Place.VALUES + j] = out + 2 * SUB_BLOCK_TOKENS * key_dim

    return expand


@inlined()
def _hide_unseen(
    places: int, first: int, limit: int, key_dim: int, value_dim: int, memory: int
) -> None:
    """Replace the V of sub-blocks with tokens that nobody has written by copies with zeros there.

    Those before a window have been written.
    """
    words = int64_at(places)
    count_seen(places, first, limit)
    size = 2 * SUB_BLOCK_TOKENS * value_dim
    for j in range(SUB_BLOCKS):
        seen = words[Place.COUNTS + j]
        if 0 < seen < SUB_BLOCK_TOKENS:
            blank_unseen(words[Place.VALUES + j], value_dim, seen, memory + j * size)
            words[Place.VALUES + j] = memory + j * size


@inlined()
def _begin_tiles(rows: int) -> None:
    """Set up the tile registers."""
    configure_attention_tiles(min(rows, ROW_BLOCK))


@inlined()
def _amx_scores(rows: int, queries: int, stride: int, places: int, dim: int, out: int) -> None:
    """Compute all rows there are room for; those behind the last one are never used."""
    amx_scores(queries, stride, places, dim, out)


@inlined()
def _amx_values(
    rows: int,
    weights: int,
    places: int,
    dim: int,
    out: int,
    states: int,
    is_same: bool,
) -> None:
    """Compute all rows there are room for; weights of tokens a row does not see are 0."""
    amx_values(weights, places, dim, out)
