"""What a request finds of others' tokens, and what it never finds."""

from __future__ import annotations

import pytest

from control_plane.core import prefix_cache
from control_plane.core.batch import RowFailure
from control_plane.core.generation_params import GenerationParams
from control_plane.core.prefix_cache import PrefixCache, TokenChain
from control_plane.core.request import Request, RequestState

PROMPT = [11, 12, 13, 14, 21, 22, 23, 24, 31, 32]


def test_a_second_request_with_the_same_prompt_computes_only_what_is_not_in_full_blocks(engine):
    e = engine(prefix_cache=True)
    first = e.ask(1, PROMPT)
    e.step()
    second = e.ask(2, PROMPT)
    output = e.send()
    assert output.prefill_request_ids == [2]
    assert (output.batch.positions[1], output.batch.query_lens[1]) == (8, 2)
    assert output.batch.starts[0].block_ids[:2] == tuple(e.kv.get_block_table(1)[:2])
    assert (first.cached_tokens, second.cached_tokens) == (0, 8)
    assert e.used_blocks == 4
    e.commit()


def test_rows_of_one_step_share_the_blocks_that_one_of_them_fills(engine):
    e = engine(prefix_cache=True)
    requests = [e.ask(i, PROMPT) for i in (1, 2, 3)]
    batch = e.send().batch
    assert (batch.positions, batch.query_lens) == ([0, 8, 8], [10, 2, 2])
    assert [r.cached_tokens for r in requests] == [0, 8, 8]
    assert e.used_blocks == 2 + 3


def test_a_prompt_in_full_blocks_still_computes_its_last_token(engine):
    e = engine(prefix_cache=True)
    e.ask(1, PROMPT[:8])
    e.step()
    again = e.ask(2, PROMPT[:8])
    batch = e.step().batch
    assert (batch.positions[1], batch.query_lens[1], again.cached_tokens) == (4, 4, 4)


def test_blocks_of_an_ended_request_are_found_until_they_are_needed(engine):
    e = engine(num_blocks=4, prefix_cache=True, memory_threshold=1.0)
    e.ask(1, PROMPT[:8], max_tokens=1)
    e.run()
    assert e.used_blocks == 0
    assert e.kv.get_memory_stats().cached_blocks == 2
    assert e.ask(2, PROMPT, max_tokens=1).cached_tokens == 0
    e.run()
    assert e.scheduler.get_completed()[-1].cached_tokens == 8
    e.ask(3, [9] * 16, max_tokens=1)
    e.run()
    assert e.ask(4, PROMPT, max_tokens=1).cached_tokens == 0


def test_of_idle_blocks_the_longest_unused_go_first_and_a_prefix_outlives_its_continuation(engine):
    e = engine(num_blocks=6, prefix_cache=True, memory_threshold=1.0)
    for request_id, prompt in ((1, [1] * 9), (2, [2] * 9), (3, [1] * 9)):
        e.ask(request_id, prompt, max_tokens=1)
        e.run()
    # Two blocks of 1s, used again; two of 2s; two free ones. A third one is needed now.
    e.ask(4, [3] * 12, max_tokens=1)
    e.run()
    found = [len(e.kv.find_prefix(e.kv.make_chain([t] * 9, []), 8)) for t in (1, 2, 3)]
    assert found == [2, 1, 2]


def test_generated_tokens_do_not_stand_in_for_prompt_tokens_where_roles_matter(engine):
    for roles_matter, cached in ((True, 4), (False, 8)):
        e = engine(prefix_cache=True, roles_matter=roles_matter)
        said = e.ask(1, PROMPT[:5], max_tokens=5)
        e.run()
        chat = e.ask(2, [*PROMPT[:5], *said.output_tokens, 99])
        e.step()
        assert chat.cached_tokens == cached


def test_a_preempted_request_finds_its_own_generated_blocks_again(engine):
    e = engine(num_blocks=8, block_size=2, prefix_cache=True, memory_threshold=1.0)
    old = e.ask(1, [1, 2, 3, 4], max_tokens=8)
    young = e.ask(2, [5, 6, 7], max_tokens=8)
    restarts = []
    while not young.state.is_final:
        batch = e.step().batch
        restarts += [
            (start.token_ids, batch.positions[batch.slots.index(start.slot)])
            for start in batch.starts
            if len(start.token_ids) > start.num_prompt_tokens
        ]
    assert e.scheduler.get_stats().num_preemptions >= 1
    assert any(position > 0 for _, position in restarts)
    assert (len(old.output_tokens), len(young.output_tokens)) == (8, 8)


