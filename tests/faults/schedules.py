"""Schedules of faults: drawn, and let happen to a deployment while a crowd reads.

Moments are counted in tokens that the readers have seen, not in seconds. The oracle is what each
request of the catalogue is told when nothing happens.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from control_plane.core.generation_params import GenerationParams
from hetero_infer.config import EngineConfig
from tests.faults.crowd import Answer, Asked, Crowd, hear_all
from tests.faults.cuttable_proxy import Way
from tests.faults.deployment import MIB, Deployment, Usage

CATALOGUE_SIZE = 24
MAX_STREAMS = 12
MAX_FAULTS = 4
"""Fewer than losses of the plane in a row after which requests are given up, rightly."""

MAX_MOMENT_TOKENS = 600
MAX_CUT_BYTES = 3000
MAX_STOP_S = 8.0
"""A plane that is stopped before it was opened is never lost. This is far below requests' grace."""

ALLOWANCE_BYTES = 64 * MIB

CONFIG = EngineConfig(
    executor="simulated",
    log_level="info",
    block_size=4,
    max_num_blocks=600,  # not enough for all at once: some are preempted too
    swap_space=2e-6,
    prefill_chunk=48,
)


class Kind(enum.Enum):
    """What happens."""

    KILL = "the compute plane is killed; some clients leave; it is started again"
    RESTART = "the compute plane is told to end, and started again"
    STOP = "the compute plane stands still for a moment"
    STOP_UNTIL_LOST = "the compute plane stands still until it is given up, and wakes"
    KILL_CONTROL = "the control plane is killed and started again"
    KILL_BOTH = "both are killed; the control plane comes back first"
    CUT = "the connection between the planes breaks"
    CUT_AFTER = "the connection between the planes breaks after so many more bytes"
    LEAVE = "some clients leave"
    ASK = "more requests come"


WITH_PROXY = (Kind.CUT, Kind.CUT_AFTER)


@dataclass(frozen=True, slots=True)
class Fault:
    """A kind, and when: after so many more tokens.

    `which`: of the clients (by place) or of the catalogue. `plane`: of the compute planes.
    """

    after_tokens: int
    kind: Kind
    which: tuple[int, ...] = ()
    plane: int = 0
    way: Way = Way.UP
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Schedule:
    """Requests to begin with, by their place in the catalogue, and faults in turn."""

    asked: tuple[int, ...]
    faults: tuple[Fault, ...]


def schedules(*, num_planes: int = 1, has_proxy: bool = True) -> st.SearchStrategy[Schedule]:
    """Draw a schedule; long stops, which take seconds, are rarer than the rest."""
    kinds = [kind for kind in Kind if has_proxy or kind not in WITH_PROXY]
    common = [kind for kind in kinds if kind is not Kind.STOP_UNTIL_LOST]
    places = st.integers(0, CATALOGUE_SIZE - 1)
    faults = st.builds(
        Fault,
        after_tokens=st.integers(1, MAX_MOMENT_TOKENS),
        kind=st.sampled_from([*common, *kinds]),
        which=st.lists(places, min_size=1, max_size=4, unique=True).map(tuple),
        plane=st.integers(0, num_planes - 1),
        way=st.sampled_from(Way),
        num_bytes=st.integers(1, MAX_CUT_BYTES),
    )
    return st.builds(
        Schedule,
        asked=st.lists(places, min_size=4, max_size=MAX_STREAMS, unique=True).map(tuple),
        faults=st.lists(faults, min_size=1, max_size=MAX_FAULTS).map(tuple),
    )


def catalogue() -> list[Asked]:
    """Prompts of many lengths, some alike at first; greedy and seeded; one sample or two."""
    beginnings = ["", "What all of these have in common is how they begin. " * 2]
    return [
        Asked(
            beginnings[i % 2] + f"prompt {i} " * (1 + i % 5),
            GenerationParams(
                max_tokens=120 + 20 * (i % 12),
                temperature=0.0 if i % 3 == 0 else 0.9,
                seed=i,
                n=2 if i % 8 == 7 else 1,
                ignore_eos=i % 4 != 1,
            ),
        )
        for i in range(CATALOGUE_SIZE)
    ]


