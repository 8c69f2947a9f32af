"""How the tokens of a row are dealt out in decode attention, so that its bits depend on it alone.

A row's tokens are cut into *tiles* of 16, tiles into at most 64 *chunks*, and the tiles of a chunk
go round among four *sharers*, warps of one block of threads:

    tile        0   1   2   3   4   5   6  …  15 │ 16  17  …          a row of 2048 to 16384 tokens:
    sharer      0   1   2   3   0   1   2  …   3 │  0   1  …          16 tiles, 256 tokens, a chunk
    chunk                     0                  │      1

A sharer runs through its tiles of a chunk in order. The results of the four are merged into the
chunk's in order of the sharers, the chunks' into the row's in order of the chunks. So every sum is
fixed by the row's length. *Who* computes a chunk is free: where a kv head of a row is one block of
threads, that computes all chunks and merges as it goes; where it is split over n blocks, block i
computes the chunks i, i + n, … and leaves each one's result in memory, and the block that finishes
last merges them in the same order by the same instructions (`attention_merge`). Hence the promise:

    A row's bits follow from its query, keys, values and length, from dtype and head size. They do
    not depend on other rows, on the number of splits (nor on the grid or how many multiprocessors
    there are), on which blocks the row has, nor on the block size.

Between kinds of devices they agree as far as tensor cores and special functions do.

With a *window* of W tokens a row of n has the tokens max(0, n - W) … n - 1 alone: its first tile is
the one in which that begins, and the others are counted from there. So chunks follow from what is
seen, and a row's bits from W besides; where W is not less than n they are those without a window.
Nothing before the first tile is read, neither of tables nor of the pool; tokens of that tile that
are before the window have scores of -∞ and weights of exactly 0, whatever they hold.

Chunks of a row longer than 16384 tokens grow, so that there are never more than 64: the memory for
their results and the time to merge them are bounded, and a graph captured for some number of rows
serves whatever lengths come. Those of a row shorter than 2048 tokens shrink, to two tiles a sharer
at the least, so that there are 8: where few rows decode, that is what blocks there are for it, and
the time is that in which a sharer's tiles come one after the other. Not where a pool has 8 bits:
its tiles come in half the time, and merging the sharers twice as often would nearly take what
instructions there is time for where many short rows decode (docs/cuda-kernel-counts.md).

*Waves* of the kernel for 16-bit floats, at D 128 and 8 kv heads: 396 blocks are at work at a time.
128 rows are 1024 blocks, the last 232 of which still are two to a multiprocessor for the most part:
an H200 gave what a copy gets. 64 rows are 512, and it gave 0.87 of that, with or without a window
and for groups of 4 as of 8, where at D 64 all 512 are at work at once and it gave all: the last
116, one to a multiprocessor, a quarter of the work, got three fifths of the bandwidth. To split all
rows would fill that tail, but each chunk's partials of 5 KB, written and read, are 4 to 8 % of its
64 or 128 KB. So some rows are split (`plan_tail`), as many as whole ones do not fill the device
with, here 16 of 64, over three blocks each. They come first in the grid, so that their merges are
over long before the end, and whole rows begin as they end: at a third of the time, not all at once,
and to the end there are enough at work. One row of 32768 tokens has 64 chunks of 512 and is split
over 32 blocks: 256 blocks, two to a multiprocessor, 97 % of them busy, 64 KB in flight, partials
4 %, and the merge.
"""

from __future__ import annotations

from functools import lru_cache

from numba import cuda, float32, int32

from kernels.cuda.variant import DeviceFunction, Scalar, Scalars

TILE_TOKENS = 16
SHARERS = 4
MAX_CHUNKS = 64
CHUNK_TILES = 16
"""Of the chunks of a row that has neither few nor many."""
FEW_CHUNKS = 8
"""A shorter row has as many, which is one round of the merge (two at D 256)."""
LEAST_CHUNK_TILES = 8
"""Of 16 bits and of 32; see `least_chunk_tiles`."""

# The peak before the first score: below any, but finite, so that no difference of peaks is ∞ - ∞.
NO_PEAK = float32(-3.0e38)

