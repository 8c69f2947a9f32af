"""A row of logits divided among several blocks of threads, and what they leave for each other.

A row is cut into *strips* of 128 ids. A warp takes a strip at a time, four reads of a lane under
way (`long_rows`); the blocks of threads that divide a row are its *splits*, each with a share of
strips side by side:

    ids       │ 0 … 127 │ 128 … │ 256 … │ 384 … │ 512 … │ 640 … │      the last strip is ragged
    split     │ 0                               │ 1             │      shares of four strips
    its warp  │ 0       │ 1     │ 0     │ 1     │ 0     │ 1     │      of two

Splits meet only between launches. What one leaves does not depend on how many there are (a sum of
integers a strip), or it is put together in an operation for which no order counts: the largest key,
sums of integers, a list as a set. So a result does not depend on the number of splits.

A launch has the splits in its grid's first axis and the samples in the second. It is told the share
(how many strips, a multiple of the warps of a block), because to divide takes a thread as long as
to read a strip.
"""

from __future__ import annotations

from dataclasses import dataclass

from numba import cuda, int64, uint32

from kernels.cuda.instructions.atomics import fetch_add_int64
from kernels.cuda.instructions.conversions import FULL_WARP
from kernels.cuda.long_rows import READS
from kernels.cuda.ordered_floats import NO_KEY
from kernels.cuda.plain_variants import WARP_THREADS, SampleVariant
from kernels.cuda.variant import Local, Pointer, Scalar

STRIP = WARP_THREADS * READS
MOST_THREADS = 2048  # of a multiprocessor
LEAST_SPLITS = 32  # where there are strips for them: a lane each for `nth_of_splits`


@dataclass(frozen=True, slots=True)
class SplitVariant(SampleVariant):
    """Some blocks of threads share a sample; the parameter is the number of a block's threads."""

    threads: int = 256

    def split_grid(self, num_samples: int, splits: int) -> tuple[int, int, int]:
        """Return the launch grid."""
        return (splits, num_samples, 1)

    def plan_share(self, num_samples: int, vocab: int, num_multiprocessors: int) -> int:
        """Return how many strips a split has.

        So few that the splits of `largest_logits`, of which the most are at work on a
        multiprocessor, fill the device, at once if possible: a block more than there is room for
        takes as long as all the others. And so few that a row has `LEAST_SPLITS`.
        """
        warps = self.threads // WARP_THREADS
        most_splits = -(-num_strips(vocab) // warps)
        resident = num_multiprocessors * MOST_THREADS // self.threads
        at_once = -(-most_splits // max(resident // max(num_samples, 1), 1))
        return max(min(at_once, (most_splits - 1) // (LEAST_SPLITS - 1)), 1) * warps


def num_strips(vocab: int) -> int:
    """Return how many strips a row has."""
    return -(-vocab // STRIP)


def num_splits(vocab: int, share: int) -> int:
    """Return how many splits a row has."""
    return -(-num_strips(vocab) // share)


@cuda.jit(device=True, inline="always")
def strips_of(vocab: Scalar) -> Scalar:
    """Return `num_strips(vocab)`, on the device."""
    return (vocab + STRIP - 1) // STRIP


@cuda.jit(device=True, inline="always")
def largest_of_splits(keys: Pointer, first: Scalar, splits: Scalar) -> Scalar:
    """Return the largest of keys[first … first + splits − 1]; all lanes of the warp get it."""
    best = int64(NO_KEY)
    for i in range(cuda.threadIdx.x % 32, splits, 32):
        best = max(best, keys[first + i])
    for step in range(5):
        best = max(best, cuda.shfl_xor_sync(FULL_WARP, best, 16 >> step))
    return best


@cuda.jit(device=True, inline="always")
def nth_of_splits(keys: Pointer, first: Scalar, splits: Scalar, n: Scalar) -> Scalar:
    """Return a key that at least `n` of keys[first … first + splits − 1] reach, 0 < n ≤ 32.

    The largest keys of 32 shares of the splits, one a lane, are ranked; of up to 32 splits it is
    the n-th largest. 0 if there are not so many.
    """
    lane = cuda.threadIdx.x % 32
    own = int64(NO_KEY)
    for i in range(lane, splits, 32):
        own = max(own, keys[first + i])
    rank = 0
    for other in range(32):
        if cuda.shfl_sync(FULL_WARP, own, other) > own:
            rank += 1
    found = own if rank == n - 1 and own != NO_KEY else int64(0)
    for step in range(5):
        found = max(found, cuda.shfl_xor_sync(FULL_WARP, found, 16 >> step))
    return found


@cuda.jit(device=True, inline="always")
def append_keys(
    listed: Pointer, first: Scalar, lengths: Pointer, place: Scalar, found: Local
) -> None:
    """Append a warp's keys to the list at listed[first]; its length is lengths[place].

    `found`: int64 [READS] of each lane, `NO_KEY` where there is none. Warps come in any order, so
    the list is a set.
    """
    lane = cuda.threadIdx.x % 32
    count = 0
    for i in range(READS):
        count += cuda.popc(cuda.ballot_sync(FULL_WARP, found[i] != NO_KEY))
    if count > 0:
        begin = int64(0)
        if lane == 0:
            begin = fetch_add_int64(lengths, place, count)
        begin = cuda.shfl_sync(FULL_WARP, begin, 0)
        for i in range(READS):
            is_found = found[i] != NO_KEY
            which = uint32(cuda.ballot_sync(FULL_WARP, is_found))
            if is_found:
                lower = which & ((uint32(1) << uint32(lane)) - uint32(1))
                listed[first + begin + cuda.popc(lower)] = found[i]
            begin += cuda.popc(which)
