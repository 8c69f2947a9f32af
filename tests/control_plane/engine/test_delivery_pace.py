"""A busy event loop is given tokens less often; one with time to spare at once."""

import pytest

from control_plane.engine.delivery_pace import (
    CREDIT_S,
    LONGEST_PAUSE_S,
    MOST_BUSY,
    DeliveryPace,
)


class PlayedLoop:
    """An event loop that is asked to deliver every `step_s` and takes `cost_s` to do it."""

    def __init__(self, *, step_s, cost_s):
        self.now = self.busy = 0.0
        self.pace = DeliveryPace(lambda: self.now, lambda: self.busy)
        self.step_s, self.cost_s = step_s, cost_s
        self.pauses = []

    def run(self, num_deliveries):
        """Deliver so often; return the pauses in between."""
        pauses = [self.deliver() for _ in range(num_deliveries)]
        self.pauses += pauses
        return pauses

    def deliver(self):
        pause_s = self.pace.pause_s()
        self.work(self.cost_s)
        self.now += pause_s + max(0.0, self.step_s - self.cost_s - pause_s)
        return pause_s

    def work(self, seconds):
        self.now += seconds
        self.busy += seconds


def test_a_loop_with_time_to_spare_is_given_tokens_as_they_come():
    loop = PlayedLoop(step_s=0.020, cost_s=0.9 * MOST_BUSY * 0.020)
    assert loop.run(1000) == [0.0] * 1000


@pytest.mark.parametrize("cost_ms", [0.5, 1.6, 4.0])
def test_a_busy_loop_works_a_part_of_its_time_whatever_a_delivery_costs(cost_ms):
    loop = PlayedLoop(step_s=0.001, cost_s=cost_ms / 1e3)
    loop.run(200)  # its credit is used up
    now, busy = loop.now, loop.busy
    loop.run(500)
    assert (loop.busy - busy) / (loop.now - now) == pytest.approx(MOST_BUSY, rel=0.02)


def test_no_pause_is_longer_than_the_bound_and_no_debt_outlives_it():
    loop = PlayedLoop(step_s=0.001, cost_s=0.015)
    loop.run(100)
    assert max(loop.pauses) == LONGEST_PAUSE_S
    loop.work(10.0)
    loop.cost_s = 0.0
    assert loop.deliver() == LONGEST_PAUSE_S
    assert loop.deliver() == 0.0


def test_a_little_work_after_a_quiet_time_makes_no_token_wait():
    loop = PlayedLoop(step_s=0.001, cost_s=0.0)
    loop.run(2)
    loop.now += 3600.0
    assert loop.deliver() == 0.0
    loop.work(0.99 * MOST_BUSY * CREDIT_S)
    assert loop.deliver() == 0.0
    loop.work(MOST_BUSY * CREDIT_S)
    assert loop.deliver() > 0.0