# What `plan_splits` reckons with; by argument, not measured. A multiprocessor's share of 4.8 TB/s
# takes 25 KB in flight at 700 ns latency; blocks of threads that merge their warps start no reads.
BYTES_FOR_BANDWIDTH = 48 * 1024
# The fence, the ticket and the merge, in the time that a multiprocessor takes for a tile.
MERGE_COST = 16
# The part of the time that a split must save.
LEAST_GAIN = 0.1
# Blocks of a row that is split for the tail: short rows have no more chunks.
MOST_TAIL_SPLITS = FEW_CHUNKS


def least_chunk_tiles(kv_dtype: str | None) -> int:
    """Return how many tiles a chunk has at the least, in a pool of `kv_dtype`."""
    return LEAST_CHUNK_TILES if kv_dtype is None else CHUNK_TILES


def tiles_of_chunk(num_tiles: int, least_tiles: int) -> int:
    """Return how many tiles a chunk has in a row of `num_tiles`; a multiple of the sharers.

    `least_tiles`: what `least_chunk_tiles` says, here and below.
    """
    of_few = (num_tiles + 4 * FEW_CHUNKS - 1) // (4 * FEW_CHUNKS) * 4
    of_many = (num_tiles + 4 * MAX_CHUNKS - 1) // (4 * MAX_CHUNKS) * 4
    return max(least_tiles, min(CHUNK_TILES, of_few), of_many)


_device_tiles_of_chunk = cuda.jit(device=True, inline="always")(tiles_of_chunk)


