"""Log-probabilities of tokens: of a given one, and of the most likely ones.

The specification is `kernels.reference.logprobs`, and this gives its very bits:

    logprob[v] = float32((logit[v] − max logit) − ln(Σ weight · 2^−40))

with the integer weights of the sampler at temperature 1, whose sum is exact in any order. Three
launches, of which the first two share a row among multiprocessors (`row_splits`):

    1  largest_logits   the largest logit of each split
    2  logprob_sums     the sum of the weights, and a list of candidates
    3  logprobs         the logarithm of the sum, and the most likely of the list

The last one, here, is one block of threads a sample. The most likely are found one after the other,
each as the largest key below the one before: a pass over the list each, of some tens of keys as a
rule. There are at most 20.

What it costs is said in `sampling`: two passes, and the weights once; and 20 rounds of agreement in
a block, some 200 cycles each.

The ladder:
  v1  two passes and one more for each of the most likely; a read at a time.
  v2  four reads of a thread under way, the next logit read while a weight is computed.
  v3  this: rows split over all multiprocessors, and a list instead of a pass for each.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from numba import cuda, float32, float64, int32, int64

from kernels.cuda.block_reductions import block_max
from kernels.cuda.exact_exponential import exact_log
from kernels.cuda.instructions.exact_float64 import add_float64
from kernels.cuda.largest_logits import LargestLogitsVariant
from kernels.cuda.logprob_sums import LISTED, TOTALS, LogprobSumsVariant
from kernels.cuda.long_rows import READS, read_ahead
from kernels.cuda.ordered_floats import NO_KEY, NOT_FINITE, logit_of_key, token_of_key
from kernels.cuda.plain_variants import SampleVariant
from kernels.cuda.row_splits import largest_of_splits
from kernels.cuda.variant import Expectation, Pointer, Scalar, Variant

MAX_LOGPROBS = 20  # most likely tokens of a row
WEIGHT_UNIT = float64(2.0**-40)
NOT_A_NUMBER = float32(math.nan)


@dataclass(frozen=True, slots=True)
class LogprobsVariant(SampleVariant):
    """The compile-time parameter: threads of a block, whole warps, here and in what goes before."""

    threads: int = 256

    @property
    def largest(self) -> LargestLogitsVariant:
        """The first launch."""
        return LargestLogitsVariant(self.threads)

    @property
    def sums(self) -> LogprobSumsVariant:
        """The second launch."""
        return LogprobSumsVariant(self.threads)

    @property
    def name(self) -> str:
        """Entry point of the machine code."""
        return f"logprobs_t{self.threads}"

    @property
    def arguments(self) -> tuple[str, ...]:
        """Types of the kernel's parameters."""
        return (
            "float32*", "int32*", "float32*", "int64*", "int64*", "int64*", "float32*", "int32*",
            "int32*", "int32*", "int64", "int32", "int32",
        )  # fmt: skip

    @property
    def expectation(self) -> Expectation:
        """Three blocks of 256 threads to a multiprocessor."""
        return Expectation(80, ("DMUL", "SHFL"), uses_float64=True)

    def kernel(self) -> Callable[..., None]:
        """Make the plain kernel function."""
        return make_logprobs(self)


def variants(*, every: bool) -> list[Variant]:  # noqa: ARG001 - there are no more
    """Return the ones that are used; the first launch is of `sampling`, too, and listed there."""
    last = LogprobsVariant()
    return [last.sums, last]


def make_logprobs(variant: LogprobsVariant) -> Callable[..., None]:
    """Return the kernel with its compile-time parameters bound."""
    threads, warps = variant.threads, variant.threads // 32

    def logprobs(
        token_logprobs: Pointer,
        top_tokens: Pointer,
        top_logprobs: Pointer,
        keys: Pointer,
        totals: Pointer,
        listed: Pointer,
        logits: Pointer,
        logits_rows: Pointer,
        tokens: Pointer,
        num_logprobs: Pointer,
        logits_stride: Scalar,
        vocab: Scalar,
        splits: Scalar,
    ) -> None:
        """Write the log-probabilities of sample blockIdx.x under row logits_rows[blockIdx.x].

        `token_logprobs`: [K], of `tokens` [K]. `top_tokens`, `top_logprobs`: [K, MAX_LOGPROBS], of
        which the first `num_logprobs` [K] are written, at most V; a negative number writes nothing
        at all. `keys`: [K, splits], `totals`: [K, TOTALS], `listed`: [K, V], of the launches
        before. `logits`: [R, V], rows `logits_stride` elements apart. A row with a logit that is
        not finite gets NaN, and tokens 0.
        """
        sample = int64(cuda.blockIdx.x)
        thread = cuda.threadIdx.x
        count = min(num_logprobs[sample], vocab)
        if count >= 0:
            of_warps = cuda.shared.array(warps, int64)
            many = cuda.local.array(READS, int64)
            first = sample * MAX_LOGPROBS
            first_listed = sample * vocab
            best = largest_of_splits(keys, sample * splits, splits)
            if best == NOT_FINITE:
                if thread == 0:
                    token_logprobs[sample] = NOT_A_NUMBER
                if thread < count:
                    top_tokens[first + thread] = int32(0)
                    top_logprobs[first + thread] = NOT_A_NUMBER
            else:
                log_total = exact_log(float64(totals[TOTALS * sample]) * WEIGHT_UNIT)
                length = totals[TOTALS * sample + LISTED]
                largest = float64(logit_of_key(best))
                if thread == 0:
                    row = int64(logits_rows[sample]) * logits_stride
                    logit = logits[row + int64(tokens[sample])]
                    shifted = add_float64(float64(logit), -largest)
                    token_logprobs[sample] = float32(add_float64(shifted, -log_total))
                for i in range(count):
                    if thread == 0:
                        shifted = add_float64(float64(logit_of_key(best)), -largest)
                        top_tokens[first + i] = int32(token_of_key(best))
                        top_logprobs[first + i] = float32(add_float64(shifted, -log_total))
                    # The next: the largest key below this one.
                    below = int64(NO_KEY)
                    for begin in range(thread, length, READS * threads):
                        read_ahead(many, listed, first_listed, begin, threads, length)
                        for j in range(READS):
                            if begin + j * threads < length and many[j] < best:
                                below = max(below, many[j])
                    best = block_max(below, of_warps)

    return logprobs
