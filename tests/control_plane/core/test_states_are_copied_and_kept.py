"""Where the states of models with states are copied to, and where they are found again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from control_plane.core.batch import RowFailure, StateCopy
from control_plane.core.generation_params import GenerationParams
from control_plane.core.interface import SchedulerConfig
from control_plane.core.prefix_cache import TokenChain
from control_plane.core.request import Group, Request, Sample, Sequence
from control_plane.core.states import KeptStates, SequenceStates
from planes.errors import ConfigError
from tests.control_plane.core.conftest import EOS

NUM_SLOTS = 4
PROMPT = list(range(11, 25))  # 14 tokens: 3 full blocks of 4 and a bit


@pytest.fixture
def stateful(engine):
    def make(num_kept: int = 3, **options):
        options = {"prefix_cache": True, "max_slots": NUM_SLOTS, "min_state_tokens": 4} | options
        return engine(num_states=NUM_SLOTS + num_kept, **options)

    return make


def rows(output) -> list[tuple[int, int]]:
    """Position and tokens of each row."""
    return list(zip(output.batch.positions, output.batch.query_lens, strict=True))


def copies(output) -> list[tuple[int, int]]:
    return [tuple(copy) for copy in output.batch.state_copies]


# --- kept ---


def test_a_prompt_is_cut_behind_its_last_full_block_and_the_state_is_kept_with_the_next_step(
    stateful,
):
    e = stateful()
    e.ask(1, PROMPT)
    first, second, third = e.step(), e.step(), e.step()
    assert (rows(first), copies(first)) == ([(0, 12)], [])
    assert (rows(second), copies(second)) == ([(12, 2)], [(0, NUM_SLOTS)])
    assert (rows(third), copies(third)) == ([(14, 1)], [])


def test_a_state_is_found_from_the_step_on_that_fills_it(stateful):
    e = stateful()
    for number in (1, 2):
        e.ask(number, PROMPT)
    first = e.step()
    assert (rows(first), copies(first)) == ([(0, 12), (0, 14)], [])
    e.ask(3, PROMPT)
    second = e.step()
    assert (rows(second), copies(second)) == ([(14, 1), (12, 2), (12, 2)], [(0, 4), (4, 2)])
    assert e.scheduler.get_stats().num_state_hits == 1


def test_a_prompt_in_full_blocks_keeps_its_state_before_its_last_block(stateful):
    e = stateful()
    e.ask(1, PROMPT[:12])
    assert rows(e.step()) == [(0, 8)]


@pytest.mark.parametrize("least", [12, 13])
def test_a_state_that_saves_too_little_is_not_kept(stateful, least):
    e = stateful(min_state_tokens=least)
    e.ask(1, PROMPT)
    assert rows(e.step()) == [(0, 12 if least == 12 else 14)]


def test_without_a_place_for_it_no_prompt_is_cut(stateful):
    e = stateful(num_kept=0)
    for number in (1, 2):
        e.ask(number, PROMPT)
        assert rows(e.step())[-1] == (0, 14)


@pytest.mark.parametrize("change", [{"uses_cache": False}, {"cache_salt": "another"}])
def test_who_finds_no_blocks_of_others_finds_no_state(stateful, change):
    e = stateful()
    e.ask(1, PROMPT, max_tokens=1)
    e.run()
    request = e.ask(2, PROMPT, max_tokens=1, **change)
    output = e.step()
    assert rows(output) == [(0, 14 if "uses_cache" in change else 12)]
    assert copies(output) == []
    assert request.cached_tokens == 0
    e.run()
    assert e.scheduler.get_stats().num_kept_states == (1 if "uses_cache" in change else 2)


def test_without_a_prefix_cache_nothing_is_kept(stateful):
    e = stateful(prefix_cache=False)
    e.ask(1, PROMPT)
    assert rows(e.step()) == [(0, 14)]
    assert e.scheduler.get_stats().num_kept_states == 0


def test_a_beginning_that_two_had_is_kept_for_the_third(stateful):
    e = stateful()
    tails = [[30 + n] * 9 for n in range(3)]
    begun = []
    for number, tail in enumerate(tails):
        request = e.ask(number, PROMPT[:8] + tail, max_tokens=1)
        begun.append([])
        while not request.state.is_final:
            begun[-1] += rows(e.step())
    # The first leaves a state where only it goes on, the second also where both began alike.
    assert begun == [
        [(0, 16), (16, 1)],
        [(0, 8), (8, 8), (16, 1)],
        [(8, 8), (16, 1)],
    ]


def test_the_place_of_a_prompt_gives_way_to_one_close_before_it(stateful):
    e = stateful(min_state_tokens=8)
    e.ask(1, PROMPT[:8] + [30] * 6, max_tokens=1)
    e.run()
    e.ask(2, PROMPT[:8] + [31] * 6, max_tokens=1)
    assert rows(e.step()) == [(0, 8)]
    assert rows(e.step()) == [(8, 6)]


def test_a_state_that_is_kept_already_cuts_no_prompt(stateful):
    e = stateful()
    e.ask(1, PROMPT, max_tokens=1)
    e.run()
    e.kv.forget_all()
    e.ask(2, PROMPT, max_tokens=1)
    assert rows(e.step()) == [(0, 14)]


def test_blocks_behind_the_last_state_are_filled_anew_and_found_in_place_of_the_old(stateful):
    e = stateful(num_kept=1, roles_matter=False)
    said = e.ask(1, PROMPT, max_tokens=7)  # 20 tokens are computed: two more blocks
    e.run()
    longer = [*PROMPT, *said.output_tokens, 91, 92]
    e.ask(2, longer, max_tokens=1)
    output = e.step()
    table = output.batch.starts[0].block_ids
    assert rows(output) == [(12, 8)]
    e.run()
    found = e.kv.find_prefix(e.kv.make_chain([*longer, 93], []), len(longer))
    assert tuple(found) == table
    assert e.kv.get_memory_stats().cached_blocks == 5


def test_the_next_turn_goes_on_behind_the_last_full_block_of_the_answer(stateful):
    e = stateful(roles_matter=False)
    said = e.ask(1, PROMPT, max_tokens=12)
    outputs = [e.step() for _ in range(13)]
    # The answer is as long as a state must save behind token 20; the next state replaces that.
    assert [copies(output) for output in outputs if copies(output)] == [
        [(0, 4)],
        [(0, 5)],
        [(0, 5)],
    ]
    longer = [*PROMPT, *said.output_tokens, 91, 92]
    e.ask(2, longer, max_tokens=1)
    output = e.step()
    assert (rows(output), copies(output)) == ([(24, 4)], [(5, 0)])


def test_nobody_finds_the_state_of_an_answer_under_way(stateful):
    e = stateful(roles_matter=False)
    said = e.ask(1, PROMPT, max_tokens=40)
    while len(said.output_tokens) < 11:
        e.step()
    e.ask(2, [*PROMPT, *said.output_tokens], max_tokens=1)
    assert rows(e.step())[-1][0] == 12  # behind the prompt


def test_a_state_that_took_in_more_than_the_answer_is_found_by_nobody(stateful):
    """The token that ended it was computed by a step that was under way."""
    e = stateful(roles_matter=False)
    said = e.ask(1, PROMPT, max_tokens=40)
    while len(said.output_tokens) < 5:
        e.step()
    e.send()  # computes token 18, and samples what is to be token 19
    e.send()  # computes that, which fills a block
    e.commit({1: EOS})
    e.commit()
    assert e.scheduler.get_stats().num_kept_states == 1
    e.ask(2, [*PROMPT, *said.output_tokens, EOS, 91], max_tokens=1)
    assert rows(e.step())[0][0] == 12


@pytest.mark.parametrize("options", [{"roles_matter": True}, {"num_kept": 1}, {"num_kept": 0}])
def test_answers_keep_no_state_that_nobody_could_find_or_that_takes_more_than_half(
    stateful, options
):
    e = stateful(**({"roles_matter": False} | options))
    e.ask(1, PROMPT[:3], max_tokens=20)
    assert not any(copies(e.step()) for _ in range(20))


def test_of_the_kept_states_the_one_used_longest_ago_gives_way(stateful):
    e = stateful(num_kept=2)
    prompts = {name: [name] * 6 for name in (1, 2, 3)}
    for number, name in enumerate((1, 2, 1, 3)):  # so that of 2 gives way to that of 3
        e.ask(number, prompts[name], max_tokens=1)
        e.run()
    for number, (name, position) in enumerate(((1, 4), (2, 0)), start=10):
        e.ask(number, prompts[name], max_tokens=1)
        assert rows(e.step())[0][0] == position
        e.run()


def test_a_step_that_keeps_more_states_than_there_are_keeps_the_first():
    kept = KeptStates(range(5, 7))
    assert [kept.add(digest) for digest in (b"a", b"b", b"c")] == [5, 6, None]
    assert not kept.can_find(b"a")
    kept.begin_step()
    assert kept.can_find(b"a")
    assert kept.add(b"c") == 5
    assert (b"a" in kept, b"b" in kept, b"c" in kept, len(kept)) == (False, True, True, 2)


@pytest.mark.parametrize("how", ["flush_prefix_cache", "lose_epoch"])
def test_states_are_forgotten_with_the_blocks(stateful, how):
    e = stateful()
    e.ask(1, PROMPT, max_tokens=1)
    e.run()
    assert e.scheduler.get_stats().num_kept_states == 1
    getattr(e.scheduler, how)()
    assert e.scheduler.get_stats().num_kept_states == 0
    e.ask(2, PROMPT, max_tokens=1)
    assert rows(e.step()) == [(0, 12)]


def test_a_lost_epoch_takes_the_copies_along(stateful):
    e = stateful()
    e.ask(1, PROMPT, n=3)
    e.step()
    e.step()  # with which the other samples begin
    e.scheduler.lose_epoch()
    output = e.step()
    assert {position for position, _ in rows(output)} == {0}
    assert copies(output) == []


def test_a_preempted_sequence_goes_on_from_the_state_of_its_prompt(stateful):
    e = stateful(num_blocks=8, memory_threshold=1.0)
    e.ask(1, PROMPT, max_tokens=8)
    e.ask(2, [3] * 9, max_tokens=8)
    restarts = []
    while e.scheduler.has_pending_work():
        output = e.step()
        for start in output.batch.starts:
            if len(start.token_ids) > start.num_prompt_tokens:
                row = output.batch.slots.index(start.slot)
                restarts.append(
                    (rows(output)[row][0], start.slot in dict(map(reversed, copies(output))))
                )
    assert e.scheduler.get_stats().num_preemptions >= 1
    assert restarts == [(8, True)]


# --- forks ---


def test_the_other_samples_begin_with_a_copy_behind_the_row_they_share(stateful):
    e = stateful(num_kept=0)
    e.ask(1, PROMPT, n=3)
    assert copies(e.step()) == []
    output = e.step()
    assert copies(output) == [(0, 1), (0, 2)]
    assert rows(output) == [(14, 1)] * 3
    assert copies(e.step()) == []


def test_copies_wait_for_the_next_step_there_is(stateful):
    e = stateful(num_kept=0)
    e.ask(1, PROMPT, n=2, max_tokens=1)  # nothing is left to compute
    e.send()
    assert e.scheduler.schedule() is None
    e.commit()
    assert e.scheduler.schedule() is None
    e.ask(2, [5])
    assert copies(e.step()) == [(0, 1)]  # to slots that are others' by now: harmless, and first


def test_requests_fork_while_the_state_is_of_the_tokens_they_share(stateful):
    e = stateful(num_kept=0)
    parent = e.ask(1, PROMPT)
    e.step()

    def fork(number: int) -> Request:
        child = Request(number, list(PROMPT), replace(parent.params, seed=number))
        e.scheduler.fork(1, child)
        return child

    fork(2)
    output = e.send()
    assert copies(output) == [(0, 1)]
    fork(3)  # the parent's state has taken in the token that the child has yet to compute
    output = e.send()
    assert copies(output) == []
    assert rows(output)[-1] == (0, 15)


# --- failures ---


def test_who_began_with_a_failed_sequences_state_is_computed_anew(stateful):
    e = stateful()
    e.ask(1, PROMPT)
    e.step()
    other = e.ask(2, [*PROMPT[:12], 99])
    output = e.send()
    assert copies(output) == [(0, 4), (4, 1)]
    e.commit(failures=(RowFailure(0, "NaN"), RowFailure(1, "NaN")))
    assert [r.id for r in e.scheduler.get_completed()] == [1]
    assert e.scheduler.get_stats().num_kept_states == 0
    assert rows(e.step()) == [(0, 12)]
    assert not other.state.is_final


def in_slot(slot: int, stay: int) -> Sequence:
    request = Request(stay, [1, 2], GenerationParams())
    request.samples = [Sample()]
    seq = Sequence(stay, request, Group(request, request.params, stay), stay=stay)
    seq.slot = slot
    return seq


def test_a_state_remembers_the_stays_that_it_came_through_until_they_end():
    states = SequenceStates(range(4, 6), 2, 1)
    first, second, third, fourth = (in_slot(slot, stay=10 + slot) for slot in range(4))
    states.begin(first, 0)
    states.fork(first, second, is_behind_row=False)
    states.fork(second, third, is_behind_row=True)
    assert states.came_through(2, {10})
    assert states.came_through(2, {11})
    assert not states.came_through(2, {12})
    assert states.take_copies() == (StateCopy(0, 1),)
    assert states.take_copies() == (StateCopy(1, 2),)
    states.end(first)
    states.fork(third, fourth, is_behind_row=False)
    assert not states.came_through(3, {10})
    assert states.came_through(3, {11})


# --- limits ---


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_states": 3}, "num_states"),
        ({"num_states": -1}, "num_states"),
        ({"num_states": 4, "speculative_tokens": 1}, "speculative_tokens"),
        ({"num_states": 4, "grammar_drafts": 1}, "grammar_drafts"),
        ({"num_states": 4, "num_host_blocks": 1}, "num_host_blocks"),
        ({"num_states": 4, "min_state_tokens": 0}, "min_state_tokens"),
    ],
    ids=str,
)
def test_a_configuration_that_does_not_go_with_states_is_refused(change, field):
    with pytest.raises(ConfigError) as refused:
        SchedulerConfig(max_slots=4, **change)
    assert refused.value.field == field


def test_kept_states_begin_behind_the_slots_that_are_used():
    assert SchedulerConfig(max_num_seqs=2, max_slots=4, num_states=7).kept_states == range(2, 7)
    assert SchedulerConfig(max_num_seqs=2, num_states=3).kept_states == range(2, 3)
    assert len(SchedulerConfig(max_num_seqs=2).kept_states) == 0


def test_a_chain_is_looked_up_from_its_end():
    states = SequenceStates(range(4, 9), 2, 1)
    chain = TokenChain([1, 2, 3, 4, 5, 6], [], block_size=2, roles_matter=False)
    for index in (0, 1):
        states.kept.add(chain.block(index).digest)
    assert states.num_found_blocks(chain, 3) == 0
    states.take_copies()
    assert [states.num_found_blocks(chain, n) for n in (3, 2, 1, 0)] == [2, 2, 1, 0]