def make_cut_row(least_tiles: int, *, has_window: bool) -> DeviceFunction:
    """Return what cuts a row in a kernel: cut_row(seq_len, window).

    It gives the first tile that is read, the one behind the last, and how many a chunk has, int32.
    """

    @cuda.jit(device=True, inline="always")
    def cut_row(seq_len: Scalar, window: Scalar) -> Scalars:
        first_tile = int32(max(seq_len - window, 0) // TILE_TOKENS) if has_window else int32(0)
        end_tile = int32((seq_len + TILE_TOKENS - 1) // TILE_TOKENS)
        chunk_tiles = int32(_device_tiles_of_chunk(end_tile - first_tile, least_tiles))
        return first_tile, end_tile, chunk_tiles

    return cut_row


def most_tokens_read(longest: int, window: int | None) -> int:
    """Return how many tokens of a row of up to `longest` are read, at most, as whole tiles go.

    What holds for a row of so many tokens without a window holds for one with a window.
    """
    return longest if window is None else min(longest, window + TILE_TOKENS - 1)


def num_chunks(num_tokens: int, least_tiles: int) -> int:
    """Return how many chunks a row of `num_tokens` has, 0 to 64."""
    num_tiles = -(-num_tokens // TILE_TOKENS)
    return -(-num_tiles // tiles_of_chunk(num_tiles, least_tiles))


def most_chunks(longest: int, least_tiles: int) -> int:
    """Return how many chunks a row of up to `longest` tokens can have.

    One of less than that may have more than one of just that, if it has few.
    """
    num_tiles = -(-longest // TILE_TOKENS)
    of_few = min(FEW_CHUNKS, -(-num_tiles // least_tiles))
    return max(of_few, min(MAX_CHUNKS, -(-num_tiles // CHUNK_TILES)))


def num_tickets(num_multiprocessors: int) -> int:
    """Return how many blocks a launch may have, unsplit, that `plan_splits` would split.

    Where there are n to a multiprocessor a split saves at most the part 1 / (n + 1) of the time.
    """
    return round((1 / LEAST_GAIN - 1) * num_multiprocessors)


def plan_splits(
    num_rows: int,
    num_kv_heads: int,
    longest: int,
    num_multiprocessors: int,
    least_blocks: int,
    least_tiles: int,
) -> int:
    """Return over how many blocks of threads to split each kv head of each row; 1 needs no merge.

    `longest` is the number of tokens of the longest row there may be; `least_blocks` must be at
    work on a multiprocessor for its share of the memory's bandwidth. The answer is about time
    alone, never about bits, so a graph may be captured with that for its number of rows and the
    longest context allowed: blocks that find no chunk end at once.

    See `_fewest_splits`; it depends on lengths by their numbers of chunks alone.
    """
    blocks = num_rows * num_kv_heads
    if blocks == 0 or longest == 0 or blocks > num_tickets(num_multiprocessors):
        return 1
    lengths = [longest >> halved for halved in range(longest.bit_length())]
    chunks = tuple(num_chunks(length, least_tiles) for length in lengths)
    merge_cost = MERGE_COST / tiles_of_chunk(-(-longest // TILE_TOKENS), least_tiles)
    return _fewest_splits(blocks, chunks, merge_cost, num_multiprocessors, least_blocks)


@lru_cache(maxsize=4096)  # asked for in each layer of a step that no graph holds
def _fewest_splits(
    blocks: int,
    chunks_of_lengths: tuple[int, ...],
    merge_cost: float,
    num_multiprocessors: int,
    least_blocks: int,
) -> int:
    """Return over how many to split each of so many blocks.

    `chunks_of_lengths`: of the longest row, one half as long, and so on. `merge_cost`: of a merge,
    in chunks of the longest.

    The time of a memory-bound kernel is that of its busiest multiprocessor: its blocks that have
    work times a block's chunks. The fewest splits are taken that come close to the least time
    there is for the longest rows, for rows half as long, and so on; and only if they save enough to
    pay for the merge. The very least, of the longest alone, is often one chunk a block, which of a
    graph's rows, mostly far shorter, would leave nearly all blocks empty; these are not free.
    """

    def cost(splits: int, chunks: int) -> int:
        working = blocks * min(splits, chunks)
        busiest = max(-(-working // num_multiprocessors), least_blocks)
        return busiest * -(-chunks // splits)

    counts = sorted(set(chunks_of_lengths))
    least = [min(cost(splits, count) for splits in range(1, count + 1)) for count in counts]

    def loss(splits: int) -> float:
        times = zip(counts, least, strict=True)
        return max(cost(splits, count) / best for count, best in times)

    longest = chunks_of_lengths[0]
    losses = [loss(splits) for splits in range(1, longest + 1)]
    close = min(losses) / (1 - LEAST_GAIN)
    fewest = next(splits for splits, lost in enumerate(losses, 1) if lost <= close)
    saves = cost(fewest, longest) + merge_cost <= (1 - LEAST_GAIN) * cost(1, longest)
    return fewest if saves else 1


def plan_tail(
    num_rows: int,
    num_units: int,
    longest: int,
    num_multiprocessors: int,
    resident_blocks: int,
    least_blocks: int,
    least_tiles: int = CHUNK_TILES,
) -> tuple[int, int]:
    """Return over how many blocks of threads to split each unit of how many rows; (1, 0) is none.

    It leaves a multiple of the first number of rows whole. `resident_blocks` are at work on a
    multiprocessor at a time, `least_blocks` and `least_tiles` as in `plan_splits`, which is for
    launches that are at work all at once; the answer is about time alone, too.

    In the time that the memory takes for one block's share, the last wave takes as long as there
    are blocks in it, and no less than `least_blocks` would of each multiprocessor: fewer have not
    its bandwidth. So many blocks are made of it, at the least.
    """
    resident, needed = (n * num_multiprocessors for n in (resident_blocks, least_blocks))
    blocks = num_rows * num_units
    waves, rest = divmod(blocks, resident)
    if longest == 0 or waves == 0 or rest == 0:
        return 1, 0
    unsplit = waves * resident + max(rest, needed)
    splits = min(-(-needed // rest), MOST_TAIL_SPLITS, most_chunks(longest, least_tiles))
    if splits == 1:
        return 1, 0
    split_rows = num_rows - waves * resident // num_units // splits * splits
    saves = blocks <= (1 - LEAST_GAIN) * unsplit
    return (splits, split_rows) if saves and split_rows * num_units <= resident else (1, 0)
