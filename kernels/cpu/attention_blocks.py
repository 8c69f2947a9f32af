"""How the row blocks of an item go through a super-block: one by one, or side by side.

In tile registers scores and values of a row block wait for each other, and vectors, which make
weights of scores, wait for both. Where an item has several row blocks, those before and behind
have their tiles multiplied meanwhile:

    vectors              weights 0         weights 1                  weights 2
    tiles     scores 0   scores 1          values 0, scores 2         values 1           values 2

Each row is computed as it is one by one, in the same order.
"""

from __future__ import annotations

from typing import Any

from numba import types

from kernels.cpu.attention_amx import (
    amx_scores,
    amx_scores_of_several,
    amx_values,
    score_steps,
    store_scores,
    value_steps,
)
from kernels.cpu.attention_context import count_seen
from kernels.cpu.attention_places import Place
from kernels.cpu.attention_rows import FIRST, LIMIT
from kernels.cpu.attention_sizes import (
    PAIR_ROW_BYTES,
    ROW_BLOCK,
    SCORE_ROW_BYTES,
    SCORES_AT,
    STATE_BYTES,
    SUB_BLOCKS,
    SUPER_BLOCK_TOKENS,
    WEIGHTS_AT,
)
from kernels.cpu.compiled import inlined, int64_at, word
from kernels.cpu.emitted import Emitter, emitted
from kernels.cpu.vector_ir import Builder, Value, i64, offset


@inlined()
def all_see_all(places: int, first_row: int, last_row: int) -> bool:
    """Return whether rows see the whole super-block, by their states. Sets Place.COUNTS.

    Their positions ascend, so the first one sees least of what is last, and the other way round.
    """
    least = count_seen(places, word(last_row, FIRST), word(first_row, LIMIT))
    starts = word(places, Place.STARTS)
    return bool(least == SUPER_BLOCK_TOKENS and word(last_row, FIRST) <= starts)


def one_by_one(scores: Any, weights: Any, values: Any, *, to_pairs: bool) -> Any:  # noqa: ANN401
    """Return what takes row blocks through a super-block one after the other."""
    weight_bytes = PAIR_ROW_BYTES if to_pairs else SCORE_ROW_BYTES
    weights_at = WEIGHTS_AT if to_pairs else SCORES_AT  # float32 weights replace their scores

    @inlined()
    def super_block(
        rows: int, queries: int, query_bytes: int, places: int, positions: int, dim: int,
        width: int, states: int, out: int, memory: int, cap: int,
    ) -> None:  # fmt: skip
        for first in range(0, rows, ROW_BLOCK):
            count = min(ROW_BLOCK, rows - first)
            block, block_out = states + first * STATE_BYTES, out + 4 * first * width
            last_row = block + (count - 1) * STATE_BYTES
            # What all rows see, and what any of them does, which COUNTS then say.
            least = count_seen(places, word(last_row, FIRST), word(block, LIMIT))
            most = count_seen(places, word(block, FIRST), word(last_row, LIMIT))
            starts = word(places, Place.STARTS)
            sees_all = least == SUPER_BLOCK_TOKENS and word(last_row, FIRST) <= starts
            int64_at(places)[Place.FETCH + 0] = types.int64(first == 0)
            scores(
                count, queries + first * query_bytes, query_bytes, places, dim, memory + SCORES_AT
            )
            for r in range(count):
                weights(
                    memory + SCORES_AT + r * SCORE_ROW_BYTES, positions, sees_all,
                    block + r * STATE_BYTES, block_out + 4 * r * width, width, places,
                    memory + weights_at + r * weight_bytes, cap,
                )  # fmt: skip
            values(count, memory + weights_at, places, width, block_out, block, least == most)

    return super_block


