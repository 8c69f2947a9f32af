"""Which KV blocks are free and how many block tables hold each of the others.

The pool deals in block ids only; the bytes belong to the compute plane.
"""

from __future__ import annotations

from collections.abc import Sequence

from control_plane.core.errors import OutOfBlocksError
from planes.errors import ConfigError, SchedulerError


class BlockPool:
    """The blocks `0 … num_blocks − 1`, each in exactly one state.

    *free*: in the free list, reference count 0.
    *in use*: reference count = number of block tables that hold it, ≥ 1.

    Every operation costs O(1) per block. A prefix cache adds a third state, idle-cached (no table
    holds the block, but its content may be found again): such a block leaves `release` for an LRU
    instead of the free list, and `allocate` evicts from there once the free list is empty.
    """

    __slots__ = ("_free", "_num_blocks", "_ref_counts")

    def __init__(self, num_blocks: int) -> None:
        if isinstance(num_blocks, bool) or not isinstance(num_blocks, int) or num_blocks < 1:
            raise ConfigError(
                f"num_blocks must be an integer of at least 1, got {num_blocks!r}",
                field="num_blocks",
            )
        self._num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        # A stack: the block freed last is the one most likely still in a cache of the device.
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return self._num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks held by at least one block table."""
        return self._num_blocks - len(self._free)

    def ref_count(self, block_id: int) -> int:
        """Return how many block tables hold `block_id`; 0 if it is free."""
        return self._ref_counts[block_id]

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, each with reference count 1.

        All or nothing: raises OutOfBlocksError when fewer are free.
        """
        free = self._free
        if count > len(free):
            raise OutOfBlocksError(
                f"{count} KV blocks wanted, {len(free)} of {self._num_blocks} are free"
            )
        ref_counts = self._ref_counts
        block_ids = []
        for _ in range(count):
            block_id = free.pop()
            ref_counts[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def share(self, block_id: int) -> None:
        """Count one more block table that holds `block_id`, which must be in use."""
        if self._ref_counts[block_id] == 0:
            raise SchedulerError(f"block {block_id} is free and cannot be shared")
        self._ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Count one block table less for each block; a block nobody holds becomes free.

        All or nothing: raises SchedulerError if a block is free already.
        """
        ref_counts = self._ref_counts
        for done, block_id in enumerate(block_ids):
            if ref_counts[block_id] == 0:
                for undo in block_ids[:done]:
                    ref_counts[undo] += 1
                raise SchedulerError(f"block {block_id} is free already")
            ref_counts[block_id] -= 1
        # Last block first, so that the next table gets them back in the same order.
        self._free.extend(b for b in reversed(block_ids) if ref_counts[b] == 0)

    def check_invariants(self) -> None:
        """Raise SchedulerError unless every block is in exactly one state. O(N), for tests."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise SchedulerError("a block is in the free list twice")
        for block_id, count in enumerate(self._ref_counts):
            if count < 0 or (count == 0) != (block_id in free):
                raise SchedulerError(
                    f"block {block_id} has reference count {count} and is "
                    f"{'in' if block_id in free else 'not in'} the free list"
                )
