from __future__ import annotations

import pytest

from control_plane.core.errors import OutOfBlocksError
from control_plane.core.kv_cache import KVCacheManager, KVCacheManagerProtocol, MemoryStats
from planes.errors import ConfigError, SchedulerError


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_a_sequence_gets_the_blocks_its_tokens_fill(num_tokens, num_blocks):
    kv = KVCacheManager(8, 4)
    table = kv.allocate_sequence(7, num_tokens)
    assert len(table) == num_blocks
    assert kv.get_block_table(7) == table


def test_growing_returns_only_the_new_blocks():
    kv = KVCacheManager(8, 4)
    first = kv.allocate_sequence(1, 3)
    assert kv.grow_sequence(1, 4) == []
    new = kv.grow_sequence(1, 12)
    assert len(new) == 2
    assert kv.get_block_table(1) == first + new


def test_one_block_can_be_appended():
    kv = KVCacheManager(8, 4)
    first = kv.allocate_sequence(1, 1)
    block = kv.allocate_block(1)
    assert kv.get_block_table(1) == [*first, block]


def test_running_out_of_blocks_leaves_every_table_as_it_was():
    kv = KVCacheManager(3, 4)
    table = kv.allocate_sequence(1, 8)
    for attempt in (
        lambda: kv.allocate_sequence(2, 5),
        lambda: kv.grow_sequence(1, 16),
        lambda: [kv.allocate_block(1), kv.allocate_block(1)],
    ):
        with pytest.raises(OutOfBlocksError):
            attempt()
        kv.check_invariants()
    assert kv.get_block_table(1)[:2] == table
    assert kv.get_block_table(2) is None


def test_a_table_that_finds_no_room_behind_the_blocks_it_shares_leaves_them_as_they_were():
    kv = KVCacheManager(4, 4, prefix_cache=True)
    chain = kv.make_chain([1] * 8, [])
    kv.allocate_sequence(1, 8)
    kv.remember(1, chain, 0, 2)
    kv.allocate_sequence(2, 4)
    kv.free_sequence(1)
    before = kv.get_memory_stats()
    found = kv.find_prefix(chain, 8)
    with pytest.raises(OutOfBlocksError):
        kv.allocate_with_prefix(3, 16, found)
    assert kv.get_memory_stats() == before
    kv.check_invariants()
    assert kv.allocate_with_prefix(3, 12, found)[:2] == found


def test_a_freed_sequence_returns_all_its_blocks():
    kv = KVCacheManager(6, 4)
    kv.allocate_sequence(1, 9)
    kv.allocate_sequence(2, 9)
    kv.free_sequence(1)
    assert kv.get_memory_stats() == MemoryStats(6, 3, 3, 1)
    assert kv.get_memory_stats().utilization == 0.5
    assert kv.can_allocate(3)
    assert not kv.can_allocate(4)
    kv.check_invariants()


def test_changing_a_returned_table_does_not_change_the_sequence():
    kv = KVCacheManager(4, 4)
    table = kv.allocate_sequence(1, 4)
    table.append(3)
    kv.get_block_table(1).append(2)
    kv.check_invariants()
    assert len(kv.get_block_table(1)) == 1


def test_sequences_that_are_known_or_unknown_at_the_wrong_time_are_refused():
    kv = KVCacheManager(4, 4)
    kv.allocate_sequence(1, 1)
    with pytest.raises(SchedulerError, match="sequence 1 has a block table already"):
        kv.allocate_sequence(1, 1)
    with pytest.raises(SchedulerError, match="sequence 2 has no block table"):
        kv.free_sequence(2)
    with pytest.raises(SchedulerError, match="sequence 2 has no block table"):
        kv.grow_sequence(2, 1)
    with pytest.raises(SchedulerError, match="at least 1, got 0"):
        kv.allocate_sequence(3, 0)


def test_the_block_size_is_checked():
    with pytest.raises(ConfigError, match="block_size must be an integer of at least 1, got 0"):
        KVCacheManager(4, 0)


def test_the_manager_is_one_of_those_the_scheduler_accepts():
    assert isinstance(KVCacheManager(1, 1), KVCacheManagerProtocol)
