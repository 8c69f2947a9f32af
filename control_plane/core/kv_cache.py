"""Block tables: which KV blocks hold the tokens of which sequence, and who shares them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from control_plane.core.block_pool import BlockPool
from control_plane.core.errors import OutOfBlocksError
from control_plane.core.kv_interface import (
    KVCacheManagerProtocol,
    MemoryStats,
    SharingKVCacheManagerProtocol,
    TailCopy,
)
from control_plane.core.prefix_cache import PrefixCache, TokenChain
from planes.errors import ConfigError, SchedulerError

__all__ = [
    "KVCacheManager",
    "KVCacheManagerProtocol",
    "SharingKVCacheManagerProtocol",
    "MemoryStats",
    "TailCopy",
]


class KVCacheManager:
    """The block tables of all sequences over one pool.

    Entry i of a sequence's table is the block that holds its tokens `i · block_size` up to
    `(i + 1) · block_size − 1`. A block may stand in several tables, always as the same entry.

    `prefix_cache`: full blocks can be found again by their tokens, also after their sequences are
    gone, until the pool needs them. `roles_matter`: a block is only found for tokens of the same
    role, prompt or generated (`control_plane.core.prefix_cache`).

    Raises OutOfBlocksError when the pool runs dry and SchedulerError for a sequence that is unknown
    or known already; then nothing has changed.
    """

    __slots__ = ("_block_size", "_cache", "_is_caching", "_pool", "_roles_matter", "_tables")

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_cache: bool = False,
        roles_matter: bool = True,
    ) -> None:
        if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
            raise ConfigError(
                f"block_size must be an integer of at least 1, got {block_size!r}",
                field="block_size",
            )
        self._cache = PrefixCache()
        self._pool = BlockPool(num_blocks, self._cache.remove)
        self._block_size = block_size
        self._is_caching = prefix_cache
        self._roles_matter = roles_matter
        self._tables: dict[int, list[int]] = {}

    @property
    def block_size(self) -> int:
        """Tokens of one block."""
        return self._block_size

    # Tables

    def allocate_sequence(self, seq_id: int, num_tokens: int) -> list[int]:
        """Make a block table for a new sequence of `num_tokens`, ≥ 1; the ids of its blocks."""
        return self.allocate_with_prefix(seq_id, num_tokens, ())

    def allocate_with_prefix(
        self, seq_id: int, num_tokens: int, block_ids: Sequence[int]
    ) -> list[int]:
        """Make a table for `num_tokens`, ≥ 1, that begins with `block_ids`; a copy.

        `block_ids`: of another table, or found by `find_prefix`, as the same entries.
        """
        self._check_new(seq_id, num_tokens)
        num_own = -(-num_tokens // self._block_size) - len(block_ids)
        if num_own < 0:
            raise SchedulerError(
                f"{num_tokens} tokens fill less than the {len(block_ids)} blocks to share"
            )
        pool = self._pool
        for block_id in block_ids:  # first, so that none of them is evicted for the others
            pool.share(block_id)
        try:
            table = [*block_ids, *pool.allocate(num_own)]
        except OutOfBlocksError:
            pool.release(block_ids)
            raise
        self._tables[seq_id] = table
        return list(table)

    def fork_sequence(self, seq_id: int, child_id: int, num_tokens: int) -> list[int]:
        """Make a table for `child_id` that shares the blocks of `seq_id`'s first `num_tokens`.

        Takes no block. A half-full last one must be unshared (`unshare`) before either writes it.
        """
        table = self._table(seq_id)
        self._check_new(child_id, num_tokens)
        num_shared = -(-num_tokens // self._block_size)
        if num_shared > len(table):
            raise SchedulerError(
                f"sequence {seq_id} has {len(table)} blocks, {num_shared} are to be shared"
            )
        shared = table[:num_shared]
        for block_id in shared:
            self._pool.share(block_id)
        self._tables[child_id] = shared
        return list(shared)

    def allocate_block(self, seq_id: int) -> int:
        """Append one block to the sequence's table and return its id."""
        table = self._table(seq_id)
        block_id = self._pool.allocate_one()
        table.append(block_id)
        return block_id

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

    def is_shared(self, seq_id: int, index: int) -> bool:
        """Whether entry `index` of the sequence's table stands in another table too."""
        return self._pool.ref_count(self._table(seq_id)[index]) > 1

    def claim(self, seq_id: int, index: int) -> None:
        """Note that the sequence will write over an entry that stands in no other table.

        It is half-full for this sequence only: its content may be in the cache as another's.
        """
        self.forget((self._table(seq_id)[index],))

    def unshare(self, seq_id: int, index: int) -> TailCopy:
        """Replace a shared entry by a new block, which is to become a copy of it."""
        table = self._table(seq_id)
        source = table[index]
        if self._pool.ref_count(source) < 2:
            raise SchedulerError(f"block {source} of sequence {seq_id} is not shared")
        destination = self._pool.allocate_one()
        self._pool.release((source,))
        table[index] = destination
        return TailCopy(index, source, destination)

    def free_sequence(self, seq_id: int) -> None:
        """Drop the sequence's table and its hold on the blocks."""
        self._pool.release(self._table(seq_id))
        del self._tables[seq_id]

    def get_block_table(self, seq_id: int) -> list[int] | None:
        """Return a copy of the sequence's block table; None if it has none."""
        table = self._tables.get(seq_id)
        return None if table is None else list(table)

    # Prefix cache

    def make_chain(
        self, prompt: Sequence[int], output: Sequence[int], salt: str = ""
    ) -> TokenChain | None:
        """Return the sequence's tokens as `find_prefix` wants them; None without prefix cache."""
        if not self._is_caching:
            return None
        chain = TokenChain(
            prompt,
            output,
            block_size=self._block_size,
            roles_matter=self._roles_matter,
            salt=salt,
        )
        if self._cache.last_chain is not None:
            chain.take_over(self._cache.last_chain)
        return chain

    def find_prefix(self, chain: TokenChain, max_tokens: int) -> list[int]:
        """Return the blocks that hold the first tokens of a sequence, `max_tokens` at most."""
        return self._cache.find(chain, max_tokens // self._block_size)

    def count_in_use(self, block_ids: Sequence[int]) -> int:
        """Return how many of the blocks stand in a table; the others are idle."""
        return self._pool.count_used(block_ids)

    def remember(self, seq_id: int, chain: TokenChain, first_block: int, end_block: int) -> None:
        """Make the full blocks `first_block … end_block − 1` of the sequence findable.

        Of several blocks with the same content, the first stays the one that is found.
        """
        table = self._table(seq_id)
        for index in range(first_block, end_block):
            if self._cache.add(chain.block(index), table[index]):
                self._pool.keep(table[index])

    def forget(self, block_ids: Sequence[int]) -> None:
        """Make blocks unfindable; those not found anyway are passed over."""
        for block_id in block_ids:
            if self._cache.remove(block_id):
                self._pool.drop(block_id)

    def forget_all(self) -> None:
        """Make all blocks unfindable: the compute plane holds them no more."""
        self.forget(self._cache.block_ids())

    # Numbers

    def get_memory_stats(self) -> MemoryStats:
        """Return the use of the pool."""
        pool = self._pool
        return MemoryStats(
            total_blocks=pool.num_blocks,
            used_blocks=pool.num_used,
            free_blocks=pool.num_free,
            num_sequences=len(self._tables),
            cached_blocks=pool.num_idle,
        )

    def can_allocate(self, num_blocks: int) -> bool:
        """Whether `num_blocks` can be allocated now."""
        return num_blocks <= self._pool.num_free

    def check_invariants(self) -> None:
        """Raise SchedulerError unless tables, cache and pool agree on every block. For tests."""
        self._pool.check_invariants()
        holders: Counter[int] = Counter()
        places: dict[int, int] = {}
        for table in self._tables.values():
            holders.update(table)
            for index, block_id in enumerate(table):
                if places.setdefault(block_id, index) != index:
                    raise SchedulerError(f"block {block_id} stands at two places of tables")
        for block_id in range(self._pool.num_blocks):
            if holders[block_id] != self._pool.ref_count(block_id):
                raise SchedulerError(
                    f"block {block_id} is in {holders[block_id]} tables and has reference count "
                    f"{self._pool.ref_count(block_id)}"
                )
        if sum(holders[b] == 0 for b in self._cache.block_ids()) != self._pool.num_idle:
            raise SchedulerError("a block is idle and cannot be found, or the other way round")

    def _check_new(self, seq_id: int, num_tokens: int) -> None:
        if seq_id in self._tables:
            raise SchedulerError(f"sequence {seq_id} has a block table already")
        if num_tokens < 1:
            raise SchedulerError(f"num_tokens must be at least 1, got {num_tokens}")

    def _table(self, seq_id: int) -> list[int]:
        try:
            return self._tables[seq_id]
        except KeyError:
            raise SchedulerError(f"sequence {seq_id} has no block table") from None
