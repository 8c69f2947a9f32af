"""Choosing a token from logits: greedy, or drawn by temperature, top-k, top-p and min-p.

The specification is `kernels.reference.sampling`, and this gives the very token that it gives: the
weights are integers, made by float64 operations that are rounded once each, so that their sums are
the same in any order.

One block of threads a sample. It passes over the row of logits for the largest (greedy ends
there), over it again to write the weights, and then never sorts: what top-k, top-p and min-p keep
is found by counting (`weight_search`). The drawn token is the first in order of id among the kept
whose running sum exceeds the target. Each warp takes one stretch of ids:

    ids    │ warp 0        │ warp 1        │ … │ warp 15       │
    sums   │ 812           │ 90            │   │ 3             │   the stretches' sums say which
             target 850 ───────▲ 38 into warp 1                   warp finds the token, lane by lane

Limits: the vocabulary is below 2^22, so that sums fit 63 bits.

What limits it (an argument; `make gpu` measures), for a row of 128 K logits. A sample has one
multiprocessor, which reads 64 bytes a cycle from the second cache: 8 K cycles for a pass over the
logits, 16 K for one over the weights. Greedy is one of the former. Drawing makes the weights, some
40 float64 instructions each, of which a multiprocessor of a data centre's device does 64 a cycle
(of others two): 80 K cycles, the longest part; then it passes over the weights twice, and up to
six times more for each of top-k and top-p. All that only if reads do not wait for each other
(`long_rows`) and lanes that count into one bin do not either (`add_shared_int64`). With few samples
most multiprocessors have nothing to do: a row split over several would be the next step.

The ladder:
  v1  one pass for greedy, four for drawing, top-k and top-p up to six more each; a read at a time.
  v2  this: four reads of a thread under way, the next logit read while a weight is computed, sums
      of bins added in halves instead of by a loop that waits for a turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from numba import cuda, float64, int32, int64, uint64

from kernels.cuda.block_reductions import block_sum, find_largest
from kernels.cuda.exact_exponential import integer_weight
from kernels.cuda.instructions.conversions import FULL_WARP
from kernels.cuda.instructions.exact_float64 import multiply_float64
from kernels.cuda.lanes import warp_sum
from kernels.cuda.long_rows import READS, read_ahead
from kernels.cuda.ordered_floats import token_of_key
from kernels.cuda.philox import uniform
from kernels.cuda.plain_variants import SampleVariant
from kernels.cuda.variant import Expectation, Pointer, Scalar
from kernels.cuda.weight_search import ALL, BINS, count_ties, find_kept, kept_weight

MAX_VOCAB = 1 << 22


@dataclass(frozen=True, slots=True)
class SamplingVariant(SampleVariant):
    """The compile-time parameter: threads of a block, whole warps."""

    @property
    def name(self) -> str:
        """Entry point of the machine code."""
        return f"sampling_t{self.threads}"

    @property
    def arguments(self) -> tuple[str, ...]:
        """Types of the kernel's parameters."""
        return (
            "int32*", "int32*", "int64*", "float32*", "int32*", "float64*", "int32*", "float64*",
            "float64*", "int64*", "int32*", "int64*", "int64", "int32",
        )  # fmt: skip

    @property
    def expectation(self) -> Expectation:
        """One block of 512 threads has the multiprocessor to itself; 128 would still fit."""
        return Expectation(96, ("ATOMS", "DMUL", "SHFL"), uses_float64=True)

    def kernel(self) -> Callable[..., None]:
        """Make the plain kernel function."""
        return make_sampling(self)


def variants(*, every: bool) -> list[SamplingVariant]:  # noqa: ARG001 - there are no more
    """Return the one that is used."""
    return [SamplingVariant()]


def make_sampling(variant: SamplingVariant) -> Callable[..., None]:
    """Return the kernel with its compile-time parameters bound."""
    threads, warps = variant.threads, variant.threads // 32

    def sampling(
        tokens: Pointer,
        is_finite: Pointer,
        weights: Pointer,
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
    ) -> None:
        """Choose the token of sample blockIdx.x from row logits_rows[blockIdx.x] of `logits`.

        `tokens`, `is_finite`: [K]; where a row has a logit that is not finite, both become 0.
        `weights`: [K, V], scratch. `logits`: [R, V], rows `logits_stride` elements apart. All
        others [K]: `inverse_temperatures` is `kernels.reference.sampling.inverse(temperature)`, or
        0 for greedy; `top_ks` 0 keeps all; `seeds` are the bits of an unsigned number.
        """
        sample = int64(cuda.blockIdx.x)
        thread = cuda.threadIdx.x
        warp, lane = thread // 32, thread % 32
        row = int64(logits_rows[sample]) * logits_stride
        first_weight = sample * vocab
        of_warps = cuda.shared.array(warps, int64)
        counts = cuda.shared.array(BINS, int32)
        sums = cuda.shared.array(BINS, int64)
        found = cuda.shared.array(4, int64)

        best, bad = find_largest(logits, row, vocab, of_warps)
        token = token_of_key(best)
        inverse_temperature = inverse_temperatures[sample]
        is_drawn = bad == 0 and inverse_temperature > 0

        if is_drawn:
            largest = logits[row + token]
            total = int64(0)
            logit = logits[row + min(thread, vocab - 1)]
            for v in range(thread, vocab, threads):
                following = logits[row + min(v + threads, vocab - 1)]
                weight = integer_weight(logit, largest, inverse_temperature)
                weights[first_weight + v] = weight
                total += weight
                logit = following
            total = block_sum(total, of_warps)

            threshold, ties = find_kept(
                weights, first_weight, vocab, total,
                int64(top_ks[sample]), top_ps[sample], min_ps[sample], counts, sums,
                found,
            )  # fmt: skip

            # This warp's stretch of ids, and the sum of what is kept of it.
            length = (vocab + warps * 32 - 1) // (warps * 32) * 32
            begin = min(warp * length, vocab)
            end = min(begin + length, vocab)
            ties_before = int64(0)
            if ties != ALL:
                ties_before = count_ties(weights, first_weight, begin, end, threshold, of_warps)
            mine = int64(0)
            seen = ties_before
            read_weights = cuda.local.array(READS, int64)
            for first in range(begin, end, READS * 32):
                read_ahead(read_weights, weights, first_weight, first + lane, 32, end)
                for i in range(READS):
                    weight = read_weights[i] if first + 32 * i + lane < end else int64(0)
                    weight, seen = kept_weight(weight, threshold, ties, seen)
                    mine += weight
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
                seen = ties_before
                for first in range(begin, end, READS * 32):
                    read_ahead(read_weights, weights, first_weight, first + lane, 32, end)
                    for i in range(READS):
                        v = first + 32 * i + lane
                        weight = read_weights[i] if v < end else int64(0)
                        weight, seen = kept_weight(weight, threshold, ties, seen)
                        # The running sum after this lane's token.
                        after = weight
                        for step in range(5):
                            lower = cuda.shfl_up_sync(FULL_WARP, after, 1 << step)
                            if lane >= 1 << step:
                                after += lower
                        after += running
                        if after - weight <= target < after:
                            tokens[sample] = int32(v)
                        running = cuda.shfl_sync(FULL_WARP, after, 31)
            if thread == 0:
                is_finite[sample] = 1
        elif thread == 0:
            tokens[sample] = int32(token) if bad == 0 else 0
            is_finite[sample] = int32(bad == 0)

    return sampling
