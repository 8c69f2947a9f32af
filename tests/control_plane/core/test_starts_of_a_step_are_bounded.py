"""Slots are started with all their tokens: a step has as many of those as it can send quickly."""

from __future__ import annotations

import pytest

from control_plane.core import composer
from control_plane.core.batch import StepResult, TokenLogprobs
from control_plane.core.step import Step
from tests.control_plane.core import test_beams_are_sequences as beams


def started(output):
    return [len(start.token_ids) for start in output.batch.starts]


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(composer, "QUICK_START_TOKENS", 100)
    monkeypatch.setattr(composer, "MOST_START_TOKENS", 400)


@pytest.mark.usefixtures("few")
def test_samples_of_a_long_prompt_begin_a_few_a_step_where_their_prompt_is_found_again(
    engine,
) -> None:
    e = engine(num_blocks=400, prefix_cache=True, max_batch_size=16)
    e.ask(1, list(range(40)), 20, n=8)
    outputs = [e.step() for _ in range(5)]
    assert [started(output) for output in outputs] == [[40, 40], [40, 40], [40, 40], [40, 40], []]
    assert [output.batch.query_lens[-1] for output in outputs[:4]] == [40, 4, 4, 4]
    e.run()
    assert e.used_blocks == 0


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("uses_cache", [True, False])
def test_they_begin_together_where_each_would_compute_its_prompt_anew(
    engine, uses_cache: bool
) -> None:
    e = engine(num_blocks=400, prefix_cache=not uses_cache, max_batch_size=16)
    e.ask(1, list(range(40)), 20, n=8, uses_cache=uses_cache)
    assert started(e.step()) == [40] * 8


@pytest.mark.usefixtures("few")
def test_no_message_is_larger_than_it_may_be(engine) -> None:
    e = engine(num_blocks=900, max_batch_size=32)
    e.ask(1, list(range(40)), 20, n=16)
    assert started(e.step()) == [40] * 10
    e.run()


@pytest.mark.usefixtures("few")
def test_requests_are_admitted_a_few_a_step_and_a_longer_one_alone(engine) -> None:
    e = engine(num_blocks=900, prefix_cache=True)
    for number, length in enumerate((60, 60, 500, 10), 1):
        e.ask(number, [number] * length, 4, arrival_time=number)
    assert [started(e.step()) for _ in range(4)] == [[60], [60], [500], [10]]
    e.run()


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(("num_known", "num_new"), [(20, 30), (60, 4), (30, 200)])
def test_beams_that_are_started_in_every_step_keep_nobody_waiting(
    engine, num_known: int, num_new: int
) -> None:
    e = engine(num_blocks=900, max_total_tokens=400)
    beams.ask(e, num_known, 40, width=4)
    top = TokenLogprobs(0.0, tuple(range(1, 9)), tuple(-float(token) for token in range(1, 9)))
    starts = []
    for number in range(9):
        if number == 6:
            assert sum(starts[-1]) > 4 * num_known  # of all beams
            e.ask(2, [2] * num_new, 4, arrival_time=1.0)
        output = e.scheduler.schedule()
        starts.append(started(output))
        num_rows = len(output.batch.sampled_rows)
        result = StepResult(
            output.batch.step_id,
            [1] * num_rows,
            sample_logprobs=dict.fromkeys(range(num_rows), top),
        )
        e.scheduler.commit(result)
    assert num_new in starts[6]


def test_real_bounds_leave_ordinary_steps_alone() -> None:
    assert composer.QUICK_START_TOKENS >= 32 * 4096
    assert composer.MOST_START_TOKENS * 5 < 1 << 25  # bytes; a message may have twice as many
    assert Step(1).num_start_tokens == 0
