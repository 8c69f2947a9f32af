"""Mixtures of experts: which experts tokens go through, and the rows between both.

    route_tokens      the router's logits → each token's experts and their weights
    group_by_expert   the rows of each expert, one expert behind the other
    rows_of_experts   the rows that products of experts read, copied from those of the tokens
    add_experts       weights · what the experts gave (and their biases), added to each token
    add_shared        σ(gate) · what an MLP gave that all tokens go through, added to each token

    tokens     0        1        2            chosen  [[3, 0], [3, 5], [0, 3]]
    rows       0  2  │  0  1  2  │  1         TOKENS  [0, 2, 0, 1, 2, 1]
               of 0     of 3       of 5       PLACES  [[2, 0], [3, 5], [1, 4]]
                                              RUNS    [3,  0, 0, 2,  3, 2, 3,  5, 5, 1]

What is computed: `kernels.reference.mixture`, within rounding. What a token gets depends on its own
row alone: its experts are added in the order of their logits, wherever their rows lie.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import types

from kernels.cpu.added_rows import add_weighted
from kernels.cpu.compiled import inlined, operation, scratch, word
from kernels.cpu.emitted import emitted
from kernels.cpu.expert_choice import choose, leave_out_groups
from kernels.cpu.memory_words import (
    copy_bytes,
    read_float32,
    read_int32,
    unfused,
    write_float32,
    write_int32,
)
from kernels.cpu.normed_sums import add_normed_row
from kernels.cpu.operands import NUM_BESIDE, Routing
from kernels.cpu.operation import StepWord
from kernels.cpu.vector_ir import (
    LANES,
    Builder,
    Value,
    broadcast,
    counted_loop,
    exp,
    i64,
    load,
    offset,
    store,
)
from kernels.reference.mixture import LEAST

ONE_BITS: Final = 0x3F800000
"""Of 1.0, float32."""


@emitted(types.void, types.int64, types.int64, types.float32)
def exponentials(builder: Builder, numbers: Value, count: Value, largest: Value) -> None:
    """Replace float32 numbers x, `count` of them (a multiple of LANES), by e^(x − largest)."""
    subtracted = broadcast(builder, largest)

    def some(index: Value) -> None:
        place = offset(builder, numbers, builder.shl(index, i64(2)))
        x = load(builder, place, subtracted.type)
        store(builder, exp(builder, builder.fsub(x, subtracted)), place)

    counted_loop(builder, count, some, step=LANES)


@inlined()
def padded(count: int) -> int:
    """Return the next multiple of LANES."""
    return (count + LANES - 1) // LANES * LANES


@unfused
def weigh(
    logits: int, num_experts: int, chosen: int, per_token: int, weights: int, normalises: bool,
    numbers: int,
) -> None:  # fmt: skip
    """Write softmax of the chosen experts' logits, over them or over all; NaN if it is none.

    `numbers`: scratch memory for the logits of all experts, padded.
    """
    is_finite = True
    for expert in range(num_experts):
        is_finite = is_finite and -np.inf < read_float32(logits, expert) < np.inf
    largest = read_float32(logits, read_int32(chosen, 0))
    count = per_token if normalises else num_experts
    for i in range(padded(count)):
        expert = read_int32(chosen, min(i, per_token - 1)) if normalises else min(i, count - 1)
        write_float32(numbers, i, read_float32(logits, expert))
    exponentials(numbers, padded(count), largest)
    total = np.float32(0.0)
    for i in range(count):
        total += read_float32(numbers, i)
    if not is_finite:
        total = np.float32(np.nan)
    for c in range(per_token):
        place = c if normalises else read_int32(chosen, c)
        write_float32(weights, c, read_float32(numbers, place) / total)


@unfused
def write_sigmoids(logits: int, count: int, numbers: int) -> None:
    """Write the sigmoids of logits. `numbers`: float32, padded; e^−|x| on the way."""
    for i in range(padded(count)):
        write_float32(numbers, i, -abs(read_float32(logits, min(i, count - 1))))
    exponentials(numbers, padded(count), np.float32(0.0))
    for i in range(count):
        power = read_float32(numbers, i)
        top = np.float32(1.0) if read_float32(logits, i) >= 0 else power
        write_float32(numbers, i, top / (np.float32(1.0) + power))


@unfused
def write_softmax(logits: int, count: int, numbers: int) -> None:
    """Write the softmax of logits. `numbers`: float32, padded."""
    largest = read_float32(logits, 0)
    for i in range(1, count):
        largest = max(largest, read_float32(logits, i))
    for i in range(padded(count)):
        write_float32(numbers, i, read_float32(logits, min(i, count - 1)))
    exponentials(numbers, padded(count), largest)
    total = np.float32(0.0)
    for i in range(count):
        total += read_float32(numbers, i)
    for i in range(count):
        write_float32(numbers, i, read_float32(numbers, i) / total)


@unfused
def weigh_scores(
    logits: int, num_experts: int, chosen: int, per_token: int, weights: int, normalises: bool,
    is_sigmoid: bool, scores: int,
) -> None:  # fmt: skip
    """Write the chosen experts' scores, over their sum or as they are; NaN if logits are none."""
    is_finite = True
    for expert in range(num_experts):
        is_finite = is_finite and -np.inf < read_float32(logits, expert) < np.inf
    total = np.float32(1.0)
    if normalises:
        total = np.float32(LEAST) if is_sigmoid else np.float32(0.0)
        for c in range(per_token):
            total += read_float32(scores, read_int32(chosen, c))
    if not is_finite:
        total = np.float32(np.nan)
    for c in range(per_token):
        write_float32(weights, c, read_float32(scores, read_int32(chosen, c)) / total)


