from __future__ import annotations

import pytest

from control_plane.core.block_pool import BlockPool
from control_plane.core.errors import OutOfBlocksError
from planes.errors import ConfigError, SchedulerError
from planes.errors import MemoryError as EngineMemoryError


def test_every_block_is_given_out_once():
    pool = BlockPool(5)
    taken = pool.allocate(2) + pool.allocate(3)
    assert sorted(taken) == [0, 1, 2, 3, 4]
    assert (pool.num_free, pool.num_used) == (0, 5)
    pool.check_invariants()


def test_an_allocation_that_does_not_fit_changes_nothing():
    pool = BlockPool(3)
    pool.allocate(1)
    with pytest.raises(OutOfBlocksError, match="3 KV blocks wanted, 2 of 3 are free") as caught:
        pool.allocate(3)
    assert isinstance(caught.value, EngineMemoryError)
    assert pool.num_free == 2
    pool.check_invariants()


def test_a_shared_block_is_free_only_when_its_last_table_lets_go():
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.share(block)
    pool.release([block])
    assert (pool.ref_count(block), pool.num_free) == (1, 1)
    pool.release([block])
    assert (pool.ref_count(block), pool.num_free) == (0, 2)
    pool.check_invariants()


def test_released_blocks_are_reused_in_the_same_order():
    pool = BlockPool(8)
    blocks = pool.allocate(3)
    pool.release(blocks)
    assert pool.allocate(3) == blocks


def test_releasing_a_free_block_is_refused_and_changes_nothing():
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    with pytest.raises(SchedulerError, match="is free already"):
        pool.release([block, block])
    assert pool.ref_count(block) == 1
    pool.check_invariants()


def test_a_free_block_cannot_be_shared():
    with pytest.raises(SchedulerError, match="block 1 is free"):
        BlockPool(2).share(1)


@pytest.mark.parametrize("num_blocks", [0, -1, True, 2.0])
def test_a_pool_needs_a_whole_number_of_blocks(num_blocks):
    with pytest.raises(ConfigError, match="num_blocks must be an integer of at least 1"):
        BlockPool(num_blocks)


def test_the_check_finds_a_block_in_two_states():
    pool = BlockPool(2)
    pool.allocate(1)
    pool._free.append(0)
    with pytest.raises(SchedulerError, match="block 0"):
        pool.check_invariants()


def test_a_kept_block_is_idle_when_nobody_holds_it_and_is_the_last_to_be_given_out():
    evicted = []
    pool = BlockPool(3, evicted.append)
    kept, other = pool.allocate(2)
    pool.keep(kept)
    pool.release([kept, other])
    assert (pool.num_free, pool.num_idle, pool.num_used) == (3, 1, 0)
    pool.check_invariants()
    assert kept not in pool.allocate(2)
    assert evicted == []
    assert pool.allocate_one() == kept
    assert evicted == [kept]
    pool.check_invariants()
    with pytest.raises(OutOfBlocksError, match="none of 3 is free"):
        pool.allocate_one()


def test_an_idle_block_can_be_shared_again_and_a_dropped_one_is_free():
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.keep(first)
    pool.keep(second)
    pool.release([first, second])
    pool.share(first)
    assert (pool.ref_count(first), pool.num_idle) == (1, 1)
    pool.drop(second)
    assert pool.num_idle == 0
    with pytest.raises(SchedulerError, match="is free"):
        pool.share(second)
    with pytest.raises(SchedulerError, match="cannot be kept"):
        pool.keep(second)
    pool.check_invariants()
