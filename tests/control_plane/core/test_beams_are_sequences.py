"""A beam search in the scheduler: what steps start, copy and give up, and what is refused."""

from __future__ import annotations

import pytest

from control_plane.core.batch import StepResult, TokenLogprobs
from control_plane.core.errors import RequestNeverFitsError
from control_plane.core.generation_params import GenerationParams
from control_plane.core.request import FinishReason, Request, RequestState
from planes.errors import SchedulerError, ValidationError


def ask(e, prompt_len: int, max_tokens: int, width: int, n: int = 1, ends: int = 1) -> Request:
    params = GenerationParams(max_tokens=max_tokens, seed=1, beam_width=width, n=n)
    params.validate()
    request = Request(1, [7] * prompt_len, params, frozenset(range(90, 90 + ends)))
    e.scheduler.add_request(request)
    return request


def step(e, *tops: dict[int, float]):
    """Send a step and answer sample k with the log-probabilities `tops[k]`."""
    output = e.scheduler.schedule()
    logprobs = {
        k: TokenLogprobs(0.0, tuple(top), tuple(top.values())) for k, top in enumerate(tops)
    }
    result = StepResult(output.batch.step_id, [0] * len(tops), sample_logprobs=logprobs)
    return output.batch, e.scheduler.commit(result)


def test_beams_share_the_prompt_and_copy_only_its_half_full_tail(engine):
    e = engine()
    request = ask(e, prompt_len=6, max_tokens=3, width=2, n=2)
    batch, events = step(e, {1: -1.0, 2: -1.5, 3: -2.0, 4: -9.0})
    assert (batch.starts[0].params.num_logprobs, events) == (3, [])
    assert e.used_blocks == 2
    batch, _ = step(e, {5: -4.0, 6: -5.0, 7: -6.0, 8: -7.0}, {1: -0.1, 2: -0.2, 3: -9.0, 4: -10.0})
    assert [start.token_ids[6:] for start in batch.starts] == [(1,), (2,)]
    assert len(batch.copies) == 1
    # Both beams go on from the second: the first is given up, and its slot and tail with it.
    assert e.used_blocks == 2
    batch, events = step(e, {9: -0.1, 90: -9.0}, {9: -0.2, 90: -0.3})
    assert [start.token_ids[6:] for start in batch.starts] == [(2, 1), (2, 2)]
    assert [(x.sample_index, x.new_token_ids, x.state) for x in events] == [
        (0, (2, 1, 9), RequestState.DECODE),
        (1, (2, 2, 9), RequestState.COMPLETED),
    ]
    assert request.output_tokens == [2, 1, 9]
    assert request.finish_reason is FinishReason.LENGTH
    states = [change.state.value for change in request.history]
    assert states == ["pending", "prefill", "decode", "completed"]
    assert e.used_blocks == 0
    assert not e.scheduler.has_pending_work()


def test_what_no_beam_search_can_be_is_refused(engine):
    with pytest.raises(ValidationError, match="n must be at most beam_width"):
        GenerationParams(n=3, beam_width=2).validate()
    for field, value in (
        ("beam_width", 0),
        ("beam_width", 11),
        ("length_penalty", 11.0),
        ("early_stopping", 1),
    ):
        with pytest.raises(ValidationError, match=field):
            GenerationParams(**{field: value}).validate()
    with pytest.raises(ValidationError, match=r"at most max_num_seqs \(2\), .* got 3"):
        ask(engine(max_num_seqs=2), 1, 1, width=3)
    with pytest.raises(ValidationError, match="beam_width must be at most 9 with 11 end tokens"):
        ask(engine(), 1, 1, width=10, ends=11)
    # The prompt fills a block that all share; each of the three needs another one.
    with pytest.raises(RequestNeverFitsError, match=r"at most 1 .* with 3 beams.* needs 4 KV"):
        ask(engine(num_blocks=3), 4, 2, width=3)
    ask(engine(num_blocks=4), 4, 2, width=3)
    e = engine()
    parent = ask(e, 4, 2, width=3)
    child = Request(2, list(parent.input_tokens), GenerationParams(seed=1))
    with pytest.raises(SchedulerError, match="one sample"):
        e.scheduler.fork(1, child)


