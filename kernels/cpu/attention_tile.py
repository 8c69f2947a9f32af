"""The inner tiles of attention in vector registers, as LLVM IR.

    scores    s[r, t] = Σ_d q[r, d] · K[t, d]          lanes are tokens
    values    o[r, d] += Σ_t p[r, t] · V[t, d]         lanes are elements of the head

Every score and every result has one accumulator, d and t ascend: so its bits depend on its row and
on nothing else, however many rows a tile has. Tokens a row does not see are never added. With
float32 arithmetic (a float32 pool, or bfloat16 widened) the bits are the same on every instruction
set; VDPBF16PS sums pairs in an order of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils

from kernels.cpu.attention_places import VECTOR_BYTES, Place, place
from kernels.cpu.attention_sizes import SCORE_ROW_BYTES, SUB_BLOCKS, SUPER_BLOCK_TOKENS
from kernels.cpu.emitted import emitted
from kernels.cpu.instruction_set import InstructionSet
from kernels.cpu.vector_ir import (
    BF16_PAIRS,
    F32,
    F32X,
    I32,
    I32X,
    LANES,
    Builder,
    Value,
    bf16_high,
    bf16_low,
    broadcast,
    call,
    constant,
    counted_loop,
    fma,
    i64,
    load,
    offset,
    prefetch,
    store,
)

TILE_ROWS: Final = 4
"""Rows of a tile of vectors, at most."""


def dot_pairs(builder: Builder, total: Value, x: Value, y: Value) -> Value:
    """Return total + Σ x · y over the bfloat16 pairs of each lane (int32 lanes): VDPBF16PS."""
    x, y = (builder.bitcast(pairs, BF16_PAIRS) for pairs in (x, y))
    return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", F32X, [total, x, y])


def _by_rows(rows: Value, builder: Builder, body: Callable[[int], None]) -> None:
    """Emit a body for 1, 2, 3 and 4 rows, and the choice between them."""
    end = builder.append_basic_block("rows.end")
    one = builder.append_basic_block("rows.1")
    choice = builder.switch(rows, one)
    for count in range(TILE_ROWS, 0, -1):
        block = one if count == 1 else builder.append_basic_block(f"rows.{count}")
        if count != 1:
            choice.add_case(i64(count), block)
        builder.position_at_end(block)
        body(count)
        builder.branch(end)
    builder.position_at_end(end)


def _accumulators(builder: Builder, rows: int, columns: int) -> list[list[Value]]:
    return [[cgutils.alloca_once(builder, F32X) for _ in range(columns)] for _ in range(rows)]


class FloatTiles:
    """Tiles of vectors for K and V in float32, or in bfloat16 pairs.

    `storage`: "float32", "bfloat16" (widened: rows and weights are float32) or "pairs" (bfloat16
    with VDPBF16PS: rows and weights are bfloat16). `scores` and `values` are callable from compiled
    code, see `_scores` and `_values`.
    """

    def __init__(self, storage: str, chosen: InstructionSet) -> None:
        self._storage = storage
        wide = chosen.vector_bits == 512
        self.sub_blocks = SUB_BLOCKS if wide else 1
        self._columns = 4 if wide else 1
        self._locality = chosen.fetch_locality
        self.scores: Any = emitted(types.void, *[types.int64] * 6)(self._named("scores"))
        self.values: Any = emitted(types.void, *[types.int64] * 5)(self._named("values"))

    def _named(self, name: str) -> Callable[..., None]:
        method: Callable[..., None] = getattr(self, f"_{name}")

        def emit(builder: Builder, *operands: Value) -> None:
            method(builder, *operands)

        emit.__name__ = f"{self._storage}_{name}"
        return emit

    def _scores(
        self, builder: Builder, rows: Value, queries: Value, stride: Value, places: Value,
        dim: Value, scores: Value,
    ) -> None:  # fmt: skip
        """Write the scores of 1 to 4 rows with all tokens of a super-block.

        queries: rows of D' elements, `stride` bytes apart. scores: float32 [rows, 64].
        """

        def body(count: int) -> None:
            if self.sub_blocks == SUB_BLOCKS:
                self._score_tile(builder, count, queries, stride, places, i64(0), dim, scores)
                return

            def one(j: Value) -> None:
                self._score_tile(builder, count, queries, stride, places, j, dim, scores)

            counted_loop(builder, i64(SUB_BLOCKS), one)

        _by_rows(rows, builder, body)

    def _score_tile(
        self, builder: Builder, rows: int, queries: Value, stride: Value, places: Value,
        first: Value, dim: Value, scores: Value,
    ) -> None:  # fmt: skip
        """Scores of `rows` rows with `self.sub_blocks` sub-blocks from `first`."""
        sums = _accumulators(builder, rows, self.sub_blocks)
        subs = [builder.add(first, i64(j)) for j in range(self.sub_blocks)]
        keys = [place(builder, places, Place.KEYS, j) for j in subs]
        ahead = [place(builder, places, Place.NEXT_KEYS, j) for j in subs]
        row_at = [offset(builder, queries, builder.mul(stride, i64(r))) for r in range(rows)]
        for row in sums:
            for variable in row:
                builder.store(constant(F32X, 0.0), variable)
        is_float = self._storage == "float32"

        def body(index: Value) -> None:
            down = builder.shl(index, i64(6))
            # A vector is one element of the head for float32, a pair of them otherwise.
            shift = 3 if self._storage == "bfloat16" else 2
            right = builder.shl(index, i64(shift))
            kind = F32X if is_float else I32X
            vectors = [load(builder, offset(builder, k, down), kind, VECTOR_BYTES) for k in keys]
            for address in ahead:
                prefetch(builder, offset(builder, address, down), self._locality)
            if self._storage == "bfloat16":
                parts = [[half(builder, v) for v in vectors] for half in (bf16_low, bf16_high)]
            else:
                parts = [vectors]
            for part, lanes in enumerate(parts):
                for at, row in zip(row_at, sums, strict=True):
                    element = offset(builder, at, right, 4 * part)
                    q = broadcast(builder, load(builder, element, I32 if kind == I32X else F32, 4))
                    if self._storage == "bfloat16":
                        q = builder.bitcast(q, F32X)
                    for vector, variable in zip(lanes, row, strict=True):
                        self._add(builder, variable, vector, q)

        vectors_of_k = dim if is_float else builder.lshr(dim, i64(1))
        counted_loop(builder, vectors_of_k, body)
        for r, row in enumerate(sums):
            for j, variable in zip(subs, row, strict=True):
                at = offset(builder, scores, r * SCORE_ROW_BYTES, builder.shl(j, i64(6)))
                store(builder, builder.load(variable), at, VECTOR_BYTES)

    def _add(self, builder: Builder, variable: Value, x: Value, y: Value) -> None:
        total = builder.load(variable)
        if self._storage == "pairs":
            builder.store(dot_pairs(builder, total, x, y), variable)
        else:
            builder.store(fma(builder, x, y, total), variable)

    def _values(
        self, builder: Builder, rows: Value, weights: Value, places: Value, dim: Value, out: Value
    ) -> None:
        """Add the weighted V of a super-block to 1 to 4 rows of results.

        weights: [rows, 64], float32 or, for "pairs", bfloat16. Place.COUNTS: the tokens to add of
        each sub-block. out: float32 [rows, D'].
        """

        def body(count: int) -> None:
            width = self._columns * LANES
            whole = builder.udiv(dim, i64(width))
            wide_end = builder.mul(whole, i64(width))

            def columns(number: int) -> Callable[[Value], None]:
                return lambda d: self._value_tile(
                    builder, count, number, weights, places, d, dim, out
                )

            with cgutils.for_range_slice(builder, i64(0), wide_end, i64(width)) as (d, _):
                columns(self._columns)(d)
            if self._columns > 1:
                with cgutils.for_range_slice(builder, wide_end, dim, i64(LANES)) as (d, _):
                    columns(1)(d)

        _by_rows(rows, builder, body)

    def _value_tile(
        self, builder: Builder, rows: int, columns: int, weights: Value, places: Value,
        first: Value, dim: Value, out: Value,
    ) -> None:  # fmt: skip
        """Results of `rows` rows, `columns` vectors of the head from element `first`."""
        sums = _accumulators(builder, rows, columns)
        out_at = offset(builder, out, builder.shl(first, i64(2)))
        row_bytes = builder.shl(dim, i64(2))
        for r, row in enumerate(sums):
            at = offset(builder, out_at, builder.mul(row_bytes, i64(r)))
            for c, variable in enumerate(row):
                vector = load(builder, offset(builder, at, VECTOR_BYTES * c), F32X, VECTOR_BYTES)
                builder.store(vector, variable)
        is_float = self._storage == "float32"
        weight_bytes = 2 if self._storage == "pairs" else 4

        def sub_block(j: Value) -> None:
            right = builder.shl(first, i64(2))  # 4 bytes an element or a pair of them
            values = offset(builder, place(builder, places, Place.VALUES, j), right)
            ahead = offset(builder, place(builder, places, Place.NEXT_VALUES, j), right)
            count = place(builder, places, Place.COUNTS, j)
            weight_at = offset(builder, weights, builder.mul(j, i64(LANES * weight_bytes)))

            def step(index: Value, *, is_half: bool = False) -> None:
                down = builder.mul(index, row_bytes)
                kind = F32X if is_float else I32X
                places_at = [
                    offset(builder, values, down, VECTOR_BYTES * c) for c in range(columns)
                ]
                vectors = [load(builder, at, kind, VECTOR_BYTES) for at in places_at]
                for c in range(columns):
                    at = offset(builder, ahead, down, VECTOR_BYTES * c)
                    prefetch(builder, at, self._locality)
                if self._storage == "bfloat16":
                    halves = [bf16_low] if is_half else [bf16_low, bf16_high]
                    parts = [[half(builder, v) for v in vectors] for half in halves]
                elif is_half and self._storage == "pairs":
                    parts = [[builder.and_(v, constant(I32X, 0xFFFF)) for v in vectors]]
                else:
                    parts = [vectors]
                shift = 3 if self._storage == "bfloat16" else 2
                for part, lanes in enumerate(parts):
                    for r, row in enumerate(sums):
                        at = offset(
                            builder, weight_at, builder.shl(index, i64(shift)),
                            4 * part + r * SUPER_BLOCK_TOKENS * weight_bytes,
                        )  # fmt: skip
                        p = broadcast(builder, load(builder, at, F32 if is_float else I32, 4))
                        if self._storage == "bfloat16":
                            p = builder.bitcast(p, F32X)
                        for vector, variable in zip(lanes, row, strict=True):
                            self._add(builder, variable, vector, p)

            if is_float:
                counted_loop(builder, count, step)
                return
            pairs = builder.lshr(count, i64(1))
            counted_loop(builder, pairs, step)
            with builder.if_then(builder.trunc(count, ir.IntType(1)), likely=False):
                step(pairs, is_half=True)

        counted_loop(builder, i64(SUB_BLOCKS), sub_block)
        for r, row in enumerate(sums):
            at = offset(builder, out_at, builder.mul(row_bytes, i64(r)))
            for c, variable in enumerate(row):
                vector = builder.load(variable)
                store(builder, vector, offset(builder, at, VECTOR_BYTES * c), VECTOR_BYTES)
