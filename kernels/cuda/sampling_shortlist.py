"""The tokens that top-k's or top-p's cut may fall among: the third launch of `sampling`.

The bins that the second one has added up say in which of them the cut is (`weight_search`). Of
samples that have one this lists the keys of those, in no order, and adds up strip by strip what is
above: kept for certain. A bin is a quarter of a power of two wide; of the rows of a model it holds
a few tokens near the top, some hundreds further down, and of a flat row of 128 K (normally
distributed, at temperature 1) up to 8000. Only where most tokens weigh the same is the list as long
as the row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from numba import cuda, float32, int32, int64

from kernels.cuda.exact_exponential import integer_weight
from kernels.cuda.lanes import lane_and_warp, warp_sum
from kernels.cuda.long_rows import READS, read_ahead
from kernels.cuda.ordered_floats import NO_KEY, NOT_FINITE, logit_of_key
from kernels.cuda.row_splits import (
    STRIP,
    SplitVariant,
    append_keys,
    largest_of_splits,
    strips_of,
)
from kernels.cuda.variant import Expectation, Pointer, Scalar
from kernels.cuda.weight_search import (
    LISTED,
    OPEN,
    ROW_BINS,
    bin_of,
    find_open,
    has_cut,
    least_weight,
    weight_key,
)


@dataclass(frozen=True, slots=True)
class SamplingShortlistVariant(SplitVariant):
    """The compile-time parameter: threads of a block, whole warps."""

    @property
    def name(self) -> str:
        """Entry point of the machine code."""
        return f"sampling_shortlist_t{self.threads}"

    @property
    def arguments(self) -> tuple[str, ...]:
        """Types of the kernel's parameters."""
        return (
            "int64*", "int64*", "int64*", "int64*", "float32*", "int32*", "float64*", "int32*",
            "float64*", "float64*", "int64", "int32",
            "int32",
        )  # fmt: skip

    @property
    def expectation(self) -> Expectation:
        """Four blocks of 256 threads to a multiprocessor."""
        return Expectation(64, ("DMUL", "SHFL"), uses_float64=True)

    def kernel(self) -> Callable[..., None]:
        """Make the plain kernel function."""
        return make_sampling_shortlist(self)


def make_sampling_shortlist(variant: SamplingShortlistVariant) -> Callable[..., None]:
    """Return the kernel with its compile-time parameters bound."""
    warps = variant.threads // 32

    def sampling_shortlist(
        strip_sums: Pointer,
        listed: Pointer,
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
        """List the share of split blockIdx.x in the open tokens of sample blockIdx.y.

        `strip_sums`: [K, strips], of what is kept for certain. `listed`: [K, V], keys; as many as
        bins[k, LISTED] says. `bins`: [K, ROW_BINS] of `sampling_weights`; what is found in them is
        written to bins[k, OPEN …]. The others as there.
        """
        split, splits = cuda.blockIdx.x, cuda.gridDim.x
        sample = int64(cuda.blockIdx.y)
        lane, warp = lane_and_warp()
        row = int64(logits_rows[sample]) * logits_stride
        first_bin = sample * ROW_BINS
        strips = strips_of(vocab)
        begin = split * share
        end = min(begin + share, strips)
        inverse_temperature = inverse_temperatures[sample]
        top_k, top_p = int64(top_ks[sample]), top_ps[sample]
        numbers = cuda.local.array(READS, float32)
        found = cuda.local.array(READS, int64)
        best = int64(NOT_FINITE)
        if inverse_temperature > 0 and has_cut(top_k, top_p, vocab):
            best = largest_of_splits(keys, sample * splits, splits)

        if best != NOT_FINITE:
            largest = logit_of_key(best)
            least = least_weight(min_ps[sample])
            low, high, above, sum_above, is_counted, whole = find_open(
                bins, first_bin, top_k, top_p, vocab
            )
            if split == 0 and warp == 0 and lane == 0:
                bins[first_bin + OPEN] = low
                bins[first_bin + OPEN + 1] = high
                bins[first_bin + OPEN + 2] = above
                bins[first_bin + OPEN + 3] = sum_above
                bins[first_bin + OPEN + 4] = int64(is_counted)
                bins[first_bin + OPEN + 5] = whole
            for strip in range(begin + warp, end, warps):
                first = int32(strip * STRIP + lane)
                read_ahead(numbers, logits, row, first, 32, vocab)
                total = int64(0)
                for i in range(READS):
                    weight = integer_weight(numbers[i], largest, inverse_temperature)
                    found[i] = int64(NO_KEY)
                    if first + 32 * i < vocab and weight > 0:
                        number = bin_of(weight)
                        if number > high:
                            if weight >= least:
                                total += weight
                        elif number >= low:
                            found[i] = weight_key(weight, int64(first + 32 * i))
                total = warp_sum(total)
                if lane == 0:
                    strip_sums[sample * strips + strip] = total
                append_keys(listed, sample * vocab, bins, first_bin + LISTED, found)

    return sampling_shortlist
