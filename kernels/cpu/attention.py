"""Causal attention through block tables, prefill and decode alike.

Specification: `kernels.reference.paged_attention`.

A piece of work is an *item* and a kv head. An item is some tokens of one row that follow each
other; with the H / G query heads of the kv head they are the *rows* of the work, token by token.
All rows go through the context together, in super-blocks of 64 tokens from position 0:

    positions   0 … 63 │ 64 … 127 │ …            │ 1024 … 1087 │ …
                └──────── segment 0 ────────────┘ └── segment 1 ────────

A row's state (maximum, sum of weights, weighted V) starts anew with every segment, and the
segments' results are folded together in their order. So one long context can be shared among
threads: an item may ask for one segment only, whose result goes to the *partials*, and
`merge_attention` folds those. Because everybody folds at the same positions, the bits are the same.
Such an item may have tokens of several rows, if the segment lies in the same blocks for all
(`kernels.cpu.attention_plan`): it ends with each of them, or before.

In a layer with a window (`Attention.WINDOW`) an item begins with the super-block in which the
window of its first token does, and nothing before that sub-block is read. A row whose window begins
later sees nothing of the first super-blocks, and of a whole context of a segment before its window
at most one, since items are shorter than segments: what that adds are exact zeros. Partials of
segments before a row's window are not read.

A head may have a *sink* (`Attention.SINKS`), a score beside those of the tokens, with nothing to
give: what it takes is added to the sum of the weights at the very end, after all folding, where it
does not matter who has computed which segment.

Values may be shorter than keys, and several kv heads may read the same: of attention over latents
(`kernels.reference.latent_attention`) values are the first elements of keys, and the query heads,
which all read one row of a token, are cut into parts for threads to share.

What a row computes depends on its queries and its context alone: no sum runs across rows, tokens a
row does not see are not added (or, in tile registers, added as exact zeros), and all decisions
(new maximum, fold) are the row's own. The maximum is a reference, not a result: it is raised only
when a score exceeds it by more than 2^8, so that most super-blocks need no rescaling.

Pools of bfloat16, int8 and float8 are computed in one of three ways, the instruction set decides
(`kernels.cpu.attention_lowerings`): in tile registers, with VDPBF16PS, or in float32 on widened
values. The first two round queries and weights to bfloat16. int8 and float8 are expanded to
bfloat16, which holds them exactly, and their scales are applied to scores and weights.
"""

from __future__ import annotations

from typing import Any, Final

from numba import types

from kernels.cpu.attention_context import (
    MERGE_BYTES,
    find_next,
    first_seen,
    first_sub_block,
    first_super_block,
    item_at,
    last_sub_block,
    take_next,
    token_at,
)
from kernels.cpu.attention_lowerings import Lowering, lowering
from kernels.cpu.attention_places import word32
from kernels.cpu.attention_rows import (
    FIRST,
    LIMIT,
    PARTIAL_SUMS_AT,
    round_row,
    set_zero,
    write_result,
)
from kernels.cpu.attention_sizes import (
    PLACES_AT,
    POSITIONS_AT,
    ROW_BLOCK,
    ROWS_AT,
    SEGMENT,
    STATE_BYTES,
    SUB_BLOCKS,
    SUMS_BYTES,
)
from kernels.cpu.attention_weights import (
    fold,
    sum_lanes,
    weight_of_score,
)
from kernels.cpu.compiled import float32_at, inlined, int64_at, operation, scratch, word
from kernels.cpu.instruction_set import selected_instruction_set
from kernels.cpu.kv_layout import LANES, SUB_BLOCK_TOKENS
from kernels.cpu.operands import Attention, Item, Merge
from kernels.cpu.operation import StepWord
from kernels.cpu.rope_tile import copy_padded

LOWEST: Final = float("-inf")


