"""A slot is started with the tokens and blocks that another one has there, as far as it has."""

from __future__ import annotations

import pytest

from control_plane.core import composer
from control_plane.core.batch import RowFailure, SlotPrefix, StepResult, TokenLogprobs
from control_plane.core.generation_params import GenerationParams
from control_plane.core.request import Request
from tests.control_plane.core import test_beams_are_sequences as beams

LIKELY = TokenLogprobs(0.0, tuple(range(1, 9)), tuple(-float(token) for token in range(1, 9)))


@pytest.fixture
def engine(engine):
    def make(**limits):
        return engine(**{"start_prefixes": True, **limits})

    return make


def told(output):
    return [
        (start.prefix, start.token_ids, len(start.block_ids))
        for start in getattr(output, "batch", output).starts
    ]


def forked(e, prompt_len: int, num_steps: int) -> tuple[Request, Request]:
    """A request that has run for some steps, and a fork of it."""
    parent = e.ask(1, [7] * prompt_len, max_tokens=9)
    for _ in range(num_steps):
        e.step()
    child = Request(2, list(parent.input_tokens), GenerationParams(max_tokens=9, seed=2))
    e.scheduler.fork(1, child)
    return parent, child


def step_of_beams(e):
    """Send a step of a search and let the likeliest beam have all continuations."""
    output = e.scheduler.schedule()
    samples = range(len(output.batch.sampled_rows))
    result = StepResult(
        output.batch.step_id, [0] * len(samples), sample_logprobs=dict.fromkeys(samples, LIKELY)
    )
    e.scheduler.commit(result)
    return output


def test_samples_of_a_prompt_have_it_from_the_first_one(engine):
    e = engine(max_total_tokens=8)
    e.ask(1, list(range(20, 41)), n=3)
    assert told(e.step()) == [(None, tuple(range(20, 41)), 2)]
    assert told(e.step()) == []
    # Of its six blocks the third row appends two, after the starts.
    assert told(e.step()) == [(SlotPrefix(0, 21, 4), (), 2)] * 2
    e.run()
    assert e.used_blocks == 0


def test_samples_of_a_prompt_that_one_row_computes_have_it_from_the_start_before(engine):
    e = engine()
    e.ask(1, [7] * 9, n=3)
    whole, *others = told(e.step())
    assert whole == (None, (7,) * 9, 3)
    assert others == [(SlotPrefix(0, 9, 0), (), 3)] * 2


def test_a_beam_has_all_from_its_own_slot_but_the_token_that_was_sampled_there(engine):
    e = engine()
    beams.ask(e, prompt_len=10, max_tokens=6, width=2)
    assert told(step_of_beams(e)) == [(None, (7,) * 10, 3)]
    slots = []
    for num_known in (10, 11, 12, 13):
        output = step_of_beams(e)
        slots += [start.slot for start in output.batch.starts]
        for (prefix, tokens, num_blocks), start in zip(
            told(output), output.batch.starts, strict=True
        ):
            assert (prefix.num_tokens, len(tokens)) == (num_known, 1)
            assert prefix.num_blocks == num_known // 4  # a half-full one may have been copied
            assert prefix.num_blocks + num_blocks == num_known // 4 + 1
            assert prefix.slot in slots
            assert (prefix.slot == start.slot) or prefix.slot == slots[0]
    e.scheduler.cancel(1)
    assert e.used_blocks == 0


def test_a_fork_has_the_text_from_its_parent(engine):
    e = engine()
    forked(e, 5, 4)
    # The parent's newest token is computed anew, so it is sent, too.
    assert told(e.step()) == [(SlotPrefix(0, 8, 2), (5,), 1)]
    e.run()


def test_a_request_forked_before_its_parent_has_a_token_computes_the_last_of_the_prompt(engine):
    e = engine()
    parent = e.ask(1, [7] * 6, max_tokens=9)
    e.send()
    child = Request(2, list(parent.input_tokens), GenerationParams(max_tokens=9, seed=2))
    e.scheduler.fork(1, child)
    assert told(e.send()) == [(SlotPrefix(0, 5, 1), (7,), 1)]
    e.commit()
    e.commit()
    e.run()


def test_who_was_preempted_in_between_is_not_named(engine):
    """It has another slot, if it has one, and what lies in the old one is another's."""
    e = engine(num_blocks=64)
    forked(e, 6, 2)
    (seq,) = [s for s in e.scheduler._running.sequences() if s.request_id == 1]
    e.scheduler._running.preempt(seq)
    e.ask(3, [8] * 3, priority=-1)
    output = e.step()
    assert {start.prefix for start in output.batch.starts} == {None}
    started = {start.slot: start.token_ids for start in output.batch.starts}
    assert started[1] == (*[7] * 6, 5, 5)
    e.run()


