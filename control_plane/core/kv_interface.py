"""What the scheduler asks of a KV cache manager. Another one may be given to the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from control_plane.core.prefix_cache import TokenChain


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """Use of the KV block pool at one moment, in blocks.

    `free_blocks` can be allocated; `cached_blocks` of them still hold tokens that a new request may
    find. `internal_fragmentation`: share of the token places in tables that hold no token, 0 to 1;
    only the scheduler knows it, and the host pool; a manager alone says 0.
    """

    total_blocks: int
    used_blocks: int
    free_blocks: int
    num_sequences: int
    cached_blocks: int = 0
    internal_fragmentation: float = 0.0
    total_host_blocks: int = 0
    used_host_blocks: int = 0

    @property
    def utilization(self) -> float:
        """Share of the blocks in use, 0 to 1."""
        return self.used_blocks / self.total_blocks


class TailCopy(NamedTuple):
    """Entry `logical_index` of a table was `source`, is `destination`, and becomes its copy."""

    logical_index: int
    source: int
    destination: int


@runtime_checkable
class KVCacheManagerProtocol(Protocol):
    """What the scheduler needs of a KV cache manager.

    Calls are all-or-nothing: one that raises has changed nothing. OutOfBlocksError: too few blocks.
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


@runtime_checkable
class SharingKVCacheManagerProtocol(KVCacheManagerProtocol, Protocol):
    """A manager whose tables may share blocks. With one that cannot, nothing is shared or found.

    A block in several tables is written by nobody but by the sequence that fills it for the first
    time; whoever would write into one that is shared half-full calls `unshare` before.
    """

    def make_chain(
        self, prompt: Sequence[int], output: Sequence[int], salt: str = ""
    ) -> TokenChain | None:
        """Return the sequence's tokens as `find_prefix` wants them; None: nothing is ever found."""
        ...

    def find_prefix(self, chain: TokenChain, max_tokens: int) -> list[int]:
        """Return the blocks that hold the first tokens of a sequence, `max_tokens` at most."""
        ...

    def count_in_use(self, block_ids: Sequence[int]) -> int:
        """Return how many of the blocks stand in a table."""
        ...

    def allocate_with_prefix(
        self, seq_id: int, num_tokens: int, block_ids: Sequence[int]
    ) -> list[int]:
        """Make a table for `num_tokens` that begins with these blocks; the table.

        They stand in another table, or were found by `find_prefix`.
        """
        ...

    def fork_sequence(self, seq_id: int, child_id: int, num_tokens: int) -> list[int]:
        """Make a table that shares the blocks of another's first `num_tokens`; the table."""
        ...

    def is_shared(self, seq_id: int, index: int) -> bool:
        """Whether entry `index` of the sequence's table stands in another table too."""
        ...

    def claim(self, seq_id: int, index: int) -> None:
        """Note that the sequence will write over an entry that stands in no other table."""
        ...

    def unshare(self, seq_id: int, index: int) -> TailCopy:
        """Replace a shared entry by a new block, which is to become a copy of it."""
        ...

    def remember(self, seq_id: int, chain: TokenChain, first_block: int, end_block: int) -> None:
        """Make the full blocks `first_block … end_block − 1` of the sequence findable."""
        ...

    def forget(self, block_ids: Sequence[int]) -> None:
        """Make blocks unfindable: what is in them is not what it should be."""
        ...

    def forget_all(self) -> None:
        """Make all blocks unfindable: the compute plane holds them no more."""
        ...
