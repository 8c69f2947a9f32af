"""Log-probabilities of tokens: of a given one, and of the most likely ones.

The specification is `kernels.reference.logprobs`, and this gives its very bits:

    logprob[v] = float32((logit[v] − max logit) − ln(Σ weight · 2^−40))

with the integer weights of the sampler at temperature 1, whose sum is exact in any order. One block
of threads a row. The most likely tokens are found one after the other, each as the largest of those
below the one before: a pass over the row each, which the second cache serves. There are at most 20.
What it costs is said in `sampling`: the float64 of the sum, and 8 K cycles a pass.

The ladder:
  v1  two passes and one more for each of the most likely; a read at a time.
  v2  this: four reads of a thread under way, the next logit read while a weight is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from numba import cuda, float32, float64, int32, int64

from kernels.cuda.block_reductions import block_max, block_sum, find_largest
from kernels.cuda.exact_exponential import exact_log, integer_weight
from kernels.cuda.instructions.exact_float64 import add_float64
from kernels.cuda.long_rows import READS, read_ahead
from kernels.cuda.ordered_floats import order_key, token_of_key
from kernels.cuda.plain_variants import SampleVariant
from kernels.cuda.variant import Expectation, Pointer, Scalar

MAX_LOGPROBS = 20  # most likely tokens of a row
WEIGHT_UNIT = float64(2.0**-40)
NOT_A_NUMBER = float32(math.nan)


@dataclass(frozen=True, slots=True)
class LogprobsVariant(SampleVariant):
    """The compile-time parameter: threads of a block, whole warps."""

    @property
    def name(self) -> str:
        """Entry point of the machine code."""
        return f"logprobs_t{self.threads}"

    @property
    def arguments(self) -> tuple[str, ...]:
        """Types of the kernel's parameters."""
        return (
            "float32*", "int32*", "float32*", "float32*", "int32*", "int32*", "int32*", "int64",
            "int32",
        )  # fmt: skip

    @property
    def expectation(self) -> Expectation:
        """Two blocks of threads to a multiprocessor."""
        return Expectation(64, ("DMUL", "SHFL"), uses_float64=True)

    def kernel(self) -> Callable[..., None]:
        """Make the plain kernel function."""
        return make_logprobs(self)


def variants(*, every: bool) -> list[LogprobsVariant]:  # noqa: ARG001 - there are no more
    """Return the one that is used."""
    return [LogprobsVariant()]


def make_logprobs(variant: LogprobsVariant) -> Callable[..., None]:
    """Return the kernel with its compile-time parameters bound."""
    threads, warps = variant.threads, variant.threads // 32

    def logprobs(
        token_logprobs: Pointer,
        top_tokens: Pointer,
        top_logprobs: Pointer,
        logits: Pointer,
        logits_rows: Pointer,
        tokens: Pointer,
        num_logprobs: Pointer,
        logits_stride: Scalar,
        vocab: Scalar,
    ) -> None:
        """Write the log-probabilities of sample blockIdx.x under row logits_rows[blockIdx.x].

        `token_logprobs`: [K], of `tokens` [K]. `top_tokens`, `top_logprobs`: [K, MAX_LOGPROBS], of
        which the first `num_logprobs` [K] are written, at most V; a negative number writes nothing
        at all. `logits`: [R, V], rows `logits_stride` elements apart. A row with a logit that is
        not finite gets NaN, and tokens 0.
        """
        sample = int64(cuda.blockIdx.x)
        thread = cuda.threadIdx.x
        count = min(num_logprobs[sample], vocab)
        if count >= 0:
            row = int64(logits_rows[sample]) * logits_stride
            of_warps = cuda.shared.array(warps, int64)
            numbers = cuda.local.array(READS, float32)
            best, bad = find_largest(logits, row, vocab, of_warps)
            largest, log_total = float32(0), float64(0)
            if bad == 0:
                largest = logits[row + token_of_key(best)]
                total = int64(0)
                logit = logits[row + min(thread, vocab - 1)]
                for v in range(thread, vocab, threads):
                    following = logits[row + min(v + threads, vocab - 1)]
                    total += integer_weight(logit, largest, float64(1))
                    logit = following
                total = block_sum(total, of_warps)
                log_total = exact_log(float64(total) * WEIGHT_UNIT)

            first = sample * MAX_LOGPROBS
            for i in range(-1, count):
                token = int64(0)
                if i < 0:
                    token = int64(tokens[sample])
                elif bad == 0:
                    token = token_of_key(best)
                    # The next: the largest key below this one, found by all before it is needed.
                    below = int64(-1)
                    for start in range(thread, vocab, READS * threads):
                        read_ahead(numbers, logits, row, start, threads, vocab)
                        for j in range(READS):
                            v = start + j * threads
                            key = order_key(numbers[j], v)
                            if v < vocab and key < best:
                                below = max(below, key)
                    best = block_max(below, of_warps)
                value = NOT_A_NUMBER
                if bad == 0:
                    shifted = add_float64(float64(logits[row + token]), -float64(largest))
                    value = float32(add_float64(shifted, -log_total))
                if thread == 0:
                    if i < 0:
                        token_logprobs[sample] = value
                    else:
                        top_tokens[first + i] = int32(token)
                        top_logprobs[first + i] = value

    return logprobs
