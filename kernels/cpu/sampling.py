"""The operation that chooses tokens from logits; specification: `kernels.reference.sampling`.

Greedy is one vectorised pass over the row. Drawing adds a pass that makes the
integer weights; what top-k, top-p and min-p keep is found without sorting
(`kernels.cpu.weight_search`). Bias and penalties cost a copy of the row, for those who use them.

A worker's scratch memory (`sampling_scratch_bytes`), V filled up to n blocks of 64:

    int64 weights [64·n] │ int64 largest [64·ceil(n / 64)] │ int64 totals [n] │
    float32 logits [64·n] │ float32 last block [64] │ int64 candidates

Before there are weights, their place holds the int32 [V] counts of the tokens in the history.
"""

from __future__ import annotations

import sys
from typing import Final

import numpy as np

from kernels.cpu.compiled import operation, scratch, word
from kernels.cpu.logit_adjustments import adjust, is_adjusted
from kernels.cpu.memory_words import (
    read_float32,
    read_float64,
    unfused,
    write_byte,
    write_float32,
    write_int32,
)
from kernels.cpu.operands import LOGITS, LOGITS_STRIDE, VOCAB
from kernels.cpu.operation import StepWord
from kernels.cpu.sample_record import BLOCK, SAMPLE_WORDS, SampleWord
from kernels.cpu.sampling_row import (
    NOT_FINITE,
    find_largest,
    list_most_likely,
    log_of_total,
    logprob,
    weigh,
)
from kernels.cpu.weight_search import (
    ALL,
    BLOCK_BYTES,
    Prefix,
    Weights,
    keep_first,
    keep_likely,
    keep_nucleus,
    pick,
)
from kernels.reference.philox import KEY_STEPS, MULTIPLIERS, ROUNDS

WORD: Final = np.uint64(0xFFFFFFFF)
SHIFT: Final = np.uint64(32)
MULTIPLIER_0, MULTIPLIER_1 = np.uint64(MULTIPLIERS[0]), np.uint64(MULTIPLIERS[1])
KEY_STEP_0, KEY_STEP_1 = np.uint64(KEY_STEPS[0]), np.uint64(KEY_STEPS[1])
SMALLEST: Final = sys.float_info.min
LARGEST: Final = sys.float_info.max


@unfused
def uniform(seed: np.uint64, sample_index: int, position: int) -> float:
    """Return Philox4x32-10's number in [0, 1); `kernels.reference.philox.uniform`."""
    place = np.uint64(position)
    c0, c1 = place & WORD, place >> SHIFT
    c2, c3 = np.uint64(sample_index) & WORD, np.uint64(0)
    k0, k1 = seed & WORD, seed >> SHIFT
    for _ in range(ROUNDS):
        product0, product1 = MULTIPLIER_0 * c0, MULTIPLIER_1 * c2
        c0, c1 = (product1 >> SHIFT) ^ c1 ^ k0, product1 & WORD
        c2, c3 = (product0 >> SHIFT) ^ c3 ^ k1, product0 & WORD
        k0, k1 = (k0 + KEY_STEP_0) & WORD, (k1 + KEY_STEP_1) & WORD
    high, low = np.int64(c0 >> np.uint64(5)), np.int64(c1 >> np.uint64(6))
    return (high * 2.0**26 + low) / 2.0**53


@unfused
def keep(sample: int, weights: Weights, total: int, vocab: int) -> Prefix:
    """Return what a sample's top-k, top-p and min-p leave of a row's weights."""
    top_k = word(sample, SampleWord.TOP_K)
    top_p = read_float64(sample, SampleWord.TOP_P)
    min_p = read_float64(sample, SampleWord.MIN_P)
    prefix = Prefix(1, ALL, total)
    if 0 < top_k < vocab:
        prefix = keep_first(weights, total, top_k)
    if top_p < 1.0:
        prefix = keep_nucleus(weights, prefix, top_p)
    if min_p > 0.0:
        prefix = keep_likely(weights, prefix, min_p)
    return prefix


@unfused
def draw(sample: int, weights: Weights, total: int, vocab: int) -> int:
    """Return the token that a sample's random number picks among the weights it keeps."""
    prefix = keep(sample, weights, total, vocab)
    u = uniform(
        np.uint64(word(sample, SampleWord.SEED)),
        word(sample, SampleWord.SAMPLE_INDEX),
        word(sample, SampleWord.POSITION),
    )
    return pick(weights, prefix, min(int(u * float(prefix.total)), prefix.total - 1))


