"""Finding the smallest weight that is kept, without sorting: top-k, top-p and min-p.

All three keep a prefix of the tokens ordered by weight, equals by id; specification:
`kernels.reference.sampling`. A prefix is a *threshold* and a number of *ties*: kept are all weights
above the threshold, and of those equal to it the first so many in order of id. The threshold is
found by bisection on its value. A pass over the weights skips every block whose largest weight is
too small; once few weights are left between the bounds, they are set apart.

The weights of one row of V tokens lie in scratch memory, in n = ceil(V / BLOCK) blocks, filled up
with weights of 0. `Weights` says where; all addresses:

    weights int64 [BLOCK · n], largest of each block int64 [n, filled up with 0 to whole blocks],
    totals int64 [n], candidates int64 [NUM_CANDIDATES + BLOCK]
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from kernels.cpu.compiled import word
from kernels.cpu.memory_words import unfused, write_int64
from kernels.cpu.sample_record import BLOCK, NUM_CANDIDATES
from kernels.cpu.sampling_tile import COUNT_SHIFT, in_block
from kernels.reference.sampling import WEIGHT_ONE

LARGEST_WEIGHT: Final = int(WEIGHT_ONE)
NO_LIMIT: Final = 1 << 62
"""Above every weight."""
ALL: Final = 1 << 62
"""Number of ties where none is left out."""
COUNT_ONE: Final = 1 << COUNT_SHIFT
BLOCK_BYTES: Final = 8 * BLOCK


class Weights(NamedTuple):
    """Where a row's weights lie."""

    first: int
    largest: int
    totals: int
    candidates: int
    num_blocks: int


class Bounds(NamedTuple):
    """What is known of a threshold: low ≤ threshold < high.

    `num_within`: weights from low to high − 1. `sum_above`, `num_above`: weights ≥ high.
    """

    low: int
    high: int
    num_within: int
    sum_above: int
    num_above: int


class Prefix(NamedTuple):
    """The tokens kept, and the sum of their weights."""

    threshold: int
    ties: int
    total: int


@unfused
def measure(first: int, largest: int, num_blocks: int, low: int, high: int) -> tuple[int, int]:
    """Return the sum and the number of the weights from low to high − 1 in some blocks.

    `largest`: of each block, so that it can be skipped; 0: not known.
    """
    total, count = 0, 0
    for block in range(num_blocks):
        if largest == 0 or word(largest, block) >= low:
            both = in_block(first + BLOCK_BYTES * block, low, high)
            total += both & (COUNT_ONE - 1)
            count += both >> COUNT_SHIFT
    return total, count


@unfused
def narrow(
    first: int,
    largest: int,
    num_blocks: int,
    bounds: Bounds,
    wanted: float,
    is_count: bool,
    enough: int,
) -> Bounds:
    """Move the bounds closer until they are closed or at most `enough` weights lie within.

    The blocks hold all weights within the bounds.
    """
    low, high, num_within, sum_above, num_above = bounds
    while high - low > 1 and num_within > enough:
        middle = (low + high) // 2
        if high > 2 * low:  # far apart: halfway between their logarithms
            middle = int(math.sqrt(float(low) * float(high)))
            middle = min(max(middle, low + 1), high - 1)
        total, count = measure(first, largest, num_blocks, middle, high)
        if float(num_above + count if is_count else sum_above + total) >= wanted:
            low = middle
            num_within = count
        else:
            high = middle
            num_within -= count
            sum_above += total
            num_above += count
    return Bounds(low, high, num_within, sum_above, num_above)


@unfused
def set_apart(weights: Weights, low: int, high: int) -> int:
    """Copy the weights from low to high − 1 to the candidates; return how many blocks they fill."""
    count = 0
    for block in range(weights.num_blocks):
        if word(weights.largest, block) >= low:
            first = weights.first + BLOCK_BYTES * block
            if in_block(first, low, high):
                for i in range(BLOCK):
                    weight = word(first, i)
                    write_int64(weights.candidates, count, weight)
                    count += low <= weight < high
    num_blocks = (count + BLOCK - 1) // BLOCK
    for i in range(count, BLOCK * num_blocks):
        write_int64(weights.candidates, i, 0)
    return num_blocks


