"""Three faults of a kind in the middle of 24 streams of the embedded model, each kind in turn.

Every text must be the one of an undisturbed run, where the executor promises that, else no token
may be lost and each must go on from those before it; and the planes must then use what they used
before. How long streams stood still is recorded (`longest_gap_s`), never asserted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest

from control_plane.core.generation_params import GenerationParams
from control_plane.core.structured_outputs import StructuredOutputs
from tests.faults.crowd import Answer, Asked, Crowd, check_answers, hear_all
from tests.faults.deployment import MIB, Deployment, Usage, deployed
from tests.golden.prompts import PROMPTS
from tests.judging import Judge
from tests.waiting import wait_until

pytestmark = pytest.mark.model

NUM_STREAMS = 24
NUM_FAULTS = 3
ALLOWANCE_BYTES = 64 * MIB
"""Of resident memory; pools are so small that an undisturbed run touches nearly all of them."""


LIST = StructuredOutputs(json={"type": "array", "items": {"type": "string"}, "minItems": 9})
ROW = {"type": "object", "properties": {"boat": {"enum": ["red", "blue"]}}, "required": ["boat"]}
TABLE = StructuredOutputs(json={"type": "array", "items": ROW, "minItems": 99})


def without_stops(length: int) -> list[Asked]:
    """Staggered lengths; greedy, seeded, narrow and broad sampling; two samples now and then.

    `length`: all are so many times as long.
    """
    texts = list(PROMPTS.values())
    return [
        Asked(
            texts[i % len(texts)],
            GenerationParams(
                max_tokens=length * (24 + 6 * (i % 9)),
                temperature=(0.0, 0.8, 1.1)[i % 3],
                top_p=0.9 if i % 4 else 1.0,
                top_k=40 if i % 5 == 0 else 0,
                seed=i,
                n=2 if i % 6 == 5 else 1,
                ignore_eos=i % 8 != 7,
                structured_outputs=LIST if i % 8 == 3 else None,
            ),
        )
        for i in range(NUM_STREAMS)
    ]


@dataclass(frozen=True, slots=True)
class Oracle:
    """The requests, what an undisturbed run says to them, and what the planes use after it."""

    requests: list[Asked]
    answers: list[Answer]
    usage: list[Usage]

    @property
    def num_tokens(self) -> int:
        return sum(answer.num_tokens for answer in self.answers)


def undisturbed(deployment: Deployment, *, length: int = 1) -> Oracle:
    """Let every fourth stream be stopped by its own text, then run all."""
    requests = without_stops(length)
    stopped = range(2, NUM_STREAMS, 4)
    unstopped = hear_all(deployment.address, [requests[i] for i in stopped])
    for i, answer in zip(stopped, unstopped, strict=True):
        text = answer.texts[0]
        stop = text[len(text) * 2 // 3 :][:6]
        params = replace(requests[i].params, stop=(stop,), include_stop=i % 8 == 2)
        requests[i] = replace(requests[i], params=params)
    answers = hear_all(deployment.address, requests)
    assert {reason for answer in answers for reason in answer.reasons.values()} == {
        "stop",
        "length",
    }
    return Oracle(requests, answers, deployment.usage())


@pytest.fixture(scope="module")
def one_plane(target) -> Iterator[tuple[Deployment, Oracle]]:
    with deployed(target.config(log_level="info", max_num_blocks=224)) as deployment:
        yield deployment, undisturbed(deployment)


@pytest.fixture(scope="module")
def two_planes(target) -> Iterator[tuple[Deployment, Oracle]]:
    config = target.config(log_level="info", num_threads=1, max_num_blocks=256)
    with deployed(config, num_compute=2) as deployment:
        # Longer: they go on while one plane is away, and all three faults must meet them.
        yield deployment, undisturbed(deployment, length=6)


def campaign(
    deployment: Deployment,
    oracle: Oracle,
    fault: Callable[[int], None],
    judge: Judge,
    measured: Callable[[str, object], None],
) -> None:
    """Let `fault` happen three times, each after another sixth of all tokens."""
    with deployment.explained():
        with Crowd(deployment.address) as crowd:
            crowd.ask(oracle.requests)
            for number in range(NUM_FAULTS):
                crowd.progress.wait_for(crowd.progress.num_tokens + oracle.num_tokens // 6)
                assert crowd.progress.num_open > NUM_STREAMS // 6
                fault(number)
            answers = crowd.answers()
        check_answers(judge, crowd.readers, answers, oracle.answers)
        growths = deployment.check_at_rest(oracle.usage, ALLOWANCE_BYTES)
    measured("longest_gap_s", round(crowd.longest_gap_s, 2))
    measured("memory_growth_mib", [round(growth / MIB, 1) for growth in growths])


@pytest.mark.slow
def test_three_kills_of_the_compute_plane_change_no_text(one_plane, judge, measured):
    deployment, oracle = one_plane
    (plane,) = deployment.compute
    before = deployment.metrics.num_plane_losses

    def kill(_: int) -> None:
        plane.kill()
        plane.start()

    campaign(deployment, oracle, kill, judge, measured)
    assert deployment.metrics.num_plane_losses == before + NUM_FAULTS


@pytest.mark.wide
def test_a_kill_between_drafts_changes_no_text(target, judge):
    song = "Row, row, row your boat gently down the stream. " * 4
    # A GPU's text repeats itself later, and is there sooner.
    length = 90 if target.keeps_bits else 200
    greedy = GenerationParams(max_tokens=length, temperature=0.0, ignore_eos=True)
    asked = [Asked(song, greedy), Asked(song, replace(greedy, structured_outputs=TABLE))]
    config = target.config(log_level="info", max_num_blocks=64)
    with deployed(replace(config, grammar_drafts=False)) as plain:
        expected = hear_all(plain.address, asked)
    with deployed(replace(config, speculative_tokens=7)) as deployment, deployment.explained():
        with Crowd(deployment.address) as crowd:
            crowd.ask(asked)
            crowd.progress.wait_for(24)
            wait_until(lambda: deployment.metrics.num_kept_drafts > 0, "a draft that is right")
            assert crowd.progress.num_open == 2
            deployment.compute[0].kill()
            deployment.compute[0].start()
            answers = crowd.answers()
        check_answers(judge, crowd.readers, answers, expected)
        assert deployment.metrics.num_plane_losses == 1


@pytest.mark.slow
def test_a_compute_plane_stopped_three_times_is_taken_over_when_it_wakes(
    one_plane, judge, measured
):
    deployment, oracle = one_plane
    (plane,) = deployment.compute
    before = plane.describe()

    def stop(_: int) -> None:
        assert deployment.stop_until_lost()

    campaign(deployment, oracle, stop, judge, measured)
    after = plane.describe()
    assert after.epoch == before.epoch
    assert after.current_session == before.current_session + NUM_FAULTS


@pytest.mark.slow
def test_three_orderly_restarts_of_the_compute_plane_change_no_text(one_plane, judge, measured):
    deployment, oracle = one_plane
    (plane,) = deployment.compute

    def restart(_: int) -> None:
        plane.terminate()
        plane.start()

    campaign(deployment, oracle, restart, judge, measured)


@pytest.mark.slow
def test_clients_resume_over_three_kills_of_the_control_plane(one_plane, judge, measured):
    deployment, oracle = one_plane
    (plane,) = deployment.compute
    before = plane.describe()

    def kill(_: int) -> None:
        deployment.kill_control()
        deployment.start_control()

    campaign(deployment, oracle, kill, judge, measured)
    after = plane.describe()
    assert after.epoch == before.epoch  # weights and pool stayed
    assert after.current_session == before.current_session + NUM_FAULTS


@pytest.mark.slow
def test_of_two_planes_each_may_be_killed_in_turn(two_planes, judge, measured):
    deployment, oracle = two_planes

    def kill(number: int) -> None:
        plane = deployment.compute[number % 2]
        plane.kill()
        plane.start()

    campaign(deployment, oracle, kill, judge, measured)


@pytest.mark.slow
def test_of_two_planes_each_may_stand_still_in_turn(two_planes, judge, measured):
    deployment, oracle = two_planes

    def stop(number: int) -> None:
        assert deployment.stop_until_lost(number % 2)

    campaign(deployment, oracle, stop, judge, measured)
