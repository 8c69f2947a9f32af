"""What top-k, top-p and min-p keep of a row of integer weights: all keys from a *cut* on.

A token's key orders the row: by weight, equals by id, the lowest first. No two are equal, so that
what is kept is always all keys from one number on:

    key   0 │ 41 bits: the weight │ 22 bits that fall with the token id

Nothing is sorted. The cut is found from the top, first in *bins* of a quarter of a power of two:

    bin         160 159 158 …  0     the sums of counts and weights are walked from the left until
    count         1   0   3 … 907    the wanted count (top-k) or sum (top-p) is reached
                          ▲ the cut is one of these three

The tokens of the bins in which it may be, the *open* ones, are listed (`sampling_shortlist`), and
the list is searched digit by digit, seven bits at a time; a key takes part only while its higher
digits are those of the cut:

    next digit  127 126 … 0          which is the cut's?   and so on until one key is left

Histograms are filled by atomic additions of integers: exact in any order. The functions are for a
whole block of threads or for each whole warp, as they say; all their threads must call them.
"""

from __future__ import annotations

from numba import cuda, float64, int32, int64, uint32

from kernels.cuda.exact_exponential import WEIGHT_ONE
from kernels.cuda.instructions.atomics import add_int32, add_shared_int64
from kernels.cuda.instructions.conversions import FULL_WARP
from kernels.cuda.instructions.exact_float64 import multiply_float64
from kernels.cuda.lanes import sum_up_to_lane
from kernels.cuda.long_rows import READS, read_ahead
from kernels.cuda.variant import Pointer, Scalar, Scalars

ID_BITS = 22
LAST_ID = (1 << ID_BITS) - 1
MAX_VOCAB = 1 << ID_BITS
ALL_KEYS = int64(1 << ID_BITS)  # the cut that keeps whatever weighs something

BINS = 192  # of a row: up to the one of the weight 2^40, and whole warps of them
LAST_BIN = 160
DIGIT_BITS = 7
DIGITS = 1 << DIGIT_BITS

# What the splits of a row leave for each other, int64 each: counts and sums of its bins, the
# sum of all, the length of its list, and what `find_open` has found.
SUM_OF_BIN = BINS
TOTAL = 2 * BINS
LISTED = TOTAL + 1
OPEN = TOTAL + 2
ROW_BINS = OPEN + 6

ANY_SUM = -1.0  # wanted where the count decides


@cuda.jit(device=True, inline="always")
def weight_key(weight: Scalar, token: Scalar) -> Scalar:
    """Return the key of a token."""
    return (weight << ID_BITS) | (LAST_ID - token)


@cuda.jit(device=True, inline="always")
def token_of_weight_key(key: Scalar) -> Scalar:
    """Return the token id of a key."""
    return LAST_ID - (key & LAST_ID)


@cuda.jit(device=True, inline="always")
def has_cut(top_k: Scalar, top_p: Scalar, vocab: Scalar) -> Scalar:
    """Return whether a sample's cut has to be searched for."""
    return 0 < top_k < vocab or top_p < 1.0


@cuda.jit(device=True, inline="always")
def least_weight(min_p: Scalar) -> Scalar:
    """Return the smallest weight that min-p keeps, at least 1."""
    least = multiply_float64(min_p, WEIGHT_ONE)
    weight = int64(least)
    if float64(weight) < least:
        weight += 1
    return max(weight, int64(1))


@cuda.jit(device=True, inline="always")
def bin_of(weight: Scalar) -> Scalar:
    """Return the bin of a positive weight: its power of two, and the two bits below."""
    power = int64(63 - cuda.clz(weight))
    return (power << 2) | (((weight << 2) >> power) & 3)


@cuda.jit(device=True, inline="always")
def first_weight(number: Scalar) -> Scalar:
    """Return the smallest weight in bin `number` or above."""
    return (((4 + (number & 3)) << (number >> 2)) + 3) >> 2


@cuda.jit(device=True, inline="always")
def find_bin(
    above: Scalar,
    sum_above: Scalar,
    wanted_count: Scalar,
    wanted_sum: Scalar,
    highest: Scalar,
    counts: Pointer,
    first_count: Scalar,
    sums: Pointer,
    first_sum: Scalar,
) -> Scalars:
    """Return (bin, above, sum above, count, sum): the largest bin down to which is enough.

    Wanted are `wanted_count` tokens (0: any) and the sum `wanted_sum` (`ANY_SUM`). `above` tokens
    of `sum_above` are known to be above bin `highest`, the first to be looked at; returned is what
    is above the bin, and what is in it. The bin is -1 if all together are not enough.

    For a whole warp, which gets the result: a bin a lane, and the next 32 if that was not enough.
    `counts[first_count + i]`, `sums[first_sum + i]`: of bin i.
    """
    lane = int64(cuda.threadIdx.x % 32)
    number, count, total = int64(-1), int64(0), int64(0)
    while number < 0 and highest >= 0:
        mine, sum_of_mine = int64(0), int64(0)
        if lane <= highest:
            mine = int64(counts[first_count + highest - lane])
            sum_of_mine = sums[first_sum + highest - lane]
        after = above + sum_up_to_lane(mine)
        sum_after = sum_above + sum_up_to_lane(sum_of_mine)
        is_enough = after >= wanted_count and float64(sum_after) >= wanted_sum
        enough = int64(uint32(cuda.ballot_sync(FULL_WARP, is_enough)))
        last = int64(31)
        if enough != 0:
            last = 63 - cuda.clz(enough & -enough)  # the first that has enough
            number = highest - last
            count = cuda.shfl_sync(FULL_WARP, mine, last)
            total = cuda.shfl_sync(FULL_WARP, sum_of_mine, last)
        above = cuda.shfl_sync(FULL_WARP, after, last) - count
        sum_above = cuda.shfl_sync(FULL_WARP, sum_after, last) - total
        highest -= 32
    return number, above, sum_above, count, total