def test_who_came_back_has_other_blocks_and_is_not_named(engine):
    e = engine(max_num_seqs=2)
    forked(e, 6, 2)
    of_parent, of_child = e.scheduler._running.sequences()
    origin = of_child.origin
    assert origin.prefix() == SlotPrefix(0, 7, 1)
    e.scheduler._running.preempt(of_parent)
    assert origin.prefix() is None
    e.step()
    assert of_parent.is_on_plane
    assert origin.prefix() is None


def test_who_is_not_there_itself_yet_is_not_named(engine):
    e = engine(max_batch_size=1)
    first = e.ask(1, [7] * 6, max_tokens=9)
    e.step()
    e.step()
    for number, priority in ((2, 0), (3, -1)):
        params = GenerationParams(max_tokens=9, seed=number)
        child = Request(number, list(first.input_tokens), params, priority=priority)
        e.scheduler.fork(number - 1, child)
    assert told(e.step()) == [(None, (*[7] * 6, 5, 5), 2)]  # the third goes first
    e.run()


def test_a_lost_plane_is_told_everything_anew(engine):
    e = engine()
    e.ask(1, [7] * 9, n=2)
    e.step()
    e.scheduler.lose_epoch(7)
    assert [prefix for prefix, *_ in told(e.step())] == [None, None]
    e.run()


def test_a_parent_that_gives_way_in_the_same_step_can_still_be_named(engine):
    """Its slot is among those released, which the compute plane reads starts from, too."""
    e = engine(num_blocks=4)
    forked(e, 6, 2)
    (of_child,) = [s for s in e.scheduler._running.sequences() if s.request_id == 2]
    e.scheduler._composer.compose = _preempting(e, of_child.seq_id, e.scheduler._composer.compose)
    output = e.step()
    assert output.batch.released == (0,)
    assert told(output) == [(SlotPrefix(0, 7, 1), (5,), 1)]


def _preempting(e, child_id: int, compose):
    """Compose a step in which the parent gives way once the child's start is in it."""

    def composed(step_id: int):
        step = compose(step_id)
        for seq in list(e.scheduler._running.sequences()):
            if seq.seq_id != child_id:
                e.scheduler._running.preempt(seq)
        return step

    running = e.scheduler._running
    for seq in list(running.sequences()):
        if seq.seq_id != child_id:
            running.decoding.pop(seq.seq_id)  # it has no row of its own in this step
    return composed


def test_a_plane_that_cannot_is_told_everything(engine):
    e = engine(start_prefixes=False)
    e.ask(1, [7] * 9, n=2)
    assert told(e.step()) == [(None, (7,) * 9, 3)] * 2


def test_samples_of_a_prompt_of_any_length_begin_together(engine, monkeypatch):
    monkeypatch.setattr(composer, "QUICK_START_TOKENS", 100)
    monkeypatch.setattr(composer, "MOST_START_TOKENS", 120)
    e = engine(num_blocks=400, prefix_cache=True, max_batch_size=16)
    e.ask(1, list(range(40)), 20, n=8)
    output = e.step()
    assert [len(start.token_ids) for start in output.batch.starts] == [40] + [0] * 7
    assert len(output.batch.sampled_rows) == 8


def test_a_sample_whose_prompt_failed_in_the_step_is_lost_with_it(engine):
    e = engine()
    request = e.ask(1, [7] * 9, n=2)
    e.send()
    events = e.commit(failures=(RowFailure(0, "broken"),))
    assert events[-1].error == "broken"
    assert request.state.is_final
    assert e.used_blocks == 0


@pytest.mark.parametrize("start_prefixes", [False, True])
def test_a_fork_does_not_fail_because_its_parent_does(engine, start_prefixes: bool):
    """Its start is on the way when the parent fails: the compute plane poisons both slots."""
    e = engine(prefix_cache=True, start_prefixes=start_prefixes)
    e.ask(1, [7] * 9, max_tokens=1)
    e.run()
    parent = e.ask(2, [*[7] * 8, 8], max_tokens=9)
    e.send()
    child = Request(3, list(parent.input_tokens), GenerationParams(max_tokens=9, seed=2))
    e.scheduler.fork(2, child)
    e.send()
    e.commit(failures=(RowFailure(0, "broken"),))
    assert (parent.error, child.error) == ("broken", None)
    rows = e.in_flight[0].batch.num_rows
    e.commit(failures=tuple(RowFailure(row, "poisoned") for row in range(rows)) * start_prefixes)
    assert child.error is None
    e.run()
    assert child.output_tokens == [5] * 9
