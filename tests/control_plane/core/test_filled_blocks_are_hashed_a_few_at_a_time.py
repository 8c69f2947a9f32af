from __future__ import annotations

import pytest

from control_plane.core.batch import RowFailure
from control_plane.core.kv_cache import KVCacheManager

PROMPT = 6
BLOCK = 4


@pytest.fixture
def remembered(monkeypatch):
    """How many blocks were made findable in each call."""
    calls = []
    remember = KVCacheManager.remember

    def count(self, seq_id, chain, first_block, end_block):
        calls.append(end_block - first_block)
        remember(self, seq_id, chain, first_block, end_block)

    monkeypatch.setattr(KVCacheManager, "remember", count)
    return calls


def crowd(engine, num_requests, **options):
    """Requests that fill their blocks in the same steps, up to the step that fills the second."""
    made = engine(
        4 * num_requests,
        BLOCK,
        prefix_cache=True,
        max_batch_size=num_requests,
        max_num_seqs=num_requests,
        memory_threshold=1.0,
        **options,
    )
    for i in range(num_requests):
        made.ask(i, [1000 + i] * PROMPT, 9)
    made.step()
    made.step()
    return made


def test_blocks_that_are_full_in_the_same_step_are_hashed_over_the_next_ones(engine, remembered):
    made = crowd(engine, 100)
    del remembered[:]
    made.step()  # tokens 7 and 8 are there: all second blocks are full
    assert 0 < sum(remembered) < 40
    for _ in range(4):  # one step less than the next blocks take
        made.step()
    assert sum(remembered) >= 60
    made.run()
    assert made.kv.get_memory_stats().cached_blocks == 100 * 3  # 14 of its 15 tokens computed


def test_whoever_comes_next_finds_what_a_sequence_filled_before_it_ended(engine):
    made = crowd(engine, 40)
    made.run()
    for i in range(40):
        late = made.ask(100 + i, [1000 + i] * PROMPT + [5] * 8, 2)
        made.run()
        assert late.cached_tokens == 4  # what was generated, computed as generated, is not these

    made = crowd(engine, 40, roles_matter=False)
    made.run()
    for i in range(40):
        late = made.ask(100 + i, [1000 + i] * PROMPT + [5] * 8, 2)
        made.run()
        assert late.cached_tokens == 12


def test_what_a_failed_sequence_filled_is_not_made_findable_later(engine):
    made = crowd(engine, 40, roles_matter=False)
    made.step()  # all second blocks are full, and most of them are not hashed yet
    output = made.send()
    assert output.decode_request_ids[39] == 39
    made.commit(failures=(RowFailure(39, "no numbers"),))
    made.run()
    tokens = [1039] * PROMPT + [5] * 8
    tables = []
    for request_id in (100, 101):
        made.ask(request_id, tokens, 2)
        (start,) = made.step().batch.starts
        tables.append(start.block_ids)
        made.run()
    assert tables[0][:3] == tables[1][:3]  # all of the first good computation


def test_what_a_lost_plane_held_is_not_made_findable_later(engine, remembered):
    made = crowd(engine, 100)
    made.step()
    made.scheduler.lose_epoch()
    made.in_flight.clear()
    assert made.kv.get_memory_stats().cached_blocks == 0
    del remembered[:]
    made.run()
    assert made.used_blocks == 0
    made.kv.check_invariants()