@cuda.jit(device=True, inline="always")
def find_open(bins: Pointer, first: Scalar, top_k: Scalar, top_p: Scalar, vocab: Scalar) -> Scalars:
    """Return (low, high, above, sum above, is counted, total): in which bins the cut may be.

    It is in the bins from `low` to `high`; what is above `high` is kept for certain. If `is
    counted`, top-k cuts, at a token in bin `low`; else `total` weighs the whole row. -1 for both
    bins: nothing is cut. For a whole warp. `bins[first + …]`: what the splits added up.

    The total that top-p is a share of is known only when top-k's cut is. It is no less than what is
    above top-k's bin, so that its cut is no higher than the bin where that one's share is reached.
    """
    low, high, above, sum_above = int64(-1), int64(-1), int64(0), int64(0)
    total, is_counted = bins[first + TOTAL], False
    for is_nucleus in (False, True):
        wanted_count, wanted_sum = top_k, float64(ANY_SUM)
        is_on = 0 < top_k < vocab
        if is_nucleus:
            wanted_count, wanted_sum = int64(0), multiply_float64(top_p, float64(total))
            is_on = top_p < 1.0
        if is_on:
            high, above, sum_above, _, _ = find_bin(
                int64(0), int64(0), wanted_count, wanted_sum, int64(LAST_BIN),
                bins, first, bins, first + SUM_OF_BIN,
            )  # fmt: skip
            if not is_nucleus:
                low, total = high, sum_above
                is_counted = low >= 0
            elif not is_counted:
                low = high
    return low, high, above, sum_above, is_counted, total


@cuda.jit(device=True, inline="always")
def count_digits(
    listed: Pointer,
    first: Scalar,
    length: Scalar,
    prefix: Scalar,
    shift: Scalar,
    bits: Scalar,
    counts: Pointer,
    sums: Pointer,
) -> None:
    """Fill the histograms of the next digit of the listed keys whose digits above are `prefix`.

    The digit is the `bits` bits below `shift`. For a whole block. `listed[first … first + length -
    1]`: keys; `counts`, `sums`: shared, int32 and int64 [DIGITS].
    """
    cuda.syncthreads()  # the last search in the histograms is over
    for i in range(cuda.threadIdx.x, DIGITS, cuda.blockDim.x):
        counts[i] = int32(0)
        sums[i] = int64(0)
    cuda.syncthreads()
    keys = cuda.local.array(READS, int64)
    for begin in range(cuda.threadIdx.x, length, READS * cuda.blockDim.x):
        read_ahead(keys, listed, first, begin, cuda.blockDim.x, length)
        for i in range(READS):
            if begin + i * cuda.blockDim.x < length and keys[i] >> shift == prefix:
                digit = (keys[i] >> (shift - bits)) & ((1 << bits) - 1)
                add_int32(counts, digit, 1)
                add_shared_int64(sums, digit, keys[i] >> ID_BITS)
    cuda.syncthreads()


@cuda.jit(device=True, inline="always")
def find_cut(
    listed: Pointer,
    first: Scalar,
    length: Scalar,
    low: Scalar,
    high: Scalar,
    above: Scalar,
    sum_above: Scalar,
    wanted_count: Scalar,
    wanted_sum: Scalar,
    counts: Pointer,
    sums: Pointer,
) -> Scalars:
    """Return (cut, sum of what it keeps): the largest cut that keeps what is wanted.

    The list holds the keys of the bins from `low` to `high`, where the cut is; `above` tokens of
    `sum_above` are above them. For a whole block. `counts`, `sums` as in `count_digits`.
    """
    # The digits that all keys of these bins share are known.
    lowest = first_weight(low) << ID_BITS
    highest = (first_weight(min(high, int64(LAST_BIN)) + 1) << ID_BITS) - 1
    shift = int64(64 - cuda.clz(lowest ^ highest))
    prefix = lowest >> shift
    count, total = int64(2), int64(0)  # more than one, until they are counted
    while count > 1 and shift > 0:
        bits = min(shift, int64(DIGIT_BITS))
        count_digits(listed, first, length, prefix, shift, bits, counts, sums)
        digit, above, sum_above, count, total = find_bin(
            above, sum_above, wanted_count, wanted_sum, int64(DIGITS - 1), counts, 0, sums, 0
        )
        prefix, shift = (prefix << bits) | digit, shift - bits
    # One key is left, and no other has these digits.
    return prefix << shift, sum_above + total
