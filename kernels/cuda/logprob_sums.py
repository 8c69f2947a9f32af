"""The sum of a row's weights, and candidates for its likeliest tokens: the second of `logprobs`.

The n largest keys of 32 shares of a row are n tokens, so that the n likeliest are no less than the
n-th of them: a bound, known from the first launch (`nth_of_splits`), that a few more tokens than n
reach where the likely ones are scattered over the row, and a 32nd of the row for each of the n at
the worst. They are listed, in no order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from numba import cuda, float32, float64, int32, int64

from kernels.cuda.exact_exponential import integer_weight
from kernels.cuda.instructions.atomics import add_int64
from kernels.cuda.lanes import lane_and_warp, warp_sum
from kernels.cuda.long_rows import READS, read_ahead
from kernels.cuda.ordered_floats import NO_KEY, NOT_FINITE, logit_of_key, order_key
from kernels.cuda.row_splits import (
    STRIP,
    SplitVariant,
    append_keys,
    largest_of_splits,
    nth_of_splits,
    strips_of,
)
from kernels.cuda.variant import Expectation, Pointer, Scalar

TOTALS = 2  # of a sample: the sum of its weights, and the length of its list
LISTED = 1


@dataclass(frozen=True, slots=True)
class LogprobSumsVariant(SplitVariant):
    """The compile-time parameter: threads of a block, whole warps."""

    @property
    def name(self) -> str:
        """Entry point of the machine code."""
        return f"logprob_sums_t{self.threads}"

    @property
    def arguments(self) -> tuple[str, ...]:
        """Types of the kernel's parameters."""
        return (
            "int64*", "int64*", "int64*", "float32*", "int32*", "int32*", "int64",
            "int32", "int32",
        )  # fmt: skip

    @property
    def expectation(self) -> Expectation:
        """Four blocks of 256 threads to a multiprocessor."""
        return Expectation(64, ("DMUL", "SHFL"), uses_float64=True)

    def kernel(self) -> Callable[..., None]:
        """Make the plain kernel function."""
        return make_logprob_sums(self)


def make_logprob_sums(variant: LogprobSumsVariant) -> Callable[..., None]:
    """Return the kernel with its compile-time parameters bound."""
    warps = variant.threads // 32

    def logprob_sums(
        totals: Pointer,
        listed: Pointer,
        keys: Pointer,
        logits: Pointer,
        logits_rows: Pointer,
        num_logprobs: Pointer,
        logits_stride: Scalar,
        vocab: Scalar,
        share: Scalar,
    ) -> None:
        """Add up and list the share of split blockIdx.x in sample blockIdx.y.

        `totals`: [K, TOTALS], zero before: the sum of the integer weights at temperature 1, and the
        length of the list of keys in `listed` [K, V]. `keys`: [K, splits] of `largest_logits`. The
        others as in `logprobs`.
        """
        split, splits = cuda.blockIdx.x, cuda.gridDim.x
        sample = int64(cuda.blockIdx.y)
        lane, warp = lane_and_warp()
        row = int64(logits_rows[sample]) * logits_stride
        begin = split * share
        numbers = cuda.local.array(READS, float32)
        found = cuda.local.array(READS, int64)
        count = min(num_logprobs[sample], vocab)
        best = int64(NOT_FINITE)
        if count >= 0:
            best = largest_of_splits(keys, sample * splits, splits)

        if best != NOT_FINITE:
            largest = logit_of_key(best)
            lowest = int64(NOT_FINITE)
            if count > 0:
                lowest = nth_of_splits(keys, sample * splits, splits, count)
            total = int64(0)
            for strip in range(begin + warp, min(begin + share, strips_of(vocab)), warps):
                first = int32(strip * STRIP + lane)
                read_ahead(numbers, logits, row, first, 32, vocab)
                for i in range(READS):
                    v = int32(first + 32 * i)
                    weight = integer_weight(numbers[i], largest, float64(1))
                    key = order_key(numbers[i], v)
                    found[i] = key if v < vocab and key >= lowest else int64(NO_KEY)
                    total += weight if v < vocab else int64(0)
                append_keys(listed, sample * vocab, totals, TOTALS * sample + LISTED, found)
            total = warp_sum(total)
            if lane == 0:
                add_int64(totals, TOTALS * sample, total)

    return logprob_sums