def side_by_side(weights_of_row: Emitter, weights: Any, alone: Any) -> Any:  # noqa: ANN401
    """Return what takes row blocks through tile registers side by side.

    `weights`: of one row. `alone`: for items of one row block, and heads of other sizes.
    """
    weigh_64, weigh_128 = (_weights_beside_tiles(weights_of_row, dim) for dim in (64, 128))

    @inlined()
    def super_block(
        rows: int, queries: int, query_bytes: int, places: int, positions: int, dim: int,
        width: int, states: int, out: int, memory: int, cap: int,
    ) -> None:  # fmt: skip
        if rows <= ROW_BLOCK or dim != width or (dim != 64 and dim != 128):
            alone(
                rows, queries, query_bytes, places, positions, dim, width, states, out, memory, cap
            )
            return
        words = int64_at(places)
        last = states + (rows - 1) * STATE_BYTES
        scores = memory + SCORES_AT
        words[Place.FETCH + 0] = 1
        amx_scores_of_several(queries, query_bytes, places, dim, scores)
        before, before_out = 0, 0
        is_whole = all_see_all(places, states, last)
        for first in range(0, rows, ROW_BLOCK):
            count = min(ROW_BLOCK, rows - first)
            block, block_out = states + first * STATE_BYTES, out + 4 * first * width
            sees_all = is_whole
            if not is_whole:
                sees_all = all_see_all(places, block, block + (count - 1) * STATE_BYTES)
                # Weights of what other rows of the item see are 0.
                count_seen(places, word(states, FIRST), word(last, LIMIT))
            number = first // ROW_BLOCK
            behind = queries + (first + ROW_BLOCK) * query_bytes
            if first + ROW_BLOCK >= rows:
                behind = 0
            here = memory + WEIGHTS_AT + (number & 1) * ROW_BLOCK * PAIR_ROW_BYTES
            words[Place.FETCH + 0] = types.int64(number == 1)
            if sees_all and cap == 0:  # rows behind the last one have room, and nobody reads them
                if dim == 64:
                    weigh_64(
                        scores, positions, block, block_out, places, here, before, before_out,
                        behind, query_bytes,
                    )  # fmt: skip
                else:
                    weigh_128(
                        scores, positions, block, block_out, places, here, before, before_out,
                        behind, query_bytes,
                    )  # fmt: skip
            else:
                if before != 0:
                    amx_values(before, places, width, before_out)
                for r in range(count):
                    weights(
                        scores + r * SCORE_ROW_BYTES, positions, sees_all, block + r * STATE_BYTES,
                        block_out + 4 * r * width, width, places, here + r * PAIR_ROW_BYTES, cap,
                    )  # fmt: skip
                words[Place.FETCH + 0] = 0
                if behind != 0:
                    amx_scores(behind, query_bytes, places, dim, scores)
            before, before_out = here, block_out
        words[Place.FETCH + 0] = 0
        amx_values(before, places, width, before_out)

    return super_block


def _weights_beside_tiles(weights_of_row: Emitter, dim: int) -> Any:  # noqa: ANN401
    """Return what makes the weights of a row block while tiles of others are multiplied.

    For rows which all see the whole super-block, of heads of `dim` elements. scores … weights: of
    `weights_of_row`, of the first of 16 rows. before, before_out: weights and results of the row
    block before, whose values are added; 0: there is none. behind: queries of the one behind,
    `stride` bytes apart, whose scores replace these in the end; 0: there is none.
    """

    def weights_beside_tiles(
        builder: Builder, scores: Value, positions: Value, states: Value, out: Value,
        places: Value, weights: Value, before: Value, before_out: Value, behind: Value,
        stride: Value,
    ) -> None:  # fmt: skip
        has_before = builder.icmp_signed("!=", before, i64(0))
        has_behind = builder.icmp_signed("!=", behind, i64(0))
        tiles = [
            *((has_before, step) for step in value_steps(builder, dim, before, places, before_out)),
            *((has_behind, step) for step in score_steps(builder, dim, behind, stride, places)),
        ]
        slots = iter(range(ROW_BLOCK * SUB_BLOCKS))

        def between() -> None:
            slot = next(slots)
            first, end = (at * len(tiles) // (ROW_BLOCK * SUB_BLOCKS) for at in (slot, slot + 1))
            for is_wanted, step in tiles[first:end]:
                with builder.if_then(is_wanted, likely=True):
                    step()

        for r in range(ROW_BLOCK):
            weights_of_row(
                builder, offset(builder, scores, r * SCORE_ROW_BYTES), positions, i64(1),
                offset(builder, states, r * STATE_BYTES), offset(builder, out, 4 * dim * r),
                i64(dim), places, offset(builder, weights, r * PAIR_ROW_BYTES), i64(0), between,
            )  # fmt: skip
        with builder.if_then(has_behind):
            store_scores(builder, scores)

    return emitted(types.void, *[types.int64] * 10)(weights_beside_tiles)