@unfused
def find_threshold(weights: Weights, low: int, wanted: float, is_count: bool) -> Bounds:
    """Return the largest threshold t for which the weights ≥ t reach what is wanted, as its bounds.

    What is wanted is a sum (in float64) or a number. The weights ≥ `low` ≥ 1 are known to reach it.
    """
    first, largest, _, candidates, num_blocks = weights
    high = LARGEST_WEIGHT + 1
    _, num_within = measure(first, largest, num_blocks, low, high)
    bounds = Bounds(low, high, num_within, 0, 0)
    bounds = narrow(first, largest, num_blocks, bounds, wanted, is_count, NUM_CANDIDATES)
    if bounds.high - bounds.low > 1:
        filled = set_apart(weights, bounds.low, bounds.high)
        bounds = narrow(candidates, 0, filled, bounds, wanted, is_count, 0)
    return bounds


@unfused
def keep_first(weights: Weights, total: int, top_k: int) -> Prefix:
    """Keep the `top_k` ≥ 1 largest weights; `total` is the sum of all."""
    low, num_blocks = 0, weights.num_blocks
    if top_k <= num_blocks:
        # The k-th largest of the blocks' largest: k weights are at least that.
        everything = Bounds(0, LARGEST_WEIGHT + 1, num_blocks, 0, 0)
        filled = (num_blocks + BLOCK - 1) // BLOCK
        low = narrow(weights.largest, 0, filled, everything, float(top_k), True, 0).low
    if low == 0:
        low = 1
        if measure(weights.first, weights.largest, num_blocks, 1, NO_LIMIT)[1] <= top_k:
            return Prefix(1, ALL, total)
    found = find_threshold(weights, low, float(top_k), True)
    ties = top_k - found.num_above
    return Prefix(found.low, ties, found.sum_above + ties * found.low)


@unfused
def keep_nucleus(weights: Weights, prefix: Prefix, top_p: float) -> Prefix:
    """Keep the shortest prefix whose weights reach top_p < 1 of the total."""
    wanted = top_p * float(prefix.total)
    # All weights below this, however many, are less than half of what may be missing.
    rest = float(prefix.total) - wanted
    low = max(prefix.threshold, int(rest / float(2 * BLOCK * weights.num_blocks)))
    found = find_threshold(weights, low, wanted, False)
    fewest, most = 1, min(found.num_within, prefix.ties if found.low == prefix.threshold else ALL)
    while fewest < most:
        ties = (fewest + most) // 2
        if float(found.sum_above + ties * found.low) >= wanted:
            most = ties
        else:
            fewest = ties + 1
    return Prefix(found.low, most, found.sum_above + most * found.low)


@unfused
def keep_likely(weights: Weights, prefix: Prefix, min_p: float) -> Prefix:
    """Keep the tokens at least min_p times as likely as the best one."""
    threshold = math.ceil(min_p * WEIGHT_ONE)
    if threshold <= prefix.threshold:
        return prefix
    total, _ = measure(weights.first, weights.largest, weights.num_blocks, threshold, NO_LIMIT)
    return Prefix(threshold, ALL, total)


@unfused
def pick(weights: Weights, prefix: Prefix, target: int) -> int:
    """Return the first kept token, in order of id, at which the running sum exceeds the target."""
    threshold, ties, _ = prefix
    running = 0
    for block in range(weights.num_blocks):
        if word(weights.largest, block) < threshold:
            continue
        first = weights.first + BLOCK_BYTES * block
        num_tied = in_block(first, threshold, threshold + 1) >> COUNT_SHIFT
        num_kept = min(num_tied, ties)
        above = in_block(first, threshold + 1, NO_LIMIT) & (COUNT_ONE - 1)
        if running + above + num_kept * threshold <= target:
            running += above + num_kept * threshold
            ties -= num_kept
            continue
        for i in range(BLOCK):
            weight = word(first, i)
            if weight == threshold and ties > 0:
                ties -= 1
                running += weight
            elif weight > threshold:
                running += weight
            if running > target:
                return BLOCK * block + i
    return -1
