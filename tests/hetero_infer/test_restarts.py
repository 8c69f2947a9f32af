"""When a plane is started again, as a matter of numbers only."""

from __future__ import annotations

import pytest

from hetero_infer.restarts import MAX_FAILED_STARTS, MAX_PAUSE_S, STEADY_S, Restarts
from planes.errors import ExecutionError

HOW = "the compute plane was ended by SIGKILL"
MOMENT_S = 0.1


def after(restarts: Restarts, *, has_served: bool, lived_s: float = MOMENT_S) -> float:
    return restarts.pause_s(HOW, has_served=has_served, lived_s=lived_s)


def test_starts_in_a_row_that_fail_are_given_up_and_the_last_reason_is_told():
    restarts = Restarts()
    pauses = [after(restarts, has_served=False) for _ in range(MAX_FAILED_STARTS - 1)]
    assert pauses == [0.25, 0.5, 1.0, 2.0]
    with pytest.raises(ExecutionError) as caught:
        after(restarts, has_served=False)
    assert caught.value.message == f"5 starts in a row failed: {HOW}"


def test_a_plane_that_has_served_is_started_again_without_an_end_but_never_at_once():
    restarts = Restarts()
    pauses = [after(restarts, has_served=True) for _ in range(5000)]
    assert pauses[:6] == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0]
    assert set(pauses[5:]) == {MAX_PAUSE_S}


def test_only_failed_starts_in_a_row_count():
    restarts = Restarts()
    for _ in range(3):
        for _ in range(MAX_FAILED_STARTS - 1):
            after(restarts, has_served=False)
        after(restarts, has_served=True)


def test_after_one_that_served_for_long_the_pauses_begin_anew():
    restarts = Restarts()
    for _ in range(3):
        assert after(restarts, has_served=True, lived_s=STEADY_S) == 0.25
        assert after(restarts, has_served=True) == 0.5
        # One that takes long to fail has not helped anybody.
        assert after(restarts, has_served=False, lived_s=STEADY_S) == 1.0
