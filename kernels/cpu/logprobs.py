"""Log-probabilities of given tokens; specification: `kernels.reference.logprobs`."""

from __future__ import annotations

import math

import numpy as np

from kernels.cpu.compiled import compiled
from kernels.cpu.exponential import exp32
from kernels.interface import Float32Array, Int32Array


@compiled(
    "void(float32[:, ::1], int32[::1], float32[::1])",
    free_order=True,
)
def token_logprobs(logits: Float32Array, token_ids: Int32Array, out: Float32Array) -> None:
    """Write log softmax(logits[r])[token_ids[r]] to `out[r]`; exponentials float32, sum float64."""
    num_rows, vocab_size = logits.shape
    for r in range(num_rows):
        largest = logits[r, 0]
        for v in range(1, vocab_size):
            largest = max(largest, logits[r, v])
        total = 0.0
        for v in range(vocab_size):
            total += np.float64(exp32(logits[r, v] - largest))
        chosen = np.float64(logits[r, token_ids[r]]) - np.float64(largest)
        out[r] = np.float32(chosen - math.log(total))
