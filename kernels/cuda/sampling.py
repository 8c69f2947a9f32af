"""Choosing a token from logits: greedy, or drawn by temperature, top-k, top-p and min-p.

The specification is `kernels.reference.sampling`, and this gives the very token that it gives: the
weights are integers, made by float64 operations that are rounded once each, so that their sums are
the same in any order.

Rows are long and often few, so several multiprocessors share one (`row_splits`), and meet between
launches. Nothing is sorted. What a launch is for decides who needs it:

    1  largest_logits      the largest logit of each split                    all
    2  sampling_weights    the sum of weights of each strip of 128 ids        drawn
                           or counts and sums of the weights' bins            with top-k or top-p
    3  sampling_shortlist  the tokens of the bins that the cut may be in,     with top-k or top-p
                           and the sum of each strip above them
    4  sampling            the token                                          all

Who plans a batch knows what its samples need, and leaves 2 and 3 out where none does; in a launch
that is not left out, samples that do not need it end at once. The fourth, here, is one block of
threads a sample. With top-k or top-p it finds the cut in the list (`weight_search`), and adds what
it keeps of that to the strips' sums. The drawn token is the first in order of id among the kept
whose running sum exceeds the target: the strips' sums say which strip holds it, and a warp makes
that strip's weights again.

    ids    │ strip 0       │ strip 1       │ … │ strip 1001    │
    sums   │ 812           │ 90            │   │ 3             │
             target 850 ───────▲ 38 into strip 1

Limits: the vocabulary is at most 2^22, so that sums fit 63 bits and keys 64.

What limits it (an argument; `make gpu` measures), for rows of 128 K logits on a device of 132
multiprocessors. A pass over a row reads 0.5 MB, from the second cache as long as the rows of a step
fit there; that gives a multiprocessor 64 bytes a cycle: 8 K cycles if one reads it all, some 60 if
all share it. The weights of a row take one multiprocessor's float64 units, 64 of them on a data
centre's device and two on others, 80 K cycles, and 640 if all share them. So few rows wait, for
memory and for one instruction after the other. Of the compiled code a warp with one strip runs 380
instructions of launch 1, 600 to 830 of 2, 1000 to 1200 of 3, and of 4 230 for greedy, 720 for a
draw and two to four thousand to find a cut; each is some four cycles, and each read waited for some
hundreds more.

    rows    greedy             drawn                   with top-k, top-p
    1, 8    2 launches,        3 launches, 2 passes:   4 launches, 3 passes: all waiting
            1 pass: waiting    waiting                 but 2 · 8 · 640 cycles for the weights of 8
    64      33 MB              2 · 33 MB, 41 K cycles  3 · 33 MB, 82 K cycles for weights
    256     131 MB, which      2 · 131 MB, 160 K       3 · 131 MB, 320 K cycles for weights
            no cache holds     cycles for weights

One block of threads a row, as it was, took for one row as for 64: 8 K cycles for greedy, 80 K more
for the weights, 32 K for two passes over them (1 MB a row), and 16 K for each of up to six more for
top-k and again for top-p; for 256 rows twice that. So 64 rows gain what stood idle, half of the
multiprocessors, and the passes over weights that are no more; 256 rows with a cut pay 160 K cycles
for making the weights twice, and save up to fourteen passes over 263 MB, of 100 K cycles each. A
launch more costs one or two µs, which is what 256 greedy rows pay.

The ladder:
  v1  one pass for greedy, four for drawing, top-k and top-p up to six more each; a read at a time.
  v2  four reads of a thread under way, the next logit read while a weight is computed, sums of bins
      added in halves instead of by a loop that waits for a turn.
  v3  this: rows split over all multiprocessors, weights made again instead of written, keys that
      are all different, so that the search ends where one is left, and over a list of few.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from numba import cuda, float32, float64, int32, int64, uint64

from kernels.cuda.exact_exponential import integer_weight
from kernels.cuda.instructions.atomics import add_int64
from kernels.cuda.instructions.conversions import FULL_WARP
from kernels.cuda.instructions.exact_float64 import multiply_float64
from kernels.cuda.lanes import lane_and_warp, sum_up_to_lane, warp_sum
from kernels.cuda.largest_logits import LargestLogitsVariant
from kernels.cuda.long_rows import READS, read_ahead
from kernels.cuda.ordered_floats import NOT_FINITE, logit_of_key, token_of_key
from kernels.cuda.philox import uniform
from kernels.cuda.plain_variants import SampleVariant
from kernels.cuda.row_splits import STRIP, largest_of_splits, strips_of
from kernels.cuda.sampling_shortlist import SamplingShortlistVariant
from kernels.cuda.sampling_weights import SamplingWeightsVariant
from kernels.cuda.variant import Expectation, Pointer, Scalar, Variant
from kernels.cuda.weight_search import (
    ALL_KEYS,
    ANY_SUM,
    DIGITS,
    ID_BITS,
    LISTED,
    OPEN,
    ROW_BINS,
    find_cut,
    has_cut,
    least_weight,
    token_of_weight_key,
    weight_key,
)


@dataclass(frozen=True, slots=True)
class SamplingVariant(SampleVariant):
    """The compile-time parameter: threads of a block, whole warps, here and in what goes before."""

    threads: int = 256

    @property
    def largest(self) -> LargestLogitsVariant:
        """The first launch."""
        return LargestLogitsVariant(self.threads)

    @property
    def weights(self) -> SamplingWeightsVariant:
        """The second launch."""
        return SamplingWeightsVariant(self.threads)

    @property
    def shortlist(self) -> SamplingShortlistVariant:
        """The third launch."""
        return SamplingShortlistVariant(self.threads)

    @property
    def name(self) -> str:
        """Entry point of the machine code."""
        return f"sampling_t{self.threads}"

    @property
    def arguments(self) -> tuple[str, ...]:
        """Types of the kernel's parameters."""
        return (
            "int32*", "int32*", "int64*", "int64*", "int64*", "int64*", "float32*", "int32*",
            "float64*", "int32*", "float64*", "float64*", "int64*", "int32*", "int64*", "int64",
            "int32", "int32",
        )  # fmt: skip

    @property
    def expectation(self) -> Expectation:
        """Two blocks of 256 threads to a multiprocessor."""
        return Expectation(128, ("ATOMS", "DMUL", "SHFL"), uses_float64=True)

    def kernel(self) -> Callable[..., None]:
        """Make the plain kernel function."""
        return make_sampling(self)


