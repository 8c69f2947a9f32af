"""The bound on waiting requests, and what it costs to be refused."""

from __future__ import annotations

import gc
import tracemalloc

import pytest

from control_plane.config import SchedulingLimits
from control_plane.errors import QueueFullError

NUM_REFUSALS = 10_000
MAX_GROWTH_BYTES = 64 << 10
"""What one refusal in fifty left behind would be more."""


def test_the_queue_counts_requests_and_not_their_samples(drive):
    driver = drive(limits=SchedulingLimits(max_num_seqs=1), max_queued_requests=2)
    first = driver.submit("a", 30)
    driver.loop.step()  # it runs now and waits no more
    others = [driver.submit("a", 3, n=4) for _ in range(3)]
    driver.loop.step()
    assert driver.loop.metrics.waiting_requests == 2
    driver.run()
    assert isinstance(driver.ends[others[2]].error, QueueFullError)
    assert all(driver.ends[i].error is None for i in (first, *others[:2]))


@pytest.mark.wide
def test_ten_thousand_refusals_leave_no_memory_behind(drive):
    now = 0.0  # nothing is overdue while results are not taken
    limits = SchedulingLimits(max_num_seqs=1)
    driver = drive(limits=limits, max_queued_requests=1, clock=lambda: now)
    held = [driver.submit("a", 100)]
    driver.run_until(lambda: driver.loop.metrics.active_sequences == 1)
    held.append(driver.submit("b", 2))  # it waits, and nobody else may
    refused = 0

    def refuse(count):
        nonlocal refused
        for _ in range(count):
            request_id = driver.submit("refused", 5)
            driver.send()
            refused += isinstance(driver.ends[request_id].error, QueueFullError)
            driver.forget(request_id)

    refuse(100)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    refuse(NUM_REFUSALS)
    gc.collect()
    growth = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert refused == NUM_REFUSALS + 100
    assert growth < MAX_GROWTH_BYTES
    driver.run()
    assert all(driver.ends[request_id].error is None for request_id in held)
    assert driver.loop.metrics.total_requests == 2
