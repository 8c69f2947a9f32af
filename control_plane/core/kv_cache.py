"""Block tables: which KV blocks hold the tokens of which sequence."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from control_plane.core.block_pool import BlockPool
from planes.errors import ConfigError, SchedulerError


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """Use of the KV block pool at one moment, in blocks."""

    total_blocks: int
    used_blocks: int
    free_blocks: int
    num_sequences: int

    @property
    def utilization(self) -> float:
        """Share of the blocks in use, 0 to 1."""
        return self.used_blocks / self.total_blocks


@runtime_checkable
class KVCacheManagerProtocol(Protocol):
    """What the scheduler needs of a KV cache manager; another one may be given to the engine.

    Calls are all-or-nothing: one that raises has changed nothing.
    """

    @property
    def block_size(self) -> int:
        """Tokens of one block."""
        ...

    def allocate_sequence(self, seq_id: int, num_tokens: int) -> list[int]:
        """Make a block table for a new sequence of `num_tokens`; the ids of its blocks."""
        ...

    def allocate_block(self, seq_id: int) -> int:
        """Append one block to the sequence's table."""
        ...

    def grow_sequence(self, seq_id: int, num_tokens: int) -> list[int]:
        """Append the blocks the sequence lacks to hold `num_tokens`; only the new ids."""
        ...

    def free_sequence(self, seq_id: int) -> None:
        """Drop the sequence's table and its hold on the blocks."""
        ...

    def get_block_table(self, seq_id: int) -> list[int] | None:
        """Return a copy of the sequence's block table; None if it has none."""
        ...

    def get_memory_stats(self) -> MemoryStats:
        """Return the use of the pool."""
        ...

    def can_allocate(self, num_blocks: int) -> bool:
        """Whether `num_blocks` can be allocated now."""
        ...


class KVCacheManager:
    """The block tables of all sequences over one pool.

    Entry i of a sequence's table is the block that holds its tokens `i · block_size` up to
    `(i + 1) · block_size − 1`. Raises OutOfBlocksError when the pool runs dry and SchedulerError
    for a sequence that is unknown or known already.
    """

    __slots__ = ("_block_size", "_pool", "_tables")

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
            raise ConfigError(
                f"block_size must be an integer of at least 1, got {block_size!r}",
                field="block_size",
            )
        self._pool = BlockPool(num_blocks)
        self._block_size = block_size
        self._tables: dict[int, list[int]] = {}

    @property
    def block_size(self) -> int:
        """Tokens of one block."""
        return self._block_size

    def allocate_sequence(self, seq_id: int, num_tokens: int) -> list[int]:
        """Make a block table for a new sequence of `num_tokens`, ≥ 1; the ids of its blocks."""
        if seq_id in self._tables:
            raise SchedulerError(f"sequence {seq_id} has a block table already")
        if num_tokens < 1:
            raise SchedulerError(f"num_tokens must be at least 1, got {num_tokens}")
        block_ids = self._pool.allocate(-(-num_tokens // self._block_size))
        self._tables[seq_id] = block_ids
        return list(block_ids)

    def allocate_block(self, seq_id: int) -> int:
        """Append one block to the sequence's table and return its id."""
        table = self._table(seq_id)
        block_ids = self._pool.allocate(1)
        table.extend(block_ids)
        return block_ids[0]

    def grow_sequence(self, seq_id: int, num_tokens: int) -> list[int]:
        """Append the blocks the sequence lacks to hold `num_tokens`.

        Returns only the new ids: they are all that travels to the compute plane.
        """
        table = self._table(seq_id)
        num_missing = -(-num_tokens // self._block_size) - len(table)
        if num_missing <= 0:
            return []
        block_ids = self._pool.allocate(num_missing)
        table.extend(block_ids)
        return block_ids

    def free_sequence(self, seq_id: int) -> None:
        """Drop the sequence's table and its hold on the blocks."""
        self._pool.release(self._table(seq_id))
        del self._tables[seq_id]

    def get_block_table(self, seq_id: int) -> list[int] | None:
        """Return a copy of the sequence's block table; None if it has none."""
        table = self._tables.get(seq_id)
        return None if table is None else list(table)

    def get_memory_stats(self) -> MemoryStats:
        """Return the use of the pool."""
        pool = self._pool
        return MemoryStats(
            total_blocks=pool.num_blocks,
            used_blocks=pool.num_used,
            free_blocks=pool.num_free,
            num_sequences=len(self._tables),
        )

    def can_allocate(self, num_blocks: int) -> bool:
        """Whether `num_blocks` can be allocated now."""
        return num_blocks <= self._pool.num_free

    def check_invariants(self) -> None:
        """Raise SchedulerError unless tables and pool agree on every block. O(N), for tests."""
        self._pool.check_invariants()
        holders = Counter(block_id for table in self._tables.values() for block_id in table)
        for block_id in range(self._pool.num_blocks):
            if holders[block_id] != self._pool.ref_count(block_id):
                raise SchedulerError(
                    f"block {block_id} is in {holders[block_id]} tables and has reference count "
                    f"{self._pool.ref_count(block_id)}"
                )

    def _table(self, seq_id: int) -> list[int]:
        try:
            return self._tables[seq_id]
        except KeyError:
            raise SchedulerError(f"sequence {seq_id} has no block table") from None
