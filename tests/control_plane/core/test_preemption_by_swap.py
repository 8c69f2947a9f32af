"""Preempted sequences whose blocks are saved on the host instead of computed anew."""

from __future__ import annotations

import pytest

from control_plane.core.batch import BlockMove
from control_plane.core.host_pool import HostPool


def test_a_preempted_sequence_is_swapped_out_and_comes_back_without_computing_anything_twice(
    engine,
):
    e = engine(num_blocks=6, block_size=1, memory_threshold=1.0, num_host_blocks=8)
    old = e.ask(1, [7, 7], max_tokens=5)
    young = e.ask(2, [8, 8], max_tokens=3)
    e.step()
    e.step()
    blocks = e.kv.get_block_table(2)
    batch = e.send().batch
    assert [move.source for move in batch.swap_out] == blocks
    hosts = [move.destination for move in batch.swap_out]
    stats = e.scheduler.get_stats()
    assert (stats.num_preemptions, stats.num_swaps, stats.num_host_blocks_used) == (1, 1, 3)
    memory = e.scheduler.get_memory_stats()
    assert (memory.used_host_blocks, memory.total_host_blocks) == (3, 8)
    e.commit()
    while not old.state.is_final:
        e.step()
    batch = e.step().batch
    (start,) = batch.starts
    assert [move.source for move in batch.swap_in] == hosts
    assert [move.destination for move in batch.swap_in] == list(start.block_ids[:3])
    assert (batch.positions, batch.query_lens) == ([3], [1])
    assert start.token_ids == (8, 8, 5, 5)
    assert (old.output_tokens, young.output_tokens) == ([5] * 5, [5] * 3)
    assert e.used_blocks == 0


def test_without_room_on_the_host_a_sequence_is_computed_anew(engine):
    e = engine(num_blocks=6, block_size=1, memory_threshold=1.0, num_host_blocks=2)
    e.ask(1, [7, 7], max_tokens=5)
    young = e.ask(2, [8, 8], max_tokens=3)
    e.run()
    stats = e.scheduler.get_stats()
    assert (stats.num_preemptions, stats.num_swaps) == (1, 0)
    assert young.output_tokens == [5] * 3


def test_of_a_saved_sequence_only_what_the_cache_lost_is_brought_back(engine):
    e = engine(
        num_blocks=8, block_size=1, memory_threshold=1.0, num_host_blocks=8, prefix_cache=True
    )
    e.ask(1, [7, 7], max_tokens=6)
    e.ask(2, [8, 8], max_tokens=6)
    moves = []
    while e.scheduler.has_pending_work():
        batch = e.step().batch
        moves.append((len(batch.swap_out), len(batch.swap_in)))
    assert e.scheduler.get_stats().num_swaps == 1
    ((num_out, _),) = [pair for pair in moves if pair[0]]
    assert 0 < sum(num_in for _, num_in in moves) < num_out


def test_what_is_brought_back_is_found_by_others(engine):
    e = engine(
        num_blocks=8, block_size=1, memory_threshold=1.0, num_host_blocks=8, prefix_cache=True
    )
    e.ask(1, [7, 7], max_tokens=7)
    e.ask(2, [8, 9], max_tokens=6)
    while not e.step().batch.swap_in:
        pass
    e.run()
    found = e.ask(3, [8, 9, 3], max_tokens=1)
    e.run()
    assert found.cached_tokens == 2


def test_of_a_saved_sequence_that_the_cache_has_whole_nothing_is_kept_on_the_host(engine):
    e = engine(
        num_blocks=6, block_size=1, memory_threshold=1.0, num_host_blocks=8, prefix_cache=True
    )
    e.ask(1, [7, 7], max_tokens=5)
    young = e.ask(2, [8, 8], max_tokens=5)
    e.send()
    e.send()
    assert e.scheduler.schedule() is None  # the young one is to give way once its step has come
    e.scheduler.cancel(1)  # who would have taken its blocks
    e.commit()
    e.commit()
    stats = e.scheduler.get_stats()
    assert (stats.num_swaps, stats.num_host_blocks_used) == (1, 3)
    batch = e.step().batch
    assert (batch.positions, batch.swap_in) == ([3], ())
    assert e.scheduler.get_stats().num_host_blocks_used == 0
    e.run()
    assert young.output_tokens == [5] * 5