@pytest.mark.parametrize("option", [{"cache_salt": "other tenant"}, {"uses_cache": False}])
def test_another_tenant_and_who_does_not_want_it_find_nothing(engine, option):
    e = engine(prefix_cache=True)
    e.ask(1, PROMPT)
    e.step()
    other = e.ask(2, PROMPT, **option)
    assert e.step().batch.positions[1] == 0
    assert other.cached_tokens == 0


def test_a_lost_epoch_empties_the_cache(engine):
    e = engine(prefix_cache=True)
    e.ask(1, PROMPT, max_tokens=1)
    e.run()
    e.scheduler.lose_epoch(7)
    e.ask(2, PROMPT)
    assert e.step().batch.positions == [0]


def test_equal_digests_of_different_tokens_are_no_hit(engine, monkeypatch):
    class SameForAll:
        def __init__(self, _, digest_size):
            self.size = digest_size

        def digest(self):
            return bytes(self.size)

    monkeypatch.setattr(prefix_cache, "blake2b", SameForAll)
    e = engine(prefix_cache=True)
    e.ask(1, [1] * 5)
    e.step()
    e.ask(2, [2] * 5)
    assert e.step().batch.positions[1] == 0
    same = e.ask(3, [1] * 5)
    e.step()
    assert same.cached_tokens == 4


def test_a_block_is_found_as_one_content_only():
    first, second = (
        TokenChain([token] * 4, [], block_size=4, roles_matter=True) for token in (7, 8)
    )
    cache = PrefixCache()
    assert cache.add(first.block(0), 5)
    assert not cache.add(second.block(0), 5)
    assert not cache.add(first.block(0), 6)
    assert (cache.find(first, 1), cache.find(second, 1)) == ([5], [])
    assert cache.remove(5)
    assert (cache.find(first, 1), len(cache)) == ([], 0)


def test_who_took_a_block_from_a_row_that_failed_is_computed_anew_and_does_not_fail(engine):
    e = engine(prefix_cache=True)
    bad, good = e.ask(1, PROMPT, max_tokens=3), e.ask(2, PROMPT, max_tokens=3)
    e.send()
    events = e.commit(failures=(RowFailure(0, "NaN"), RowFailure(1, "NaN")))
    assert [(event.request_id, event.state) for event in events] == [(1, RequestState.FAILED)]
    assert bad.error == "NaN"
    assert good.state is RequestState.PENDING
    output = e.step()
    assert (output.prefill_request_ids, output.batch.positions) == ([2], [0])
    e.run()
    assert good.state is RequestState.COMPLETED
    assert good.output_tokens == [5, 5, 5]


def test_a_constraint_is_not_told_the_token_of_a_row_that_is_computed_anew(engine):
    class Constraint:
        allowed_tokens, is_complete, error = b"\xff", False, None

        def __init__(self):
            self.num_told, self.constrainer = 0, self

        def advance(self, taken):
            self.num_told += len(taken)

    e, constraint = engine(prefix_cache=True), Constraint()
    e.ask(1, PROMPT, max_tokens=3)
    good = Request(
        2, list(PROMPT), GenerationParams(max_tokens=3, seed=1), constraints=(constraint,)
    )
    e.scheduler.add_request(good)
    e.send()
    e.commit(failures=(RowFailure(0, "NaN"),))
    assert good.state is RequestState.PENDING
    assert constraint.num_told == 0
    e.run()
    assert constraint.num_told == len(good.output_tokens) == 3


def test_what_a_failed_row_filled_is_found_by_nobody(engine):
    e = engine(prefix_cache=True)
    e.ask(1, PROMPT)
    e.send()
    e.commit(failures=(RowFailure(0, "NaN"),))
    e.ask(2, PROMPT)
    assert e.step().batch.positions == [0]
    assert e.kv.get_memory_stats().cached_blocks == 0


def test_what_a_failed_row_had_found_is_found_by_nobody_again(engine):
    e = engine(prefix_cache=True)
    e.ask(1, PROMPT, max_tokens=1)
    e.run()
    second = e.ask(2, PROMPT, max_tokens=1)
    e.send()
    e.commit(failures=(RowFailure(0, "no numbers"),))
    assert (second.state, second.cached_tokens) == (RequestState.FAILED, 8)
    third = e.ask(3, PROMPT, max_tokens=1)
    e.run()
    assert (third.state, third.cached_tokens) == (RequestState.COMPLETED, 0)