def _make_attend(low: Lowering) -> Any:  # noqa: ANN401 - Numba's objects
    """Return what computes one item and kv head."""
    begin, prepare, end = low.begin, low.prepare, low.end
    super_block, to_pairs, value_bytes = low.super_block, low.to_pairs, low.value_bytes

    @inlined()
    def attend(record: int, header: int, work: int, neighbour: int, memory: int) -> None:
        """`neighbour`: the work that this thread does next, presumably, or −1."""
        kv_heads, num_heads = (
            word(record, Attention.NUM_KV_HEADS),
            word(record, Attention.NUM_HEADS),
        )
        index, head = work // kv_heads, work % kv_heads
        item = item_at(header, index)
        first_sub = first_sub_block(record, header, token_at(header, item, 0))
        last = last_sub_block(record, header, item)
        first_super, end_super = first_super_block(item, first_sub), last // SUB_BLOCKS + 1
        is_partial = word32(item, Item.SEGMENT) > 0
        if is_partial:
            end_super = min(end_super, word32(item, Item.SEGMENT) * SEGMENT)
            if end_super <= first_super:
                return
        is_folded = (end_super - 1) // SEGMENT > first_super // SEGMENT
        num_tokens = word32(item, Item.NUM_TOKENS)
        dim, group = word(record, Attention.HEAD_DIM), num_heads // kv_heads
        padded, rows = (dim + LANES - 1) // LANES * LANES, num_tokens * group
        value_dim = word(record, Attention.VALUE_DIM)
        width = (value_dim + LANES - 1) // LANES * LANES
        room = (rows + ROW_BLOCK - 1) // ROW_BLOCK * ROW_BLOCK
        places, positions = memory + PLACES_AT, memory + POSITIONS_AT
        states = memory + ROWS_AT
        sums = states + room * STATE_BYTES
        queries = sums + room * SUMS_BYTES
        out = queries + room * 4 * padded
        folded = out + room * 4 * width
        expanded = folded + room * 4 * width
        query_bytes = padded * (2 if to_pairs else 4)
        key_bytes = padded * SUB_BLOCK_TOKENS * value_bytes
        values_bytes = width * SUB_BLOCK_TOKENS * value_bytes

        first_row = word(header, word(record, Attention.QUERIES_FIRST_WORD))
        source = word(record, Attention.QUERIES) + 4 * dim * (num_heads * first_row + group * head)
        for r in range(rows):
            number = r // group
            token = token_at(header, item, number)
            row = source + 4 * dim * (token * num_heads + r - number * group)
            if to_pairs:
                copy_padded(row, dim, out)
                round_row(out, padded, queries + r * query_bytes)
            else:
                copy_padded(row, dim, queries + r * query_bytes)
            position = word32(word(header, StepWord.POSITIONS), token)
            int64_at(states + r * STATE_BYTES)[LIMIT] = position + 1
            int64_at(states + r * STATE_BYTES)[FIRST] = first_seen(record, position)
        limit = word(states + (rows - 1) * STATE_BYTES, LIMIT)

        begin(rows)
        # One turn more than super-blocks: the first only finds where its successor lies.
        for current in range(first_super - 1, end_super):
            if current >= first_super:
                take_next(record, current, last, places, positions, values_bytes)
            next_item, next_head, next_super = item, head, current + 1
            next_first, next_last = first_sub, last
            if current + 1 == end_super and neighbour >= 0:
                next_item, next_head = item_at(header, neighbour // kv_heads), neighbour % kv_heads
                next_first = first_sub_block(record, header, token_at(header, next_item, 0))
                next_super = first_super_block(next_item, next_first)
                next_last = last_sub_block(record, header, next_item)
            find_next(
                record, header, next_item, next_head, next_super, next_first, next_last, places,
                key_bytes,
            )  # fmt: skip
            if current < first_super:
                continue
            if current % SEGMENT == 0 or current == first_super:
                set_zero(out, room * width)
                for r in range(rows):
                    float32_at(states + r * STATE_BYTES)[0] = types.float32(LOWEST)
                    set_zero(states + r * STATE_BYTES + PARTIAL_SUMS_AT, LANES)
            prepare(places, word(states, FIRST), limit, padded, width, expanded)
            super_block(
                rows, queries, query_bytes, places, positions, padded, width, states, out, memory,
                word(record, Attention.CAP),
            )  # fmt: skip
            if is_folded and ((current + 1) % SEGMENT == 0 or current + 1 == end_super):
                # A row that saw nothing of the segment folds in exact zeros.
                for r in range(rows):
                    fold_row(
                        states + r * STATE_BYTES, out + 4 * r * width, width,
                        sums + r * SUMS_BYTES, folded + 4 * r * width,
                        current // SEGMENT == first_super // SEGMENT,
                    )  # fmt: skip
        end()
        if is_partial:
            segment = word32(item, Item.SEGMENT) - 1
            for r in range(rows):
                number = r // group
                token = token_at(header, item, number)
                partial = partial_at(record, header, token, segment, width)
                partial += 4 * (LANES + width) * (head * group + r - number * group)
                fold_row(
                    states + r * STATE_BYTES, out + 4 * r * width, width,
                    partial, partial + 4 * LANES, True,
                )  # fmt: skip
            return
        for r in range(rows):
            number = r // group
            query_head = head * group + r - number * group
            row = token_at(header, item, number) * num_heads + query_head
            target = word(record, Attention.OUT) + 4 * value_dim * row
            if is_folded:
                total = float32_at(sums + r * SUMS_BYTES)[1]
                total += weight_of_sink(record, query_head, float32_at(sums + r * SUMS_BYTES)[0])
                write_result(folded + 4 * r * width, value_dim, width, target, total)
            else:
                total = sum_lanes(states + r * STATE_BYTES + PARTIAL_SUMS_AT)
                total += weight_of_sink(record, query_head, float32_at(states + r * STATE_BYTES)[0])
                write_result(out + 4 * r * width, value_dim, width, target, total)

    @inlined()
    def attend_to_all(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
        work = word(header, StepWord.NUM_ATTENTION_ITEMS) * word(record, Attention.NUM_KV_HEADS)
        first, stop = work * chunk // num_chunks, work * (chunk + 1) // num_chunks
        for this in range(first, stop):
            # Workers with an odd number claim chunks from the back.
            neighbour = this + 1
            if neighbour == stop and worker & 1:
                neighbour = first - 1
            if neighbour == work:
                neighbour = -1
            attend(record, header, this, neighbour, scratch(header, worker))

    return attend_to_all


@inlined()
def partial_at(record: int, header: int, token: int, segment: int, width: int) -> int:
    """Return the address of what the heads of a token found in a segment."""
    slot = word32(word(header, StepWord.PARTIAL_SLOTS), token) + segment
    stride = 4 * (LANES + width) * word(record, Attention.NUM_HEADS)
    address: int = word(record, Attention.PARTIALS) + stride * slot
    return address


@inlined()
def weight_of_sink(record: int, head: int, top: float) -> float:
    """Return what a query head's sink adds to a sum of weights, 0 where there is none."""
    sinks = word(record, Attention.SINKS)
    weight: float = types.float32(0.0)
    if sinks != 0:
        weight = weight_of_score(float32_at(sinks)[head], top)
    return weight


@inlined()
def fold_row(state: int, x: int, dim: int, sums: int, out: int, is_first: bool) -> None:
    """Add a row's segment to those before it, or begin with it."""
    top, total = float32_at(state)[0], sum_lanes(state + PARTIAL_SUMS_AT)
    if is_first:
        float32_at(sums)[0] = top
        float32_at(sums)[1] = total
        copy_padded(x, dim, out)
    else:
        fold(top, total, x, dim, sums, out)


_attend_float32 = _make_attend(lowering("float32", selected_instruction_set()))
_attend_bfloat16 = _make_attend(lowering("bfloat16", selected_instruction_set()))
_attend_int8 = _make_attend(lowering("int8", selected_instruction_set()))
_attend_float8 = _make_attend(lowering("float8", selected_instruction_set()))


@operation()
def attention_float32(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Attend to a float32 pool."""
    _attend_float32(record, header, chunk, num_chunks, worker)


@operation()
def attention_bfloat16(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Attend to a bfloat16 pool."""
    _attend_bfloat16(record, header, chunk, num_chunks, worker)


@operation()
def attention_int8(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Attend to an int8 pool."""
    _attend_int8(record, header, chunk, num_chunks, worker)


@operation()
def attention_float8(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Attend to a float8 pool."""
    _attend_float8(record, header, chunk, num_chunks, worker)


@operation()
def merge_attention(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Fold the segments of tokens whose context was cut; any pool.

    Runs behind attention, with the same operands, over StepWord.ATTENTION_MERGES.
    """
    dim, num_heads = word(record, Attention.VALUE_DIM), word(record, Attention.NUM_HEADS)
    padded = (dim + LANES - 1) // LANES * LANES
    stride = 4 * (LANES + padded) * num_heads
    sums = scratch(header, worker)
    out = sums + SUMS_BYTES
    work = word(header, StepWord.NUM_ATTENTION_MERGES) * num_heads
    for this in range(work * chunk // num_chunks, work * (chunk + 1) // num_chunks):
        merge = word(header, StepWord.ATTENTION_MERGES) + this // num_heads * MERGE_BYTES
        head = this % num_heads
        token = word32(merge, Merge.TOKEN)
        passed = first_sub_block(record, header, token) // (SEGMENT * SUB_BLOCKS)
        partial = partial_at(record, header, token, passed, padded)
        partial += 4 * (LANES + padded) * head
        float32_at(sums)[0] = float32_at(partial)[0]
        float32_at(sums)[1] = float32_at(partial)[1]
        copy_padded(partial + 4 * LANES, padded, out)
        for _ in range(passed + 1, word32(merge, Merge.NUM_SEGMENTS)):
            partial += stride
            top, total = float32_at(partial)[0], float32_at(partial)[1]
            fold(top, total, partial + 4 * LANES, padded, sums, out)
        row = token * num_heads + head
        target = word(record, Attention.OUT) + 4 * dim * row
        total = float32_at(sums)[1] + weight_of_sink(record, head, float32_at(sums)[0])
        write_result(out, dim, padded, target, total)