@unfused
def write_logprobs(
    sample: int, row: int, vocab: int, token: int, largest: np.float32, log_total: float
) -> None:
    """Write the log-probabilities of a token and of the most likely ones, as asked."""
    logit = read_float32(row, token)
    write_float32(word(sample, SampleWord.OUT_LOGPROB), 0, logprob(logit, largest, log_total))
    count = min(word(sample, SampleWord.NUM_LOGPROBS), vocab)
    if count > 0:
        tokens = word(sample, SampleWord.OUT_TOP_TOKENS)
        values = word(sample, SampleWord.OUT_TOP_LOGPROBS)
        list_most_likely(row, vocab, count, tokens, values)
        for i in range(count):
            write_float32(values, i, logprob(read_float32(values, i), largest, log_total))


@unfused
def report_not_finite(sample: int, vocab: int) -> None:
    """Write what stands for a sample whose logits are not finite."""
    write_byte(word(sample, SampleWord.OUT_FINITE), 0, 0)
    write_int32(word(sample, SampleWord.OUT_TOKEN), 0, 0)
    num_logprobs = word(sample, SampleWord.NUM_LOGPROBS)
    if num_logprobs >= 0:
        write_float32(word(sample, SampleWord.OUT_LOGPROB), 0, np.nan)
    for i in range(min(num_logprobs, vocab)):
        write_int32(word(sample, SampleWord.OUT_TOP_TOKENS), i, 0)
        write_float32(word(sample, SampleWord.OUT_TOP_LOGPROBS), i, np.nan)


@unfused
def sample_row(sample: int, row: int, vocab: int, memory: int) -> None:
    """Choose one token. `sample`: its record; `row`: its logits; `memory`: scratch."""
    num_blocks = (vocab + BLOCK - 1) // BLOCK
    largest_weights = memory + BLOCK_BYTES * num_blocks
    totals = largest_weights + BLOCK_BYTES * ((num_blocks + BLOCK - 1) // BLOCK)
    adjusted = totals + 8 * num_blocks
    last = adjusted + 4 * BLOCK * num_blocks
    weights = Weights(memory, largest_weights, totals, last + 4 * BLOCK, num_blocks)

    best, largest = find_largest(row, vocab)
    if best == NOT_FINITE:
        report_not_finite(sample, vocab)
        return
    log_total = 0.0
    wants_logprobs = word(sample, SampleWord.NUM_LOGPROBS) >= 0
    if wants_logprobs:
        log_total = log_of_total(weigh(row, vocab, float(largest), 1.0, weights, last))
    token = word(sample, SampleWord.GIVEN_TOKEN)
    if token < 0:
        chosen_by, token, top = row, best, largest
        if is_adjusted(sample):
            chosen_by = adjusted
            adjust(sample, row, vocab, adjusted, memory)
            token, top = find_largest(adjusted, vocab)
        temperature = read_float64(sample, SampleWord.TEMPERATURE)
        if temperature != 0.0:
            scale = min(1.0 / max(temperature, SMALLEST), LARGEST)
            total = weigh(chosen_by, vocab, float(top), scale, weights, last)
            token = draw(sample, weights, total, vocab)
    write_byte(word(sample, SampleWord.OUT_FINITE), 0, 1)
    write_int32(word(sample, SampleWord.OUT_TOKEN), 0, token)
    if wants_logprobs:
        write_logprobs(sample, row, vocab, token, largest, log_total)


@operation()
def sample(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Choose the tokens of the header's SAMPLES, or give log-probabilities of given ones.

    Operands: LOGITS, LOGITS_STRIDE, VOCAB. Chunk c of n has samples K·c/n to K·(c+1)/n − 1. The
    samples read rows of LOGITS by their LOGITS_ROW; any number of samples may share a row.
    """
    num_samples = word(header, StepWord.NUM_SAMPLES)
    stride, vocab = 4 * word(record, LOGITS_STRIDE), word(record, VOCAB)
    for k in range(num_samples * chunk // num_chunks, num_samples * (chunk + 1) // num_chunks):
        sample_record = word(header, StepWord.SAMPLES) + 8 * SAMPLE_WORDS * k
        row = word(record, LOGITS) + stride * word(sample_record, SampleWord.LOGITS_ROW)
        sample_row(sample_record, row, vocab, scratch(header, worker))