@operation()
def route_tokens(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Choose and weigh the experts of a run of tokens."""
    num_experts, per_token = word(record, Routing.NUM_EXPERTS), word(record, Routing.PER_TOKEN)
    num_tokens = word(header, StepWord.NUM_TOKENS)
    normalises = word(record, Routing.NORMALISES) != 0
    is_sigmoid, correction = word(record, Routing.IS_SIGMOID), word(record, Routing.CORRECTION)
    scale = word(record, Routing.SCALE)
    num_groups = word(record, Routing.NUM_GROUPS)
    groups_per_token = word(record, Routing.GROUPS_PER_TOKEN)
    factors = word(record, Routing.EXPERT_SCALES)
    numbers = scratch(header, worker)
    own_ranks = numbers + 4 * padded(num_experts)
    of_groups = own_ranks + 4 * padded(num_experts)
    for token in range(num_tokens * chunk // num_chunks, num_tokens * (chunk + 1) // num_chunks):
        logits = word(record, Routing.LOGITS) + 4 * token * num_experts
        chosen = word(record, Routing.CHOSEN) + 4 * token * per_token
        weights = word(record, Routing.WEIGHTS) + 4 * token * per_token
        if is_sigmoid == 0 and correction == 0:
            ranks = logits
            if num_groups != 0:
                ranks = own_ranks
                copy_bytes(logits, ranks, 4 * num_experts)
                leave_out_groups(ranks, num_experts, num_groups, groups_per_token, False, of_groups)
            choose(ranks, num_experts, chosen, per_token)
            weigh(logits, num_experts, chosen, per_token, weights, normalises, numbers)
        else:
            if is_sigmoid != 0:
                write_sigmoids(logits, num_experts, numbers)
            else:
                write_softmax(logits, num_experts, numbers)
            ranks = logits
            if correction != 0:
                ranks = own_ranks
                for i in range(num_experts):
                    rank = read_float32(numbers, i) + read_float32(correction, i)
                    write_float32(ranks, i, rank)
            elif num_groups != 0:
                ranks = own_ranks
                copy_bytes(logits, ranks, 4 * num_experts)
            if num_groups != 0:
                leave_out_groups(
                    ranks, num_experts, num_groups, groups_per_token, correction != 0, of_groups
                )
            choose(ranks, num_experts, chosen, per_token)
            weigh_scores(
                logits,
                num_experts,
                chosen,
                per_token,
                weights,
                normalises,
                is_sigmoid != 0,
                numbers,
            )
        if scale != 0:
            for c in range(per_token):
                write_float32(weights, c, read_float32(weights, c) * read_float32(scale, 0))
        if factors != 0:
            for c in range(per_token):
                factor = read_float32(factors, read_int32(chosen, c))
                write_float32(weights, c, read_float32(weights, c) * factor)


@operation()
def group_by_expert(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Sort the pairs of tokens and experts by expert, tokens in their order. One chunk."""
    num_experts = word(record, Routing.NUM_EXPERTS)
    num_rows = word(header, StepWord.NUM_EXPERT_ROWS)
    per_token = word(record, Routing.PER_TOKEN)
    chosen, places = word(record, Routing.CHOSEN), word(record, Routing.PLACES)
    tokens, runs = word(record, Routing.TOKENS), word(record, Routing.RUNS)
    nexts = scratch(header, worker)
    for expert in range(num_experts):
        write_int32(nexts, expert, 0)
    for pair in range(num_rows):
        expert = read_int32(chosen, pair)
        write_int32(nexts, expert, read_int32(nexts, expert) + 1)
    first, num_runs = 0, 0
    for expert in range(num_experts):
        count = read_int32(nexts, expert)
        write_int32(nexts, expert, first)
        if count > 0:
            write_int32(runs, 1 + 3 * num_runs, expert)
            write_int32(runs, 2 + 3 * num_runs, first)
            write_int32(runs, 3 + 3 * num_runs, count)
            num_runs += 1
        first += count
    write_int32(runs, 0, num_runs)
    for pair in range(num_rows):
        expert = read_int32(chosen, pair)
        place = read_int32(nexts, expert)
        write_int32(nexts, expert, place + 1)
        write_int32(places, pair, place)
        write_int32(tokens, place, pair // per_token)


@operation()
def rows_of_experts(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Copy each token's row, and what stands beside it, to the rows of its experts."""
    source, out = word(record, Routing.SOURCE), word(record, Routing.OUT)
    row_bytes, group_bytes = word(record, Routing.ROW_BYTES), word(record, Routing.GROUP_BYTES)
    tokens, beside = word(record, Routing.TOKENS), word(record, Routing.BESIDE)
    num_rows = word(header, StepWord.NUM_EXPERT_ROWS)
    for row in range(num_rows * chunk // num_chunks, num_rows * (chunk + 1) // num_chunks):
        token = read_int32(tokens, row)
        copy_bytes(source + token * row_bytes, out + row * row_bytes, row_bytes)
        if beside != 0:
            for i in range(NUM_BESIDE):
                theirs = word(beside, 2 * i) + token * group_bytes
                copy_bytes(theirs, word(beside, 2 * i + 1) + row * group_bytes, group_bytes)


@operation()
def add_experts(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Add to each token of a run what its experts gave, weighted, and normalised if it says so."""
    n, per_token = word(record, Routing.N), word(record, Routing.PER_TOKEN)
    given, biases = word(record, Routing.SOURCE), word(record, Routing.BIASES)
    norm, epsilon = word(record, Routing.NORM), word(record, Routing.EPSILON)
    num_tokens = word(header, StepWord.NUM_TOKENS)
    first = word(header, StepWord.FIRST_TOKEN)
    sums = scratch(header, worker)
    for token in range(num_tokens * chunk // num_chunks, num_tokens * (chunk + 1) // num_chunks):
        places = word(record, Routing.PLACES) + 4 * token * per_token
        weights = word(record, Routing.WEIGHTS) + 4 * token * per_token
        chosen = word(record, Routing.CHOSEN) + 4 * token * per_token
        for i in range(n):
            write_float32(sums, i, np.float32(0.0))
        for c in range(per_token):
            row = given + 4 * n * read_int32(places, c)
            add_weighted(row, read_float32(weights, c), sums, n)
            if biases != 0:
                bias = biases + 4 * n * read_int32(chosen, c)
                add_weighted(bias, read_float32(weights, c), sums, n)
        out = word(record, Routing.OUT) + 4 * n * (first + token)
        if norm != 0:
            add_normed_row(sums, n, norm, epsilon, out, ONE_BITS, out)
        else:
            add_weighted(sums, np.float32(1.0), out, n)


@operation()
def add_shared(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Add to each token of a run what the shared MLP gave, times the sigmoid of its gate."""
    n, given = word(record, Routing.N), word(record, Routing.SOURCE)
    num_tokens = word(header, StepWord.NUM_TOKENS)
    first = word(header, StepWord.FIRST_TOKEN)
    numbers = scratch(header, worker)
    for token in range(num_tokens * chunk // num_chunks, num_tokens * (chunk + 1) // num_chunks):
        write_sigmoids(word(record, Routing.LOGITS) + 4 * token, 1, numbers)
        out = word(record, Routing.OUT) + 4 * n * (first + token)
        add_weighted(given + 4 * n * token, read_float32(numbers, 0), out, n)