def variants(*, every: bool) -> list[Variant]:  # noqa: ARG001 - there are no more
    """Return the ones that are used."""
    last = SamplingVariant()
    return [last.largest, last.weights, last.shortlist, last]


def make_sampling(variant: SamplingVariant) -> Callable[..., None]:
    """Return the kernel with its compile-time parameters bound."""
    threads, warps = variant.threads, variant.threads // 32

    def sampling(
        tokens: Pointer,
        is_finite: Pointer,
        keys: Pointer,
        strip_sums: Pointer,
        bins: Pointer,
        listed: Pointer,
        logits: Pointer,
        logits_rows: Pointer,
        inverse_temperatures: Pointer,
        top_ks: Pointer,
        top_ps: Pointer,
        min_ps: Pointer,
        seeds: Pointer,
        sample_indexes: Pointer,
        positions: Pointer,
        logits_stride: Scalar,
        vocab: Scalar,
        splits: Scalar,
    ) -> None:
        """Choose the token of sample blockIdx.x from row logits_rows[blockIdx.x] of `logits`.

        `tokens`, `is_finite`: [K]; where a row has a logit that is not finite, both become 0.
        `keys`: [K, splits], `strip_sums`: [K, strips], `bins`: [K, ROW_BINS], `listed`: [K, V], of
        the launches before; what nobody needs is not read. `logits`: [R, V], rows `logits_stride`
        elements apart. All others [K]: `inverse_temperatures` is
        `kernels.reference.sampling.inverse(temperature)`, or 0 for greedy; `top_ks` 0 keeps all;
        `seeds` are the bits of an unsigned number.
        """
        sample = int64(cuda.blockIdx.x)
        thread = cuda.threadIdx.x
        lane, warp = lane_and_warp()
        row = int64(logits_rows[sample]) * logits_stride
        strips = strips_of(vocab)
        first_sum = sample * strips
        of_warps = cuda.shared.array(warps, int64)
        counts = cuda.shared.array(DIGITS, int32)
        sums = cuda.shared.array(DIGITS, int64)
        numbers = cuda.local.array(READS, float32)
        many = cuda.local.array(READS, int64)

        best = largest_of_splits(keys, sample * splits, splits)
        inverse_temperature = inverse_temperatures[sample]
        if best != NOT_FINITE and inverse_temperature > 0:
            top_k, top_p = int64(top_ks[sample]), top_ps[sample]
            least = least_weight(min_ps[sample])
            cut = ALL_KEYS
            if has_cut(top_k, top_p, vocab):
                first_bin, first_listed = sample * ROW_BINS, sample * vocab
                length = bins[first_bin + LISTED]
                low, high = bins[first_bin + OPEN], bins[first_bin + OPEN + 1]
                above, sum_above = bins[first_bin + OPEN + 2], bins[first_bin + OPEN + 3]
                is_counted, total = bins[first_bin + OPEN + 4] != 0, bins[first_bin + OPEN + 5]
                for is_nucleus in (False, True):
                    wanted_count, wanted_sum = top_k, float64(ANY_SUM)
                    is_on = is_counted
                    if is_nucleus:
                        wanted_count, wanted_sum = int64(0), multiply_float64(top_p, float64(total))
                        is_on = top_p < 1.0
                    if is_on:  # top-p keeps part of what top-k has kept: its cut is no lower
                        cut, total = find_cut(
                            listed, first_listed, length, low, high, above, sum_above,
                            wanted_count, wanted_sum, counts, sums,
                        )  # fmt: skip
                cut = max(cut, least << ID_BITS)
                for begin in range(thread, length, READS * threads):
                    read_ahead(many, listed, first_listed, begin, threads, length)
                    for i in range(READS):
                        if begin + i * threads < length and many[i] >= cut:
                            strip = token_of_weight_key(many[i]) // STRIP
                            add_int64(strip_sums, first_sum + strip, many[i] >> ID_BITS)
                cuda.syncthreads()
            cut = max(cut, least << ID_BITS)

            # This warp's stretch of strips, and the sum of what is kept of it.
            length = (strips + warps * 32 - 1) // (warps * 32) * 32
            begin = min(warp * length, strips)
            end = min(begin + length, strips)
            mine = int64(0)
            for first in range(begin, end, READS * 32):
                read_ahead(many, strip_sums, first_sum, first + lane, 32, end)
                for i in range(READS):
                    if first + 32 * i + lane < end:
                        mine += many[i]
            mine = warp_sum(mine)
            if lane == 0:
                of_warps[warp] = mine
            cuda.syncthreads()
            running, kept = int64(0), int64(0)
            for w in range(warps):
                if w == warp:
                    running = kept
                kept += of_warps[w]

            u = uniform(
                uint64(seeds[sample]), uint64(sample_indexes[sample]), uint64(positions[sample])
            )
            target = min(int64(multiply_float64(u, float64(kept))), kept - 1)
            if running <= target < running + mine:
                # The strip with the target, and the sum before it.
                chosen, before = int64(-1), int64(0)
                for first in range(begin, end, READS * 32):
                    read_ahead(many, strip_sums, first_sum, first + lane, 32, end)
                    for i in range(READS):
                        strip = first + 32 * i + lane
                        number = many[i] if strip < end else int64(0)
                        after = running + sum_up_to_lane(number)
                        if after - number <= target < after:
                            chosen, before = int64(strip), after - number
                        running = cuda.shfl_sync(FULL_WARP, after, 31)
                for step in range(5):
                    chosen = max(chosen, cuda.shfl_xor_sync(FULL_WARP, chosen, 16 >> step))
                    before = max(before, cuda.shfl_xor_sync(FULL_WARP, before, 16 >> step))

                largest = logit_of_key(best)
                first = chosen * STRIP + lane
                read_ahead(numbers, logits, row, first, 32, vocab)
                for i in range(READS):
                    v = first + 32 * i
                    weight = integer_weight(numbers[i], largest, inverse_temperature)
                    if v >= vocab or weight_key(weight, v) < cut:
                        weight = int64(0)
                    after = before + sum_up_to_lane(weight)
                    if after - weight <= target < after:
                        tokens[sample] = int32(v)
                    before = cuda.shfl_sync(FULL_WARP, after, 31)
            if thread == 0:
                is_finite[sample] = 1
        elif thread == 0:
            tokens[sample] = int32(token_of_key(best)) if best != NOT_FINITE else 0
            is_finite[sample] = int32(best != NOT_FINITE)

    return sampling
