"""A plane that dies of what it computes: who is given up for it, and who gets on."""

from __future__ import annotations

from functools import partial

import pytest
from structlog.testing import capture_logs

from control_plane.core.batch import StepResult, TokenLogprobs
from control_plane.core.generation_params import GenerationParams
from control_plane.core.kv_cache import KVCacheManager
from control_plane.core.request import Request, RequestState
from control_plane.core.scheduler import Scheduler, SchedulerConfig
from control_plane.engine.loop import EngineLoop
from control_plane.engine.vain_losses import MAX_LOSSES_WITHOUT_PROGRESS, MAX_VAIN_ROUNDS
from control_plane.errors import ComputeUnavailableError, LinkError


class Plane:
    """A link to a plane that is there at once, and dies of steps for which `kills` says so.

    `refuses`: says which it answers with a refusal.
    """

    def __init__(self, kills):
        self.kills = kills
        self.refuses = lambda _: False
        self.num_losses = 0
        self.steps = []

    def open(self):
        self.steps = []
        return 0

    def close(self):
        pass

    def interrupt(self):
        pass

    def send(self, batch):
        self.steps.append(batch)

    def receive(self, _):
        if not self.steps:
            return None
        batch = self.steps.pop(0)
        if self.kills(batch):
            self.num_losses += 1
            raise LinkError("the plane is dead")
        if self.refuses(batch):
            return StepResult(batch.step_id, refusal="EXECUTION_FAILED")
        sampled = [5] * len(batch.sampled_rows)
        logprobs = {
            k: TokenLogprobs(-1.0, tuple(range(1, 9)), tuple(-float(t) for t in range(1, 9)))
            for k in range(len(sampled))
        }
        return StepResult(batch.step_id, sampled, sample_logprobs=logprobs)


class Engine:
    """A loop before such a plane, and the ends of its requests."""

    def __init__(self, kills, on_link_change=None, **limits):
        kv = KVCacheManager(256, 4)
        self.ends = {}
        self.plane = Plane(kills)
        self.loop = EngineLoop(
            Scheduler(SchedulerConfig(**limits), kv),
            self.plane,
            self.collect,
            memory_stats=kv.get_memory_stats,
            on_link_change=on_link_change,
        )

    def collect(self, updates):
        self.ends |= {update.request_id: update.end for update in updates if update.end}

    def submit(self, request_id, num_prompt_tokens, max_tokens=3, *, token=1, priority=0, **params):
        params = GenerationParams(max_tokens=max_tokens, seed=1, **params)
        request = Request(
            request_id,
            [token] * num_prompt_tokens,
            params,
            arrival_time=request_id,
            priority=priority,
        )
        self.loop.inbox.submit(request)

    def run(self):
        for _ in range(500):
            self.loop.step()
            if not self.loop.has_pending_work:
                return
        raise AssertionError(f"nothing has come of it after {self.plane.num_losses} losses")

    def failed(self):
        return sorted(n for n, end in self.ends.items() if end.state is RequestState.FAILED)


KILLERS = (3, 7, 1, 2)


def reads_past(position):
    """A plane that dies of a token behind `position`."""
    return lambda batch: any(
        first + length > position
        for first, length in zip(batch.positions, batch.query_lens, strict=True)
    )


def starts_nine(batch):
    """A plane that dies of a prompt with a token 9 in it, when it is started."""
    return any(9 in start.token_ids for start in batch.starts)


@pytest.mark.parametrize(("num_prompt_tokens", "num_vain_losses"), [(20, 5), (6, 6)])
def test_a_request_that_kills_the_plane_far_on_is_given_up_and_others_get_on(
    num_prompt_tokens, num_vain_losses
):
    engine = Engine(reads_past(8), max_total_tokens=4)
    # The first tokens have a result each time; a short prompt has some of its answer, once.
    engine.submit(1, num_prompt_tokens, max_tokens=20)
    engine.submit(2, 2)
    engine.run()
    assert isinstance(engine.ends[1].error, ComputeUnavailableError)
    assert "while they computed this request" in engine.ends[1].error.message
    assert engine.ends[2].state is RequestState.COMPLETED
    assert engine.plane.num_losses == num_vain_losses


