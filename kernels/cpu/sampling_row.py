"""Passes over one row of logits: the largest, the weights, the most likely tokens."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from kernels.cpu.compiled import word
from kernels.cpu.memory_words import (
    copy_bytes,
    read_float32,
    read_int32,
    unfused,
    write_float32,
    write_int32,
    write_int64,
)
from kernels.cpu.sample_record import BLOCK
from kernels.cpu.sampling_tile import extremes, low_float, weigh_blocks
from kernels.cpu.weight_search import BLOCK_BYTES, Weights
from kernels.reference.exponential import LN2, LOG_COEFFICIENTS, SQRT_HALF
from kernels.reference.sampling import WEIGHT_ONE

STRIDE: Final = 1024
"""Tokens looked through at once for the largest logit."""
INFINITY_BITS: Final = 0x7F800000
NOT_FINITE: Final = -1


@unfused
def find_largest(row: int, vocab: int) -> tuple[int, np.float32]:
    """Return the lowest token id with the largest logit, and the logit.

    The id is NOT_FINITE if a logit of the row (float32 [V] at an address) is not finite.
    """
    whole = vocab // BLOCK * BLOCK
    largest, first = np.float32(-np.inf), 0
    for start in range(0, whole, STRIDE):
        found = extremes(row + 4 * start, min(STRIDE, whole - start) // BLOCK)
        if found >> 32 >= INFINITY_BITS:
            return NOT_FINITE, largest
        if low_float(found) > largest:
            largest, first = low_float(found), start
    for v in range(whole, vocab):
        logit = read_float32(row, v)
        if not (-np.inf < logit < np.inf):
            return NOT_FINITE, largest
        if logit > largest:
            largest, first = logit, v
    while read_float32(row, first) != largest:
        first += 1
    return first, largest


@unfused
def weigh(row: int, vocab: int, largest: float, scale: float, weights: Weights, last: int) -> int:
    """Write the weights of a row of logits and return their sum.

    `scale`: 1 / temperature. `last`: scratch memory for one block of float32.
    """
    whole, num_blocks = vocab // BLOCK, weights.num_blocks
    first, largest_weights, totals, _, _ = weights
    weigh_blocks(row, whole, first, largest_weights, totals, largest, scale)
    if whole < num_blocks:
        for i in range(vocab - BLOCK * whole, BLOCK):
            write_float32(last, i, np.float32(-np.inf))
        copy_bytes(row + 4 * BLOCK * whole, last, 4 * (vocab - BLOCK * whole))
        first += BLOCK_BYTES * whole
        weigh_blocks(
            last, 1, first, largest_weights + 8 * whole, totals + 8 * whole, largest, scale
        )
    for i in range(num_blocks, (num_blocks + BLOCK - 1) // BLOCK * BLOCK):
        write_int64(largest_weights, i, 0)
    total = 0
    for block_index in range(weights.num_blocks):
        total += word(weights.totals, block_index)
    return total


@unfused
def log(x: float) -> float:
    """Return ln x, the bits of `kernels.reference.exponential.log`."""
    m, e = math.frexp(x)
    if m < SQRT_HALF:
        m, e = m * 2.0, e - 1
    s = (m - 1.0) / (m + 1.0)
    square = s * s
    p = LOG_COEFFICIENTS[0]
    for i in range(1, len(LOG_COEFFICIENTS)):
        p = p * square + LOG_COEFFICIENTS[i]
    return float(e) * LN2 + p * s


@unfused
def log_of_total(total: int) -> float:
    """Return ln(total · 2^−40)."""
    return log(float(total) / WEIGHT_ONE)


@unfused
def logprob(logit: np.float32, largest: np.float32, log_total: float) -> np.float32:
    """Return a token's log-probability."""
    return np.float32((np.float64(logit) - np.float64(largest)) - log_total)


@unfused
def list_most_likely(row: int, vocab: int, count: int, tokens: int, logits: int) -> None:
    """Write the `count` ≤ V largest logits of a finite row and their ids, sorted.

    Largest first, equals by id. `tokens`, `logits`: addresses of int32 and float32 [count].
    """
    num_listed = 0
    worst = np.float32(-np.inf)
    whole = vocab // BLOCK * BLOCK
    for start in range(0, vocab, BLOCK):
        if num_listed == count and start < whole:
            found = extremes(row + 4 * start, 1)
            if not low_float(found) > worst:
                continue
        for v in range(start, min(start + BLOCK, vocab)):
            logit = read_float32(row, v)
            if num_listed == count and not logit > worst:
                continue
            place = min(num_listed, count - 1)
            while place > 0 and logit > read_float32(logits, place - 1):
                write_float32(logits, place, read_float32(logits, place - 1))
                write_int32(tokens, place, read_int32(tokens, place - 1))
                place -= 1
            write_float32(logits, place, logit)
            write_int32(tokens, place, v)
            num_listed = min(num_listed + 1, count)
            worst = read_float32(logits, num_listed - 1)
