"""Faults of all kinds, drawn by Hypothesis, on real processes with the simulated executor.

Its text shows every token that was read from a wrong block. The processes live on from one schedule
to the next; after each, no block is used and descriptors and memory are what they were before all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.faults.deployment import deployed
from tests.faults.schedules import CONFIG, Schedule, Stage, schedules


class Theatre:
    """One stage for all schedules; after a failure, a new one."""

    def __init__(self, **options) -> None:
        self._options = options
        self._open = contextlib.ExitStack()
        self._stage: Stage | None = None

    def run(self, schedule: Schedule) -> None:
        if self._stage is None:
            self._stage = Stage.of(self._open.enter_context(deployed(CONFIG, **self._options)))
        try:
            self._stage.run(schedule)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._stage = None
        self._open.close()


@contextlib.contextmanager
def theatre(**options) -> Iterator[Theatre]:
    made = Theatre(**options)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def one_plane():
    with theatre(cuttable=True) as made:
        yield made


@pytest.fixture(scope="module")
def two_planes():
    with theatre(num_compute=2) as made:
        yield made


# A schedule takes seconds, and processes do not repeat themselves exactly: nothing is shrunk.
CAMPAIGN = settings(
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.wide
@settings(CAMPAIGN, max_examples=3)
@given(schedules())
def test_three_schedules_of_faults_change_no_text(one_plane, schedule):
    one_plane.run(schedule)


@pytest.mark.slow
@settings(CAMPAIGN, max_examples=100)
@given(schedules())
def test_a_hundred_schedules_of_faults_change_no_text(one_plane, schedule):
    one_plane.run(schedule)


@pytest.mark.slow
@settings(CAMPAIGN, max_examples=50)
@given(schedules(num_planes=2, has_proxy=False))
def test_fifty_schedules_of_faults_of_two_planes_change_no_text(two_planes, schedule):
    two_planes.run(schedule)
