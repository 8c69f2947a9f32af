"""Attention in the AMX tile registers: 16 rows and a super-block of K and V, all bfloat16.

    scores   registers 0–3: rows × 16 tokens, one of each sub-block      Q [rows × 32] · K [32 × 16]
    values   registers 0–3: rows × 16 elements of the head each          P [rows × 16] · V [16 × 16]

A sub-block of K is a column of tiles as it stands, and so are its 16 tokens of V, 8 pairs. The
other registers hold the operands: 4 and 5 of 32 summed terms, 6 and 7 of 16 (V, and the end of a
head of, say, 80 elements).

A row of a tile is computed by itself, in one order; 1 row goes through the same instructions as 16.
Subnormal numbers count as zero. What an instruction adds for a token that a row does not see is a
weight of exactly 0 times V: V of tokens that no row of the item sees may be NaN and is replaced by
zeros (`blank_unseen`); V of a later token of the same item must be finite, or that row's sequence
is lost anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils

from kernels.cpu.amx_tiles import (
    clear_tile,
    configure,
    load_tile,
    multiply_tiles,
    store_tile,
)
from kernels.cpu.attention_places import VECTOR_BYTES, Place, place
from kernels.cpu.attention_sizes import PAIR_ROW_BYTES, SCORE_ROW_BYTES, SUB_BLOCKS
from kernels.cpu.emitted import emitted
from kernels.cpu.vector_ir import (
    I32,
    I32X,
    LANES,
    Builder,
    Value,
    broadcast,
    counted_loop,
    i64,
    load,
    offset,
    prefetch,
    store,
)

QUERIES: Final = 4
KEYS: Final = 5
SHORT_ROWS: Final = 6
SHORT_COLUMNS: Final = 7
"""Registers: rows and columns of 32 summed terms, and the same of 16."""
PAIRS: Final = 16
"""Rows of a register of 32 summed terms: pairs."""
TILE_BYTES: Final = PAIRS * VECTOR_BYTES
NEAR: Final = 3
FAR: Final = 2
"""Caches that K and V are fetched into: the first, or, where row blocks go side by side and fill it
themselves, the second."""


def _multiply(builder: Builder, total: int, rows: int, columns: int) -> None:
    multiply_tiles(builder, "tdpbf16ps", total, rows, columns)


@emitted(types.void, types.int64)
def configure_attention_tiles(builder: Builder, rows: Value) -> None:
    """Set up the tile registers of this thread for row blocks of `rows` rows, 1 to 16."""
    shapes: dict[int, tuple[Value | int, int]] = dict.fromkeys(range(8), (rows, VECTOR_BYTES))
    shapes[KEYS] = (PAIRS, VECTOR_BYTES)
    shapes[SHORT_COLUMNS] = (PAIRS // 2, VECTOR_BYTES)
    shapes[SHORT_ROWS] = (rows, VECTOR_BYTES // 2)
    configure(builder, shapes)


def _fetch(
    builder: Builder, is_wanted: Value, address: Value, rows: int, stride: Value | int,
    locality: int,
) -> None:  # fmt: skip
    """Prefetch the lines of a tile."""
    with builder.if_then(is_wanted):
        for row in range(rows):
            down = i64(stride * row) if isinstance(stride, int) else builder.mul(stride, i64(row))
            prefetch(builder, offset(builder, address, down), locality)


def _fetches(builder: Builder, places: Value) -> Value:
    return builder.icmp_signed("!=", place(builder, places, Place.FETCH, 0), i64(0))


def _scores(locality: int) -> Any:  # noqa: ANN401 - Numba's objects
    def amx_scores(
        builder: Builder, queries: Value, stride: Value, places: Value, dim: Value, scores: Value
    ) -> None:
        keys = [place(builder, places, Place.KEYS, j) for j in range(SUB_BLOCKS)]
        ahead = [place(builder, places, Place.NEXT_KEYS, j) for j in range(SUB_BLOCKS)]
        fetches = _fetches(builder, places)
        clear_scores(builder)

        def step(index: Value, *, is_short: bool = False) -> None:
            rows, columns = (SHORT_ROWS, SHORT_COLUMNS) if is_short else (QUERIES, KEYS)
            lines = PAIRS // 2 if is_short else PAIRS
            down = builder.mul(index, i64(TILE_BYTES))
            load_tile(builder, rows, offset(builder, queries, builder.shl(index, i64(6))), stride)
            for j in range(SUB_BLOCKS):
                load_tile(builder, columns, offset(builder, keys[j], down), VECTOR_BYTES)
                next_at = offset(builder, ahead[j], down)
                _fetch(builder, fetches, next_at, lines, VECTOR_BYTES, locality)
                _multiply(builder, j, rows, columns)

        whole = builder.lshr(dim, i64(5))
        counted_loop(builder, whole, step)
        rest = builder.and_(dim, i64(LANES))
        with builder.if_then(builder.icmp_signed("!=", rest, i64(0)), likely=False):
            step(whole, is_short=True)
        store_scores(builder, scores)

    return emitted(types.void, *[types.int64] * 5)(amx_scores)


amx_scores: Final = _scores(NEAR)
"""Write the scores of a row block with a super-block: float32 [16, 64].

