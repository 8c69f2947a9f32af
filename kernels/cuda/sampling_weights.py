"""The weights of a row, added up: the second launch of `sampling`.

A sample whose cut need not be searched for has its strips' sums from here, of the weights that
min-p keeps. Of one with top-k or top-p the weights are counted and added up in bins
(`weight_search`): first a block of threads its own, in shared memory, then all of them in the
row's. Greedy samples and rows that are not finite are left out.

No weight is written: made again where it is needed it costs some 40 float64 operations, of which a
multiprocessor of a data centre's device does 64 a cycle, and written and read back it would be 16
bytes, which many rows together have to fetch from the device's memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from numba import cuda, float32, int32, int64

from kernels.cuda.exact_exponential import integer_weight
from kernels.cuda.instructions.atomics import add_int32, add_int64, add_shared_int64
from kernels.cuda.lanes import lane_and_warp, warp_sum
from kernels.cuda.long_rows import READS, read_ahead
from kernels.cuda.ordered_floats import NOT_FINITE, logit_of_key
from kernels.cuda.row_splits import STRIP, SplitVariant, largest_of_splits, strips_of
from kernels.cuda.variant import Expectation, Pointer, Scalar
from kernels.cuda.weight_search import (
    BINS,
    ROW_BINS,
    SUM_OF_BIN,
    TOTAL,
    bin_of,
    has_cut,
    least_weight,
)


@dataclass(frozen=True, slots=True)
class SamplingWeightsVariant(SplitVariant):
    """The compile-time parameter: threads of a block, whole warps."""

    @property
    def name(self) -> str:
        """Entry point of the machine code."""
        return f"sampling_weights_t{self.threads}"

    @property
    def arguments(self) -> tuple[str, ...]:
        """Types of the kernel's parameters."""
        return (
            "int64*", "int64*", "int64*", "float32*", "int32*", "float64*", "int32*", "float64*",
            "float64*", "int64", "int32",
            "int32",
        )  # fmt: skip

    @property
    def expectation(self) -> Expectation:
        """Four blocks of 256 threads to a multiprocessor."""
        return Expectation(64, ("ATOMS", "DMUL", "SHFL"), uses_float64=True)

    def kernel(self) -> Callable[..., None]:
        """Make the plain kernel function."""
        return make_sampling_weights(self)


def make_sampling_weights(variant: SamplingWeightsVariant) -> Callable[..., None]:
    """Return the kernel with its compile-time parameters bound."""
    threads, warps = variant.threads, variant.threads // 32

    def sampling_weights(
        strip_sums: Pointer,
        bins: Pointer,
        keys: Pointer,
        logits: Pointer,
        logits_rows: Pointer,
        inverse_temperatures: Pointer,
        top_ks: Pointer,
        top_ps: Pointer,
        min_ps: Pointer,
        logits_stride: Scalar,
        vocab: Scalar,
        share: Scalar,
    ) -> None:
        """Add up the share of split blockIdx.x in the weights of sample blockIdx.y.

        `strip_sums`: [K, strips], or `bins`: [K, ROW_BINS], zero before; `keys`: [K, splits] of
        `largest_logits`. The others as in `sampling`.
        """
        split, splits = cuda.blockIdx.x, cuda.gridDim.x
        sample = int64(cuda.blockIdx.y)
        thread = cuda.threadIdx.x
        lane, warp = lane_and_warp()
        row = int64(logits_rows[sample]) * logits_stride
        strips = strips_of(vocab)
        begin = split * share
        end = min(begin + share, strips)
        inverse_temperature = inverse_temperatures[sample]
        counts = cuda.shared.array(BINS, int32)
        sums = cuda.shared.array(BINS, int64)
        numbers = cuda.local.array(READS, float32)
        best = int64(NOT_FINITE)
        if inverse_temperature > 0:
            best = largest_of_splits(keys, sample * splits, splits)

        if best != NOT_FINITE:
            largest = logit_of_key(best)
            top_p = top_ps[sample]
            is_cut = has_cut(top_ks[sample], top_p, vocab)
            least = least_weight(min_ps[sample])
            if is_cut:
                for i in range(thread, BINS, threads):
                    counts[i] = int32(0)
                    sums[i] = int64(0)
                cuda.syncthreads()
            for strip in range(begin + warp, end, warps):
                first = int32(strip * STRIP + lane)
                read_ahead(numbers, logits, row, first, 32, vocab)
                total = int64(0)
                for i in range(READS):
                    weight = integer_weight(numbers[i], largest, inverse_temperature)
                    if first + 32 * i < vocab and weight > 0:
                        if is_cut:
                            place = bin_of(weight)
                            add_int32(counts, place, 1)
                            add_shared_int64(sums, place, weight)
                        if is_cut or weight >= least:
                            total += weight
                total = warp_sum(total)
                if lane == 0:
                    if is_cut:
                        add_int64(bins, sample * ROW_BINS + TOTAL, total)
                    else:
                        strip_sums[sample * strips + strip] = total
            if is_cut:
                cuda.syncthreads()
                for i in range(thread, BINS, threads):
                    if counts[i] > 0:
                        add_int64(bins, sample * ROW_BINS + i, counts[i])
                        add_int64(bins, sample * ROW_BINS + SUM_OF_BIN + i, sums[i])

    return sampling_weights
