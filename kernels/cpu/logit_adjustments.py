"""Logit bias, penalties and mask, on a copy of a row.

Specification: `kernels.reference.logit_adjustments`.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kernels.cpu.compiled import word
from kernels.cpu.memory_words import (
    copy_bytes,
    read_float32,
    read_float64,
    read_int32,
    unfused,
    write_float32,
    write_int32,
)
from kernels.cpu.sample_record import BLOCK, SampleWord
from kernels.cpu.sampling_tile import keep_allowed

LARGEST: Final = np.finfo(np.float32).max
DONE: Final = -1
"""Stands in the counts for a token that has been dealt with."""


@unfused
def write_within_range(logits: int, token: int, logit: np.float32) -> None:
    """Write a logit, or the finite number nearest to it."""
    write_float32(logits, token, min(max(logit, -LARGEST), LARGEST))


@unfused
def penalise(sample: int, logits: int, counts: int) -> None:
    """Apply a sample's penalties to logits, float32 [V], each token of the history once.

    `counts`: scratch memory, int32 [V]; only the entries of tokens in the history are touched.
    """
    repetition = np.float32(read_float64(sample, SampleWord.REPETITION_PENALTY))
    presence = np.float32(read_float64(sample, SampleWord.PRESENCE_PENALTY))
    frequency = np.float32(read_float64(sample, SampleWord.FREQUENCY_PENALTY))
    if repetition == 1.0 and presence == 0.0 and frequency == 0.0:
        return
    history = word(sample, SampleWord.HISTORY)
    num_tokens = word(sample, SampleWord.NUM_HISTORY)
    for i in range(num_tokens):
        write_int32(counts, read_int32(history, i), 0)
    for i in range(word(sample, SampleWord.NUM_PROMPT), num_tokens):
        token = read_int32(history, i)
        write_int32(counts, token, read_int32(counts, token) + 1)
    for i in range(num_tokens):
        token = read_int32(history, i)
        count = read_int32(counts, token)
        if count != DONE:
            write_int32(counts, token, DONE)
            logit = read_float32(logits, token)
            logit = logit * repetition if logit < 0 else logit / repetition
            if count > 0:
                logit = logit - frequency * np.float32(count)
                logit = logit - presence
            write_within_range(logits, token, logit)


@unfused
def is_adjusted(sample: int) -> bool:
    """Whether a sample record has a bias, a penalty or a mask."""
    is_biased: bool = word(sample, SampleWord.NUM_BIASES) > 0
    return (
        is_biased
        or word(sample, SampleWord.ALLOWED) != 0
        or read_float64(sample, SampleWord.REPETITION_PENALTY) != 1.0
        or read_float64(sample, SampleWord.PRESENCE_PENALTY) != 0.0
        or read_float64(sample, SampleWord.FREQUENCY_PENALTY) != 0.0
    )


@unfused
def adjust(sample: int, row: int, vocab: int, logits: int, counts: int) -> None:
    """Write a row's logits [V, filled up to blocks] with bias, penalties and mask applied."""
    copy_bytes(row, logits, 4 * vocab)
    tokens, values = word(sample, SampleWord.BIAS_TOKENS), word(sample, SampleWord.BIAS_VALUES)
    for i in range(word(sample, SampleWord.NUM_BIASES)):
        token = read_int32(tokens, i)
        write_within_range(logits, token, read_float32(logits, token) + read_float32(values, i))
    penalise(sample, logits, counts)
    allowed = word(sample, SampleWord.ALLOWED)
    if allowed != 0:
        keep_allowed(logits, (vocab + BLOCK - 1) // BLOCK, allowed)
