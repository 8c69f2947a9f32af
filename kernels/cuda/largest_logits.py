"""The largest logit of each split of a row: the first launch of `sampling` and of `logprobs`.

One number a split says all that later launches ask: its largest key (`ordered_floats`), which names
the logit and its token, or `NOT_FINITE` where one of its logits is not finite. The same launch
clears what the next one adds to.

A warp reads a strip while it looks at the one before: a launch for few rows is nothing but waiting
(13 µs for the 16 MB of 32 rows on an H200 before, when a block's reads came one after the other and
blocks in three waves). A thread compares floats and makes one key in the end: 7.6 instructions a
logit in the compiled loop, which leaves room for 67 bytes a cycle and multiprocessor, more than the
second cache gives. Reads are of 4 bytes, because a row begins anywhere (vocabularies of odd
length); a warp's are 128 bytes all the same, and with 64 warps of four each there are 32 KB under
way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from numba import cuda, float32, int32, int64

from kernels.cuda.block_reductions import LARGEST_FINITE, block_max
from kernels.cuda.lanes import lane_and_warp
from kernels.cuda.long_rows import READS, read_ahead
from kernels.cuda.ordered_floats import NO_KEY, NOT_FINITE, order_key
from kernels.cuda.row_splits import STRIP, SplitVariant, strips_of
from kernels.cuda.variant import Expectation, Local, Pointer, Scalar

BELOW_ALL = float32(-math.inf)


@dataclass(frozen=True, slots=True)
class LargestLogitsVariant(SplitVariant):
    """The compile-time parameter: threads of a block, whole warps."""

    @property
    def name(self) -> str:
        """Entry point of the machine code."""
        return f"largest_logits_t{self.threads}"

    @property
    def arguments(self) -> tuple[str, ...]:
        """Types of the kernel's parameters."""
        return ("int64*", "int64*", "float32*", "int32*", "int64", "int32", "int32", "int32")

    @property
    def expectation(self) -> Expectation:
        """Eight blocks of 256 threads, as many as a multiprocessor takes."""
        return Expectation(32, ("LDG", "SHFL"))

    def kernel(self) -> Callable[..., None]:
        """Make the plain kernel function."""
        return make_largest_logits(self)


def make_largest_logits(variant: LargestLogitsVariant) -> Callable[..., None]:
    """Return the kernel with its compile-time parameters bound."""
    threads, warps = variant.threads, variant.threads // 32

    def largest_logits(
        keys: Pointer,
        cleared: Pointer,
        logits: Pointer,
        logits_rows: Pointer,
        logits_stride: Scalar,
        vocab: Scalar,
        share: Scalar,
        num_cleared: Scalar,
    ) -> None:
        """Write keys[k, s], the largest key of split s = blockIdx.x of sample k = blockIdx.y.

        `keys`: [K, splits]. `cleared`: [K, num_cleared], all become 0. `logits`: [R, V], rows
        `logits_stride` elements apart; sample k has row logits_rows[k].
        """
        split, splits = cuda.blockIdx.x, cuda.gridDim.x
        sample = int64(cuda.blockIdx.y)
        thread = cuda.threadIdx.x
        lane, warp = lane_and_warp()
        row = int64(logits_rows[sample]) * logits_stride
        of_warps = cuda.shared.array(warps, int64)
        numbers = cuda.local.array(READS, float32)
        coming = cuda.local.array(READS, float32)

        if split == 0:
            for i in range(thread, num_cleared, threads):
                cleared[sample * num_cleared + i] = int64(0)

        largest, token, is_finite = BELOW_ALL, int32(0), True
        strip = int32(split * share + warp)
        end = int32(min((split + 1) * share, strips_of(vocab)))
        whole = int32(min(end, vocab // STRIP))  # behind these there is at most the ragged one
        if strip < whole:
            read_strip(coming, logits, row + strip * STRIP + lane)
        while strip < whole:
            first = int32(strip * STRIP + lane)
            for i in range(READS):
                numbers[i] = coming[i]
            strip = int32(strip + warps)
            if strip < whole:
                read_strip(coming, logits, row + strip * STRIP + lane)
            largest, token, is_finite = largest_of_strip(numbers, first, largest, token, is_finite)
        if strip < end:
            first = int32(strip * STRIP + lane)
            read_ahead(numbers, logits, row, first, 32, vocab)
            largest, token, is_finite = largest_of_strip(numbers, first, largest, token, is_finite)
        key = int64(NO_KEY)
        if not is_finite:
            key = int64(NOT_FINITE)
        elif largest > BELOW_ALL:
            key = order_key(largest, token)
        key = block_max(key, of_warps)
        if thread == 0:
            keys[sample * splits + split] = key

    return largest_logits


@cuda.jit(device=True, inline="always")
def read_strip(numbers: Local, source: Pointer, begin: Scalar) -> None:
    """numbers[i] = source[begin + 32 · i], i < READS; nothing is asked about the row's end."""
    for i in range(READS):
        numbers[i] = source[begin + 32 * i]


@cuda.jit(device=True, inline="always")
def largest_of_strip(
    numbers: Local, first: Scalar, largest: Scalar, token: Scalar, is_finite: Scalar
) -> tuple[Scalar, Scalar, Scalar]:
    """Return the largest of `largest` and numbers[i] of token first + 32 · i, and what is finite.

    Of equals the one that there was, then the first. A lane may so choose a token past the row's
    end, which comes with the number of its last: `order_key` prefers the lower id of both.
    """
    for i in range(READS):
        is_finite = is_finite and abs(numbers[i]) <= LARGEST_FINITE  # NaN is not
        if numbers[i] > largest:
            largest, token = numbers[i], int32(first + 32 * i)
    return largest, token, is_finite
