"""What top-k, top-p and min-p keep of a row of integer weights, and the token a number picks.

Device functions for a whole block of threads: every thread must call them, and all get the same
result. Nothing is sorted. What is kept is a threshold T, with how many of the tokens that weigh
exactly T, the first of them by id: a prefix of the order by weight, equals by id.

T is found digit by digit from the top: first the length of the weight in bits, which spreads a
softmax's weights well, then eight bits at a time; a weight takes part only while its higher digits
are those of T:

    length      41 40 39 … 1             the histogram of counts and sums is walked from the left
    count        1  0  3 … 907           until the wanted count (top-k) or sum (top-p) is reached
                       ▲ T has 39 bits

    next digit  ff fe fd … 00   of the three: which is T's?   and so on down to the last bit

The histograms are filled by atomic additions of integers in shared memory: exact in any order.
"""

from __future__ import annotations

from numba import cuda, float64, int32, int64, uint32

from kernels.cuda.exact_exponential import WEIGHT_ONE
from kernels.cuda.instructions.atomics import add_int32, add_shared_int64
from kernels.cuda.instructions.conversions import FULL_WARP
from kernels.cuda.instructions.exact_float64 import multiply_float64
from kernels.cuda.lanes import warp_sum
from kernels.cuda.long_rows import READS, read_ahead
from kernels.cuda.variant import Pointer, Scalar, Scalars

DIGIT_BITS = 8
BINS = 1 << DIGIT_BITS  # the lengths of weights, up to 41, take the lowest of them
BINS_OF_LANE = BINS // 32
ALL = int64(1 << 62)  # more tokens than there can be


@cuda.jit(device=True, inline="always")
def count_digits(
    weights: Pointer,
    first: Scalar,
    vocab: Scalar,
    prefix: Scalar,
    shift: Scalar,
    bits: Scalar,
    counts: Pointer,
    sums: Pointer,
) -> None:
    """Fill the histograms of the next digit of the weights whose digits above are `prefix`.

    The digit is `bits` bits below `shift`; a negative `shift` means the length. Weights of 0 never
    count. `weights[first … first + vocab - 1]`; `counts`, `sums`: shared, int32 and int64 [BINS].
    """
    for i in range(cuda.threadIdx.x, BINS, cuda.blockDim.x):
        counts[i] = int32(0)
        sums[i] = int64(0)
    cuda.syncthreads()
    numbers = cuda.local.array(READS, int64)
    for begin in range(cuda.threadIdx.x, vocab, READS * cuda.blockDim.x):
        read_ahead(numbers, weights, first, begin, cuda.blockDim.x, vocab)
        for i in range(READS):
            weight = numbers[i]
            if shift < 0:
                digit = int64(64 - cuda.clz(weight))
                takes_part = weight > 0
            else:
                digit = (weight >> (shift - bits)) & ((1 << bits) - 1)
                takes_part = weight >> shift == prefix
            if takes_part and begin + i * cuda.blockDim.x < vocab:
                add_int32(counts, digit, 1)
                add_shared_int64(sums, digit, weight)
    cuda.syncthreads()


@cuda.jit(device=True, inline="always")
def is_enough(count: Scalar, total: Scalar, wanted_count: Scalar, wanted_sum: Scalar) -> Scalar:
    """Return whether a prefix of `count` tokens that weigh `total` is what is wanted."""
    if wanted_count > 0:
        return count >= wanted_count
    return float64(total) >= wanted_sum


@cuda.jit(device=True, inline="always")
def find_digit(
    above: Scalar,
    sum_above: Scalar,
    wanted_count: Scalar,
    wanted_sum: Scalar,
    counts: Pointer,
    sums: Pointer,
    found: Pointer,
) -> Scalars:
    """Return (digit, above, sum above, equal): the largest digit down to which bins are enough.

    `above` tokens of `sum_above` are known to weigh more than all in the bins. The digit is -1 if
    all bins together are not enough. The first warp searches: lane l adds up bins 255 - 8·l down to
    248 - 8·l, the lanes add up theirs from the top, and the lane in which it becomes enough looks
    through its eight. `found`: shared int64 [4].
    """
    lane = cuda.threadIdx.x
    if lane < 32:
        highest = BINS - 1 - lane * BINS_OF_LANE
        count, total = int64(0), int64(0)
        for i in range(BINS_OF_LANE):
            count += counts[highest - i]
            total += sums[highest - i]
        # Before this lane's bins, and after them.
        count_after, total_after = count, total
        for step in range(5):
            lower_count = cuda.shfl_up_sync(FULL_WARP, count_after, 1 << step)
            lower_total = cuda.shfl_up_sync(FULL_WARP, total_after, 1 << step)
            if lane >= 1 << step:
                count_after += lower_count
                total_after += lower_total
        count_after += above
        total_after += sum_above
        above, sum_above = count_after - count, total_after - total
        is_here = is_enough(count_after, total_after, wanted_count, wanted_sum)
        is_before = is_enough(above, sum_above, wanted_count, wanted_sum)
        # Nothing above is enough: a sum of 0 could be, but then no step would have been needed.
        if is_here and (lane == 0 or not is_before):
            digit = highest + 1
            is_found = False
            for _ in range(BINS_OF_LANE):
                if not is_found:
                    digit -= 1
                    count, total = int64(counts[digit]), sums[digit]
                    is_found = is_enough(above + count, sum_above + total, wanted_count, wanted_sum)
                    if not is_found:
                        above += count
                        sum_above += total
            found[0], found[1], found[2], found[3] = digit, above, sum_above, count
        elif lane == 31 and not is_here:
            found[0], found[1], found[2], found[3] = -1, count_after, total_after, 0
    cuda.syncthreads()
    return found[0], found[1], found[2], found[3]


