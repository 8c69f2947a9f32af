"""Log-probabilities of given tokens, for prompt log-probabilities and perplexity."""

from __future__ import annotations

import numpy as np

from kernels.interface import Float32Array, Int32Array


def token_logprobs(logits: Float32Array, token_ids: Int32Array, out: Float32Array) -> None:
    """Write log softmax(logits[r])[token_ids[r]] to `out[r]`.

    The sum of exponentials is taken in float64. `logits`: [R, V]. `token_ids`, `out`: [R].
    """
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    chosen = np.take_along_axis(shifted, token_ids[:, None].astype(np.int64), axis=1)[:, 0]
    out[:] = chosen - np.log(np.exp(shifted).sum(axis=1))
