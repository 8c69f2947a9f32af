"""Log-probabilities of tokens: of the chosen one, of given ones (prompts), of the most likely.

They are those of the *raw* logits: before bias, penalties, temperature and any cut, so they say
what the model thinks, whatever is chosen (as vLLM does by default). Exactly:

    logprob[v] = float32((logit[v] − max logit) − ln(Σ weight · 2^−40))

with the integer weights of `kernels.reference.sampling` at temperature 1 (the sum loses at most
2^−40 a token) and exponential and logarithm of `kernels.reference.exponential`; float64 but for the
last step. The most likely tokens are ordered by logit, largest first, equals by id, lowest first.
A row with a logit that is not finite has NaN for every log-probability.
"""

from __future__ import annotations

import numpy as np

from kernels.interface import Float32Array, Int32Array, Int64Array
from kernels.reference.exponential import log
from kernels.reference.sampling import WEIGHT_ONE, integer_weights


def log_softmax(row: Float32Array) -> Float32Array:
    """Return the log-probability of every token of a logits row [V]."""
    if not np.isfinite(row).all():
        return np.full_like(row, np.nan)
    total = float(integer_weights(row, 1.0).sum()) / WEIGHT_ONE
    shifted = row.astype(np.float64) - np.float64(row.max())
    return (shifted - log(total)).astype(np.float32)


def most_likely(row: Float32Array, count: int) -> Int64Array:
    """Return the ids of the `count` most likely tokens (at most V) of a finite row [V]."""
    return np.argsort(-row, kind="stable")[:count]


def token_logprobs(logits: Float32Array, token_ids: Int32Array, out: Float32Array) -> None:
    """Write the log-probability of `token_ids[r]` under row r of `logits` to `out[r]`.

    `logits`: [R, V]. `token_ids`, `out`: [R].
    """
    for r in range(len(out)):
        out[r] = log_softmax(logits[r])[token_ids[r]]