def test_what_a_beam_that_gives_way_has_in_flight_is_not_used(engine):
    e = engine(num_blocks=4, block_size=1, memory_threshold=1.0)
    older = Request(2, [5], GenerationParams(max_tokens=4, seed=1), frozenset({90}))
    e.scheduler.add_request(older)
    request = ask(e, prompt_len=1, max_tokens=2, width=1)
    outputs = [e.scheduler.schedule() for _ in range(3)]
    assert e.scheduler.schedule() is None  # it would take the beam's block, which is in flight
    likely = TokenLogprobs(-0.5, (1, 2), (-0.5, -1.0))
    e.scheduler.commit(StepResult(outputs[0].batch.step_id, [6, 0], sample_logprobs={1: likely}))
    assert request.state is RequestState.PENDING
    for output in outputs[1:]:
        e.scheduler.commit(StepResult(output.batch.step_id, [6] * len(output.batch.sampled_rows)))
    e.kv.check_invariants()
    while not older.state.is_final:
        output = e.scheduler.schedule()
        e.scheduler.commit(StepResult(output.batch.step_id, [6]))
    batch, _ = step(e, {3: -0.1, 4: -9.0})
    assert batch.starts[0].token_ids == (7,)
    step(e, {8: -0.1, 9: -9.0})
    assert request.output_tokens == [3, 8]


def test_a_beam_is_not_ended_from_outside(engine):
    e = engine()
    request = ask(e, prompt_len=6, max_tokens=3, width=2)
    split(e)
    assert e.scheduler.end_sample(1, 0, 0) is None
    assert (request.state, e.scheduler.get_stats().num_running) == (RequestState.DECODE, 2)


def test_ten_beams_with_two_end_tokens_ask_for_twelve_likely_tokens(engine):
    e = engine()
    ask(e, prompt_len=6, max_tokens=3, width=10, ends=2)
    assert e.scheduler.schedule().batch.starts[0].params.num_logprobs == 12


def split(e) -> None:
    """Let a search of width 2 follow two beams and compute the next token of both."""
    step(e, {1: -1.0, 2: -1.5, 3: -9.0})
    step(e, {4: -1.0, 5: -9.0, 6: -9.5}, {7: -1.0, 8: -9.0, 9: -9.5})


def test_a_pool_for_the_prompt_and_the_tail_of_each_beam_is_enough_after_a_new_start(engine):
    # The prompt fills 3 blocks; each beam computes 5 tokens more, which take 2.
    e = engine(num_blocks=3 + 2 * 2, memory_threshold=1.0)
    ask(e, prompt_len=12, max_tokens=6, width=2)
    split(e)
    e.scheduler.lose_epoch()
    assert e.used_blocks == 0
    batch, _ = step(e, {10: -1.0, 11: -9.0, 12: -9.5}, {10: -1.0, 11: -9.0, 12: -9.5})
    first, second = batch.starts
    assert first.block_ids[:3] == second.block_ids[:3]
    assert (batch.positions, batch.query_lens) == ([0, 12], [14, 2])
    assert e.used_blocks == 3 + 2


def test_a_beam_waits_while_another_computes_the_prompt_they_share(engine):
    e = engine(max_total_tokens=8)
    ask(e, prompt_len=12, max_tokens=6, width=2)
    output = e.scheduler.schedule()
    e.scheduler.commit(StepResult(output.batch.step_id, []))
    split(e)
    e.scheduler.lose_epoch()
    batches = [e.scheduler.schedule().batch for _ in range(2)]
    assert [(b.positions, b.query_lens) for b in batches] == [([0], [8]), ([8, 12], [6, 2])]