void(queries, stride, places, dim, scores). queries: bfloat16 [16, D'], `stride` bytes apart; K as
Place.KEYS says.
"""
amx_scores_of_several: Final = _scores(FAR)
"""The same of the first of several row blocks."""


def clear_scores(builder: Builder) -> None:
    """Begin with a row block and a super-block: no terms of its scores are added yet."""
    for j in range(SUB_BLOCKS):
        clear_tile(builder, j)


def store_scores(builder: Builder, scores: Value) -> None:
    """Write a row block's scores, float32 [16, 64]."""
    for j in range(SUB_BLOCKS):
        store_tile(builder, j, offset(builder, scores, VECTOR_BYTES * j), SCORE_ROW_BYTES)


@emitted(types.void, *[types.int64] * 4)
def amx_values(builder: Builder, weights: Value, places: Value, dim: Value, out: Value) -> None:
    """Add the weighted V of a super-block to the results of a row block, float32 [16, D'].

    weights: bfloat16 [16, 64]. Sub-blocks whose Place.COUNTS is 0 are left out.
    """
    row_bytes = builder.shl(dim, i64(2))
    fetches = _fetches(builder, places)

    def panel(first: Value, tiles: int) -> None:
        right = builder.shl(first, i64(2))
        out_at = offset(builder, out, right)
        for tile in range(tiles):
            load_tile(builder, tile, offset(builder, out_at, VECTOR_BYTES * tile), row_bytes)

        def sub_block(j: Value) -> None:
            count = place(builder, places, Place.COUNTS, j)
            with builder.if_then(builder.icmp_signed("!=", count, i64(0)), likely=True):
                values = offset(builder, place(builder, places, Place.VALUES, j), right)
                ahead = offset(builder, place(builder, places, Place.NEXT_VALUES, j), right)
                weight_at = offset(builder, weights, builder.shl(j, i64(5)))
                load_tile(builder, SHORT_ROWS, weight_at, PAIR_ROW_BYTES)
                for tile in range(tiles):
                    at = offset(builder, values, VECTOR_BYTES * tile)
                    load_tile(builder, SHORT_COLUMNS, at, row_bytes)
                    next_at = offset(builder, ahead, VECTOR_BYTES * tile)
                    _fetch(builder, fetches, next_at, PAIRS // 2, row_bytes, NEAR)
                    _multiply(builder, tile, SHORT_ROWS, SHORT_COLUMNS)

        counted_loop(builder, i64(SUB_BLOCKS), sub_block)
        for tile in range(tiles):
            store_tile(builder, tile, offset(builder, out_at, VECTOR_BYTES * tile), row_bytes)

    width = SUB_BLOCKS * LANES
    end = builder.mul(builder.udiv(dim, i64(width)), i64(width))
    with cgutils.for_range_slice(builder, i64(0), end, i64(width)) as (first, _):
        panel(first, SUB_BLOCKS)
    with cgutils.for_range_slice(builder, end, dim, i64(LANES)) as (first, _):
        panel(first, 1)


def score_steps(
    builder: Builder, dim: int, queries: Value, stride: Value, places: Value
) -> list[Callable[[], None]]:
    """Return what multiplies the scores of a row block, tile by tile, to be emitted in this order.

    Heads of `dim` elements, a multiple of 32. `store_scores` comes behind.
    """

    def begin(index: int) -> None:
        if index == 0:
            clear_scores(builder)
        load_tile(builder, QUERIES, offset(builder, queries, VECTOR_BYTES * index), stride)

    def multiply(index: int, j: int) -> None:
        keys = place(builder, places, Place.KEYS, j)
        load_tile(builder, KEYS, offset(builder, keys, TILE_BYTES * index), VECTOR_BYTES)
        _multiply(builder, j, QUERIES, KEYS)

    steps: list[Callable[[], None]] = []
    for index in range(dim // 32):
        steps.append(partial(begin, index))
        steps += [partial(multiply, index, j) for j in range(SUB_BLOCKS)]
    return steps


def value_steps(
    builder: Builder, dim: int, weights: Value, places: Value, out: Value
) -> list[Callable[[], None]]:
    """Return what adds the weighted V of a super-block to a row block's results, likewise.

    Heads of `dim` elements, a multiple of 64; no Place.COUNTS is 0.
    """
    row_bytes = 4 * dim

    def load_weights(j: int) -> None:
        load_tile(builder, SHORT_ROWS, offset(builder, weights, 32 * j), PAIR_ROW_BYTES)

    def multiply(j: int, tile: int, right: int) -> None:
        values = place(builder, places, Place.VALUES, j)
        load_tile(builder, SHORT_COLUMNS, offset(builder, values, right), row_bytes)
        next_at = offset(builder, place(builder, places, Place.NEXT_VALUES, j), right)
        _fetch(builder, _fetches(builder, places), next_at, PAIRS // 2, row_bytes, FAR)
        _multiply(builder, tile, SHORT_ROWS, SHORT_COLUMNS)

    steps: list[Callable[[], None]] = []
    for panel in range(0, 4 * dim, SUB_BLOCKS * VECTOR_BYTES):
        right = [panel + VECTOR_BYTES * tile for tile in range(SUB_BLOCKS)]
        at = [offset(builder, out, element) for element in right]
        steps += [partial(load_tile, builder, n, at[n], row_bytes) for n in range(SUB_BLOCKS)]
        for j in range(SUB_BLOCKS):
            steps.append(partial(load_weights, j))
            steps += [partial(multiply, j, n, right[n]) for n in range(SUB_BLOCKS)]
        steps += [partial(store_tile, builder, n, at[n], row_bytes) for n in range(SUB_BLOCKS)]
    return steps


@emitted(types.void, *[types.int64] * 4)
def blank_unseen(builder: Builder, values: Value, dim: Value, seen: Value, out: Value) -> None:
    """Copy a sub-block's V, bfloat16 [8, D', 2], to `out`; tokens from `seen` on become zeros."""
    row_bytes = builder.shl(dim, i64(2))
    for pair in range(PAIRS // 2):
        left = builder.sub(seen, i64(2 * pair))
        half = builder.select(
            builder.icmp_signed("==", left, i64(1)), ir.Constant(I32, 0xFFFF), ir.Constant(I32, 0)
        )
        is_whole = builder.icmp_signed(">=", left, i64(2))
        mask = broadcast(builder, builder.select(is_whole, ir.Constant(I32, -1), half))
        down = builder.mul(row_bytes, i64(pair))

        def body(first: Value, down: Value = down, mask: Value = mask) -> None:
            at = builder.add(down, builder.shl(first, i64(2)))
            vector = load(builder, offset(builder, values, at), I32X, VECTOR_BYTES)
            kept = builder.and_(vector, mask)
            store(builder, kept, offset(builder, out, at), VECTOR_BYTES)

        counted_loop(builder, dim, body, LANES)