@pytest.mark.parametrize("params", [{}, {"n": 2}, {"beam_width": 2}], ids=str)
def test_a_request_that_gets_on_between_losses_is_never_given_up(params):
    num_steps = 0

    def every_third(_):
        nonlocal num_steps
        num_steps += 1
        return num_steps % 3 == 0

    engine = Engine(every_third)
    engine.submit(1, 4, max_tokens=30, **params)
    engine.run()
    assert engine.ends[1].state is RequestState.COMPLETED
    assert engine.plane.num_losses > 2 * MAX_LOSSES_WITHOUT_PROGRESS


def test_a_plane_that_never_has_a_result_ends_all_requests():
    engine = Engine(lambda _: True, max_num_seqs=1)
    for request_id in range(1, 21):
        engine.submit(request_id, 4)  # one runs, the others wait
    engine.run()
    assert all(type(end.error) is ComputeUnavailableError for end in engine.ends.values())
    blamed = [n for n in engine.ends if "this request" in engine.ends[n].error.message]
    assert blamed == list(range(1, MAX_VAIN_ROUNDS + 1))
    # Between two who are given up one is computed who has nothing to do with it.
    num_losses = MAX_VAIN_ROUNDS * MAX_LOSSES_WITHOUT_PROGRESS + MAX_VAIN_ROUNDS - 1
    words = f"lost {num_losses} times in a row without a result"
    assert all(words in engine.ends[n].error.message for n in range(4, 21))
    assert engine.plane.num_losses == num_losses


def test_who_only_waited_is_not_given_up_with_the_request_that_kills_at_once():
    engine = Engine(
        starts_nine,
        max_num_seqs=2,
        max_batch_size=2,
    )
    engine.submit(1, 4, token=9)
    for request_id in range(2, 12):
        engine.submit(request_id, 4)
    engine.run()
    states = [engine.ends[n].state.value for n in range(1, 12)]
    assert states == ["failed", *["completed"] * 10]
    assert engine.plane.num_losses == MAX_LOSSES_WITHOUT_PROGRESS


def test_who_waits_is_not_given_up_for_what_the_plane_was_lost_with():
    engine = Engine(reads_past(8), max_total_tokens=8, max_num_seqs=1)
    for request_id in (1, 2, 3):
        engine.submit(request_id, 20 if request_id < 3 else 2)
    engine.run()
    assert [engine.ends[n].state.value for n in (1, 2, 3)] == ["failed", "failed", "completed"]
    assert engine.plane.num_losses == 2 * MAX_LOSSES_WITHOUT_PROGRESS


@pytest.mark.parametrize("max_total_tokens", [256, 8])
@pytest.mark.parametrize("num_killers", [1, 2, 4])
def test_who_was_in_the_steps_of_a_request_that_kills_at_once_gets_on(
    num_killers, max_total_tokens
):
    """They are computed one at a time until it is known who it is.

    Also where others have a result each time before that step.
    """
    engine = Engine(starts_nine, max_total_tokens=max_total_tokens)
    for request_id in range(1, 9):
        engine.submit(request_id, 4, 20, token=9 if request_id in KILLERS[:num_killers] else 1)
    engine.run()
    assert engine.failed() == sorted(KILLERS[:num_killers])
    assert engine.plane.num_losses <= 2 + num_killers * MAX_LOSSES_WITHOUT_PROGRESS


@pytest.mark.parametrize("num_killers", [5, 12])
def test_however_many_kill_the_plane_others_get_on_behind_them(num_killers):
    """Between two of them it is seen that the plane works."""
    engine = Engine(starts_nine)
    for request_id in range(1, num_killers + 5):
        engine.submit(request_id, 4, 20, token=9 if request_id <= num_killers else 1)
    engine.run()
    assert engine.failed() == list(range(1, num_killers + 1))


class SamplesNine:
    """A plane that dies when a prompt with a token 9 in it is at its end."""

    def __init__(self):
        self.has_nine = {}

    def __call__(self, batch):
        self.has_nine |= {start.slot: 9 in start.token_ids for start in batch.starts}
        return any(self.has_nine[batch.slots[row]] for row in batch.sampled_rows)


def test_who_comes_with_one_that_kills_at_its_end_gets_on_beside_streams_that_have_results():
    engine = Engine(SamplesNine(), max_total_tokens=64)
    for request_id in (1, 2, 3):
        engine.submit(request_id, 20, 60)
    for _ in range(3):
        engine.loop.step()
    engine.submit(4, 20, 60, token=9)
    for request_id in range(5, 9):
        engine.submit(request_id, 8, 60)
    engine.run()
    assert engine.failed() == [4]
    assert engine.plane.num_losses == MAX_LOSSES_WITHOUT_PROGRESS


