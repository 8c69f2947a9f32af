from __future__ import annotations

from control_plane.core.batch import EndToken, StepResult, TokenLogprobs
from control_plane.core.request import RequestState
from control_plane.engine.ledger import Ledger

EOS = 0
"""Of the engine in `conftest`."""


def test_the_log_probabilities_of_a_sample_come_with_its_token_and_with_no_other(engine) -> None:
    plane = engine()
    first, last = plane.submit(1, 3), plane.submit(2, 3, max_tokens=1)
    batch = plane.send().batch
    of_first, of_last = TokenLogprobs(-0.5, (7,), (-0.5,)), TokenLogprobs(-2.0)
    ledger = Ledger(lambda: 0.0)
    ledger.admit(first)
    ledger.admit(last)
    result = StepResult(batch.step_id, [7, 8], sample_logprobs={0: of_first, 1: of_last})
    events = plane.scheduler.commit(result)
    assert [(e.request_id, e.new_token_ids, e.logprobs) for e in events] == [
        (1, (7,), (of_first,)),
        (2, (8,), (of_last,)),
    ]
    assert events[1].state is RequestState.COMPLETED
    for event in events:
        ledger.take(event)
    assert [update.logprobs for update in ledger.take_updates()[2:]] == [(of_first,), (of_last,)]
    plane.in_flight.clear()
    plain = plane.send().batch
    assert plane.scheduler.commit(StepResult(plain.step_id, [9]))[0].logprobs == ()


def test_the_token_that_ends_a_sample_and_is_not_returned_has_its_log_probability_too(engine):
    plane = engine()
    request, plain = plane.submit(1, 3), plane.submit(2, 3)
    batch = plane.send().batch
    ledger = Ledger(lambda: 0.0)
    ledger.admit(request)
    ledger.admit(plain)
    result = StepResult(batch.step_id, [EOS, EOS], sample_logprobs={0: TokenLogprobs(-0.25)})
    events = plane.scheduler.commit(result)
    end = EndToken(EOS, TokenLogprobs(-0.25))
    assert [(e.new_token_ids, e.logprobs, e.end_token) for e in events] == [
        ((), (), end),
        ((), (), None),
    ]
    for event in events:
        ledger.take(event)
    assert [update.end_token for update in ledger.take_updates()[2:]] == [end, None]
