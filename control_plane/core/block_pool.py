"""Which KV blocks are free, which may still be found again, and how many tables hold the others.

The pool deals in block ids only; the bytes belong to the compute plane.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from control_plane.core.errors import OutOfBlocksError
from planes.errors import ConfigError, SchedulerError


class BlockPool:
    """The blocks `0 … num_blocks − 1`, each in exactly one state.

    *free*: nobody holds it and nothing in it can be found; in the free list.
    *in use*: reference count = number of block tables that hold it, ≥ 1.
    *idle*: nobody holds it, but its content can be found again (`keep`); in the LRU, from which
    `allocate` takes the longest idle once the free list is empty, telling `evict` its id.

    Every operation costs O(1) per block.
    """

    __slots__ = ("_evict", "_free", "_idle", "_is_kept", "_num_blocks", "_ref_counts")

    def __init__(self, num_blocks: int, evict: Callable[[int], object] | None = None) -> None:
        if isinstance(num_blocks, bool) or not isinstance(num_blocks, int) or num_blocks < 1:
            raise ConfigError(
                f"num_blocks must be an integer of at least 1, got {num_blocks!r}",
                field="num_blocks",
            )
        self._num_blocks = num_blocks
        self._evict = evict
        self._ref_counts = [0] * num_blocks
        self._is_kept = bytearray(num_blocks)
        # A stack: the block freed last is the one most likely still in a cache of the device.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # longest idle first

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return self._num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated: free or idle."""
        return len(self._free) + len(self._idle)

    @property
    def num_idle(self) -> int:
        """Blocks among them whose content can still be found."""
        return len(self._idle)

    @property
    def num_used(self) -> int:
        """Blocks held by at least one block table."""
        return self._num_blocks - len(self._free) - len(self._idle)

    def ref_count(self, block_id: int) -> int:
        """Return how many block tables hold `block_id`; 0 if it is free or idle."""
        return self._ref_counts[block_id]

    def count_used(self, block_ids: Sequence[int]) -> int:
        """Return how many of these blocks are held by a table."""
        counts = list(map(self._ref_counts.__getitem__, block_ids))  # thousands, for some requests
        return len(counts) - counts.count(0)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, free ones first, each with reference count 1.

        All or nothing: raises OutOfBlocksError when fewer can be had.
        """
        free = self._free
        if count > len(free) + len(self._idle):
            raise OutOfBlocksError(
                f"{count} KV blocks wanted, {self.num_free} of {self._num_blocks} are free"
            )
        ref_counts = self._ref_counts
        block_ids = []
        for _ in range(count):
            block_id = free.pop() if free else self._take_idle()
            ref_counts[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def allocate_one(self) -> int:
        """Take one block, like `allocate`."""
        free = self._free
        if free:
            block_id = free.pop()
        elif self._idle:
            block_id = self._take_idle()
        else:
            raise OutOfBlocksError(f"1 KV block wanted, none of {self._num_blocks} is free")
        self._ref_counts[block_id] = 1
        return block_id

    def share(self, block_id: int) -> None:
        """Count one more block table that holds `block_id`, which must be in use or idle."""
        count = self._ref_counts[block_id]
        if count == 0:
            if block_id not in self._idle:
                raise SchedulerError(f"block {block_id} is free and cannot be shared")
            del self._idle[block_id]
        self._ref_counts[block_id] = count + 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Count one block table less for each block; one that nobody holds becomes free or idle.

        All or nothing: raises SchedulerError if a block is free or idle already.
        """
        ref_counts = self._ref_counts
        for done, block_id in enumerate(block_ids):
            if ref_counts[block_id] == 0:
                for undo in block_ids[:done]:
                    ref_counts[undo] += 1
                raise SchedulerError(f"block {block_id} is free already")
            ref_counts[block_id] -= 1
        # Last block first: the free ones are given out again in the same order, and of the idle
        # ones the end of a prefix, which is of no use without its beginning, is evicted first.
        for block_id in reversed(block_ids):
            if ref_counts[block_id] == 0:
                if self._is_kept[block_id]:
                    self._idle[block_id] = None
                else:
                    self._free.append(block_id)

    def keep(self, block_id: int) -> None:
        """Note that the content of a block in use can be found: it becomes idle, not free."""
        if self._ref_counts[block_id] == 0:
            raise SchedulerError(f"block {block_id} is not in use and cannot be kept")
        self._is_kept[block_id] = True

    def drop(self, block_id: int) -> None:
        """Note that the content of a block can be found no more; an idle one becomes free."""
        self._is_kept[block_id] = False
        if block_id in self._idle:
            del self._idle[block_id]
            self._free.append(block_id)

    def check_invariants(self) -> None:
        """Raise SchedulerError unless every block is in exactly one state. O(N), for tests."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise SchedulerError("a block is in the free list twice")
        for block_id, count in enumerate(self._ref_counts):
            is_free, is_idle = block_id in free, block_id in self._idle
            if (is_free + is_idle + (count > 0) != 1) or count < 0:
                raise SchedulerError(
                    f"block {block_id} has reference count {count}, is "
                    f"{'in' if is_free else 'not in'} the free list and "
                    f"{'idle' if is_idle else 'not idle'}"
                )
            if (is_idle and not self._is_kept[block_id]) or (is_free and self._is_kept[block_id]):
                raise SchedulerError(f"block {block_id} is idle or free against what is kept")

    def _take_idle(self) -> int:
        """Evict the block that has been idle longest."""
        block_id, _ = self._idle.popitem(last=False)
        self._is_kept[block_id] = False
        if self._evict is not None:
            self._evict(block_id)
        return block_id