def test_who_shares_the_last_chunk_of_a_long_prompt_that_kills_gets_on():
    engine = Engine(reads_past(16), max_total_tokens=4)
    engine.submit(1, 18)
    for request_id in (2, 3, 4):
        engine.submit(request_id, 1)
    engine.run()
    assert engine.failed() == [1]


@pytest.mark.parametrize("num_turns", range(0, 10, 3))
@pytest.mark.parametrize("beam_width", [2, 4])
def test_a_beam_search_gets_on_beside_requests_that_kill(beam_width, num_turns):
    engine = Engine(SamplesNine())
    engine.submit(1, 4, 40, beam_width=beam_width)
    engine.submit(2, 4, 40)
    for _ in range(num_turns):
        engine.loop.step()
    engine.submit(3, 4, 40, token=9)
    engine.submit(4, 4, 40, token=9)
    engine.run()
    assert engine.failed() == [3, 4]


def test_requests_that_move_take_along_what_they_are_suspected_of():
    """Two planes that each hand all they have to the other when they are lost."""
    engines = []

    def hand_over(number, is_linked):
        if not is_linked:
            other = engines[1 - number].loop.inbox
            engines[number].loop.inbox.withdraw(
                lambda _: True, lambda moving: [other.adopt(each) for each in moving]
            )

    for number in (0, 1):
        engines.append(Engine(starts_nine, partial(hand_over, number)))
        engines[number].loop.step()
    for request_id in range(1, 9):
        engines[0].submit(request_id, 4, 20, token=9 if request_id == 3 else 1)
    for _ in range(500):
        for engine in engines:
            engine.loop.step()
    ends = engines[0].ends | engines[1].ends
    failed = [n for n in range(1, 9) if ends[n].state is RequestState.FAILED]
    assert failed == [3]
    assert sum(engine.plane.num_losses for engine in engines) == MAX_LOSSES_WITHOUT_PROGRESS


def test_nobody_waits_any_more_once_it_is_known_who_it_is():
    engine = Engine(starts_nine)
    engine.submit(1, 4, 50)
    engine.submit(2, 4, 50, token=9)
    engine.submit(3, 4, 50)
    while 2 not in engine.ends:
        engine.loop.step()
    engine.submit(4, 4, 50)
    num_together = 0
    for _ in range(40):
        engine.loop.step()
        num_together = max(num_together, *(len(step.slots) for step in engine.plane.steps), 0)
    assert num_together == 3
    engine.run()


def test_one_on_trial_that_is_cancelled_keeps_nobody_waiting():
    engine = Engine(starts_nine)
    engine.submit(1, 4, 20, token=9)
    engine.submit(2, 4, 20)
    while engine.plane.num_losses < 3:
        engine.loop.step()
    engine.loop.inbox.cancel(1)
    engine.run()
    assert engine.ends[1].state is RequestState.CANCELLED
    assert engine.ends[2].state is RequestState.COMPLETED


def test_steps_that_are_refused_are_not_held_against_those_of_the_next_step():
    def is_bad(batch):
        return any(9 in start.token_ids for start in batch.starts)

    engine = Engine(lambda _: False, max_total_tokens=4)
    engine.plane.refuses = is_bad
    engine.submit(1, 80)
    for request_id in range(2, 3 + MAX_LOSSES_WITHOUT_PROGRESS):
        engine.submit(request_id, 4, token=9, priority=-1)
        while request_id not in engine.ends:
            engine.loop.step()
        assert engine.ends[request_id].state is RequestState.FAILED
    assert 1 not in engine.ends
    engine.run()
    assert engine.ends[1].state is RequestState.COMPLETED


def test_a_plane_that_is_lost_is_a_warning_and_a_step_that_it_refuses_an_error():
    engine = Engine(reads_past(5))
    engine.submit(1, 2)
    engine.run()
    with capture_logs() as lines:
        engine.submit(2, 6)
        engine.run()
        engine.plane.kills, refused = (lambda _: False), []
        engine.plane.refuses = lambda _: not refused and not refused.append(True)
        engine.submit(3, 2)
        engine.run()
    levels = [line["log_level"] for line in lines if line["event"] == "link lost"]
    assert levels == ["warning"] * MAX_LOSSES_WITHOUT_PROGRESS + ["error"]