@dataclass(slots=True)
class Stage:
    """A deployment, what undisturbed requests are told on it, and what it uses at rest."""

    deployment: Deployment
    requests: list[Asked]
    answers: list[Answer]
    usage: list[Usage]

    @classmethod
    def of(cls, deployment: Deployment) -> Stage:
        """Run all, and every sixth once more, stopped by two characters of its own text."""
        requests = catalogue()
        answers = hear_all(deployment.address, requests)
        stopped = range(3, CATALOGUE_SIZE, 6)
        for i in stopped:
            text = answers[i].texts[0]
            stop = (text[len(text) * 2 // 3 :][:2],)
            requests[i] = replace(requests[i], params=replace(requests[i].params, stop=stop))
        again = hear_all(deployment.address, [requests[i] for i in stopped])
        for i, answer in zip(stopped, again, strict=True):
            answers[i] = answer
        return cls(deployment, requests, answers, deployment.usage())

    def run(self, schedule: Schedule) -> None:
        """Let it happen; check every text and what is left."""
        with self.deployment.explained():
            with Crowd(self.deployment.address) as crowd:
                asked = list(schedule.asked)
                crowd.ask([self.requests[place] for place in asked])
                left: set[int] = set()
                for fault in schedule.faults:
                    crowd.progress.wait_for(crowd.progress.num_tokens + fault.after_tokens)
                    if fault.kind in (Kind.LEAVE, Kind.KILL):
                        left.update(number % len(asked) for number in fault.which)
                    elif fault.kind is Kind.ASK:
                        asked += fault.which
                    self._happen(fault, crowd)
                answers = crowd.answers()
            self._check(crowd, asked, answers, left)
            self.deployment.check_at_rest(self.usage, ALLOWANCE_BYTES)

    def _check(self, crowd: Crowd, asked: list[int], answers: list[Answer], left: set[int]) -> None:
        for number, (place, answer) in enumerate(zip(asked, answers, strict=True)):
            whole = self.answers[place]
            assert answer == whole or (number in left and answer.is_beginning_of(whole)), place
            for beginning in crowd.readers[number].given_up:
                assert beginning.is_beginning_of(whole), place

    def _happen(self, fault: Fault, crowd: Crowd) -> None:
        deployment = self.deployment
        plane = deployment.compute[fault.plane]

        def leave() -> None:
            present = len(crowd.readers)
            for number in fault.which:
                crowd.readers[number % present].leave()

        def kill() -> None:
            plane.kill()
            leave()
            plane.start()

        def restart() -> None:
            plane.terminate()
            plane.start()

        def stop() -> None:
            plane.stop()
            plane.wake()

        def stop_until_lost() -> None:
            deployment.stop_until_lost(fault.plane, MAX_STOP_S)

        def kill_control() -> None:
            deployment.kill_control()
            deployment.start_control()

        def kill_both() -> None:
            plane.kill()
            deployment.kill_control()
            deployment.launch_control()
            plane.start()
            deployment.wait_control()

        def cut() -> None:
            assert plane.proxy is not None
            plane.proxy.cut()

        def cut_after() -> None:
            assert plane.proxy is not None
            plane.proxy.cut_after(fault.way, fault.num_bytes)

        happenings: dict[Kind, Callable[[], None]] = {
            Kind.KILL: kill,
            Kind.RESTART: restart,
            Kind.STOP: stop,
            Kind.STOP_UNTIL_LOST: stop_until_lost,
            Kind.KILL_CONTROL: kill_control,
            Kind.KILL_BOTH: kill_both,
            Kind.CUT: cut,
            Kind.CUT_AFTER: cut_after,
            Kind.LEAVE: leave,
            Kind.ASK: lambda: crowd.ask([self.requests[place] for place in fault.which]),
        }
        happenings[fault.kind]()
