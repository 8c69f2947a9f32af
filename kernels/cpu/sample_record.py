"""The words that say how one token is chosen and where the answers go."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

BLOCK: Final = 64
"""Tokens of a block: four vectors."""
NUM_CANDIDATES: Final = 512
"""Weights that are set apart at most."""


class SampleWord(IntEnum):
    """The int64 words of a sample record; "float64": the bits of one.

    V: vocabulary, N: tokens of the history, n: entries of a list.
    """

    TEMPERATURE = 0
    """float64; 0: greedy."""
    TOP_P = 1
    """float64; 1: off."""
    SEED = 2
    """uint64."""
    SAMPLE_INDEX = 3
    POSITION = 4
    """Of the token to be chosen."""
    TOP_K = 5
    """0: off."""
    MIN_P = 6
    """float64; 0: off."""
    LOGITS_ROW = 7
    """Row of the operation's LOGITS."""
    GIVEN_TOKEN = 8
    """Below 0: choose one. Else nothing is chosen, this is the token: for log-probabilities."""
    NUM_LOGPROBS = 9
    """Below 0: no log-probabilities. Else that of the token and of this many most likely ones."""
    REPETITION_PENALTY = 10
    """float64; 1: off."""
    PRESENCE_PENALTY = 11
    """float64; 0: off."""
    FREQUENCY_PENALTY = 12
    """float64; 0: off."""
    HISTORY = 13
    """int32 [N], the sequence so far. Read only if a penalty is on."""
    NUM_HISTORY = 14
    NUM_PROMPT = 15
    """Of the history: what is not output."""
    BIAS_TOKENS = 16
    """int32 [n], no token twice."""
    BIAS_VALUES = 17
    """float32 [n]."""
    NUM_BIASES = 18
    ALLOWED = 19
    """uint8 [8·ceil(V / 64)]: bit i of byte i / 8, the lowest first, allows token i; 0: all are."""
    OUT_TOKEN = 20
    """int32: the token; 0 if the logits are not finite."""
    OUT_FINITE = 21
    """uint8: 1, or 0 if the logits are not finite."""
    OUT_LOGPROB = 22
    """float32: the token's; NaN if the logits are not finite. Written if NUM_LOGPROBS ≥ 0."""
    OUT_TOP_TOKENS = 23
    """int32 [min(NUM_LOGPROBS, V)]."""
    OUT_TOP_LOGPROBS = 24
    """float32, as many."""


SAMPLE_WORDS: Final = 25


def sampling_scratch_bytes(vocab_size: int) -> int:
    """Return the scratch memory that a worker needs for `kernels.cpu.sampling.sample`."""
    blocks = -(-vocab_size // BLOCK)
    largest = 8 * BLOCK * -(-blocks // BLOCK)
    weights, totals, logits, last = 8 * BLOCK * blocks, 8 * blocks, 4 * BLOCK * blocks, 4 * BLOCK
    return weights + largest + totals + logits + last + 8 * (NUM_CANDIDATES + BLOCK)