@cuda.jit(device=True, inline="always")
def find_prefix(
    weights: Pointer,
    first: Scalar,
    vocab: Scalar,
    wanted_count: Scalar,
    wanted_sum: Scalar,
    counts: Pointer,
    sums: Pointer,
    found: Pointer,
) -> Scalars:
    """Return (threshold, ties, sum) of the shortest prefix that has a count or a sum.

    The prefix reaches `wanted_count` tokens or, if that is 0, the positive sum `wanted_sum`, as
    float64. If no prefix does, everything is kept: threshold 1, ties ALL.
    """
    above, sum_above, equal = int64(0), int64(0), int64(0)
    prefix, shift = int64(1), int64(-1)  # the length is not known yet
    digit = int64(0)
    while shift != 0 and digit >= 0:
        bits = min(shift, int64(DIGIT_BITS))
        count_digits(weights, first, vocab, prefix, shift, bits, counts, sums)
        digit, above, sum_above, equal = find_digit(
            above, sum_above, wanted_count, wanted_sum, counts, sums, found
        )
        if shift < 0:
            shift = digit - 1
        else:
            prefix, shift = (prefix << bits) | digit, shift - bits

    threshold, ties = int64(1), ALL
    if digit >= 0:
        # Of the `equal` tokens that weigh T = prefix, the fewest that are enough.
        fewest, most = int64(1), equal
        while fewest < most:
            middle = (fewest + most) // 2
            total = sum_above + middle * prefix
            if is_enough(above + middle, total, wanted_count, wanted_sum):
                most = middle
            else:
                fewest = middle + 1
        threshold = prefix
        ties = ALL if fewest == equal else fewest
        sum_above += fewest * prefix
    return threshold, ties, sum_above


@cuda.jit(device=True, inline="always")
def find_kept(
    weights: Pointer,
    first: Scalar,
    vocab: Scalar,
    total: Scalar,
    top_k: Scalar,
    top_p: Scalar,
    min_p: Scalar,
    counts: Pointer,
    sums: Pointer,
    found: Pointer,
) -> Scalars:
    """Return (threshold, ties) of what top-k, then top-p, then min-p keep; `total` of all weights.

    All three keep prefixes of one order, so that each only shortens the one before.
    """
    threshold, ties = int64(1), ALL
    for is_nucleus in (False, True):
        wanted_count, wanted_sum = top_k, float64(0)
        is_on = 0 < top_k < vocab
        if is_nucleus:
            wanted_count, wanted_sum = int64(0), multiply_float64(top_p, float64(total))
            is_on = top_p < 1.0
        if is_on:
            lowest, equal, total = find_prefix(
                weights, first, vocab, wanted_count, wanted_sum, counts, sums, found
            )
            if lowest > threshold or (lowest == threshold and equal < ties):
                threshold, ties = lowest, equal
    least = multiply_float64(min_p, WEIGHT_ONE)
    likely = int64(least)
    if float64(likely) < least:
        likely += 1
    if likely > threshold:
        threshold, ties = likely, ALL
    return threshold, ties


@cuda.jit(device=True, inline="always")
def count_ties(
    weights: Pointer,
    first: Scalar,
    begin: Scalar,
    end: Scalar,
    threshold: Scalar,
    of_warps: Pointer,
) -> Scalar:
    """Return how many tokens before `begin` weigh `threshold`.

    Warp w takes the ids from its `begin` to its `end`; the stretches follow each other.
    """
    ties = int64(0)
    numbers = cuda.local.array(READS, int64)
    for v in range(begin + cuda.threadIdx.x % 32, end, READS * 32):
        read_ahead(numbers, weights, first, v, 32, end)
        for i in range(READS):
            if v + 32 * i < end and numbers[i] == threshold:
                ties += 1
    ties = warp_sum(ties)
    if cuda.threadIdx.x % 32 == 0:
        of_warps[cuda.threadIdx.x // 32] = ties
    cuda.syncthreads()
    before = int64(0)
    for warp in range(cuda.threadIdx.x // 32):
        before += of_warps[warp]
    cuda.syncthreads()
    return before


@cuda.jit(device=True, inline="always")
def kept_weight(weight: Scalar, threshold: Scalar, ties: Scalar, seen: Scalar) -> Scalars:
    """Return this lane's weight if its token is kept, else 0; and the ties the warp has seen.

    The lanes hold neighbouring ids; `seen` is how many tokens before them weigh `threshold`, which
    is above 0.
    """
    is_tie = weight == threshold
    tied = uint32(cuda.ballot_sync(FULL_WARP, is_tie))
    lower_lanes = (uint32(1) << uint32(cuda.threadIdx.x % 32)) - uint32(1)
    if weight < threshold or (is_tie and seen + cuda.popc(tied & lower_lanes) >= ties):
        weight = int64(0)
    return weight, seen + cuda.popc(tied)