def test_of_a_saved_prompt_that_another_has_computed_further_nothing_is_brought_back(engine):
    e = engine(
        num_blocks=9,
        block_size=1,
        memory_threshold=1.0,
        num_host_blocks=8,
        prefix_cache=True,
        max_prefill_tokens=1,
    )
    e.ask(1, [7], max_tokens=7)
    e.ask(2, [1, 2, 3, 4, 5, 6], max_tokens=1)
    while e.scheduler.get_stats().num_swaps == 0:
        e.step()
    assert e.scheduler.get_stats().num_host_blocks_used == 4
    e.ask(3, [1, 2, 3, 4, 5, 6], max_tokens=1, priority=-1)
    while e.scheduler.get_stats().num_waiting_requests:
        batch = e.step().batch
    assert (batch.positions, batch.query_lens, batch.swap_in) == ([5], [1], ())


@pytest.mark.parametrize("how", ["cancel", "end_sample", "withdraw"])
def test_of_a_saved_sequence_that_ends_while_it_waits_nothing_stays_on_the_host(engine, how):
    e = engine(num_blocks=6, block_size=1, memory_threshold=1.0, num_host_blocks=8)
    e.ask(1, [7, 7], max_tokens=5)
    e.ask(2, [8, 8], max_tokens=3)
    for _ in range(3):
        e.step()
    assert e.scheduler.get_stats().num_host_blocks_used == 3
    if how == "end_sample":
        assert e.scheduler.end_sample(2, 0, 1) is not None
    else:
        assert e.scheduler.cancel(2) if how == "cancel" else e.scheduler.withdraw([2])
    e.run()  # with the next step what was under way to the host has come there
    assert e.scheduler.get_stats().num_host_blocks_used == 0


def test_a_lost_epoch_forgets_what_was_saved(engine):
    e = engine(num_blocks=6, block_size=1, memory_threshold=1.0, num_host_blocks=8)
    e.ask(1, [7, 7], max_tokens=5)
    e.ask(2, [8, 8], max_tokens=3)
    for _ in range(3):
        e.step()
    assert e.scheduler.get_stats().num_host_blocks_used == 3
    e.scheduler.lose_epoch()
    assert e.scheduler.get_stats().num_host_blocks_used == 0
    while e.scheduler.has_pending_work():
        assert not e.step().batch.swap_in


def test_cancelling_a_saved_sequence_gives_its_host_blocks_back(engine):
    e = engine(num_blocks=6, block_size=1, memory_threshold=1.0, num_host_blocks=8)
    e.ask(1, [7, 7], max_tokens=5)
    e.ask(2, [8, 8], max_tokens=3)
    for _ in range(3):
        e.step()
    e.scheduler.cancel(2)
    e.step()
    assert e.scheduler.get_stats().num_host_blocks_used == 0


@pytest.mark.parametrize("leave", ["swap_in", "forget"])
def test_a_host_block_is_not_given_out_again_in_the_step_that_reads_it(leave):
    host = HostPool(2)
    assert host.swap_out(1, [4, 5])
    host.take_moves()
    if leave == "swap_in":
        host.swap_in(1, [9], 1)
    else:
        host.forget(1)
    assert not host.swap_out(2, [6])
    assert host.take_moves() == ((), (BlockMove(1, 9),) if leave == "swap_in" else ())
    assert host.swap_out(2, [6])
    assert (host.num_used, host.holds(1), host.holds(2)) == (1, False, True)
