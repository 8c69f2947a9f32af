"""The link to one of several planes, on a clock of the test's."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from control_plane.engine.one_of_several import UNFIT_PAUSE_S, OneOfSeveral
from control_plane.errors import FencedError, LinkError, PlaneMismatchError

UNFIT = PlaneMismatchError("the compute plane came back with another model", field="model")
TAKEN = FencedError("another control plane took over")


class Link:
    """Answers what it is told to, and counts how often it is asked."""

    def __init__(self) -> None:
        self.answer: Exception | int | None = None
        self.num_asked = 0

    def open(self) -> int | None:
        self.num_asked += 1
        return self.give()

    def receive(self, _timeout_s):
        return self.give()

    def give(self):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def send(self, batch) -> None: ...

    def interrupt(self) -> None: ...

    def close(self) -> None: ...


class OneOfTwo:
    """The link under test; `others_serve` and `now` are the test's."""

    def __init__(self) -> None:
        self.inner, self.others_serve, self.now = Link(), True, 100.0
        self.link = OneOfSeveral(
            self.inner,
            address="unix:/one",
            others_serve=lambda: self.others_serve,
            clock=lambda: self.now,
        )

    def complaints(self, *answers: Exception | int | None) -> list[str]:
        """What is logged where the plane gives these answers, a pause apart."""
        with capture_logs() as lines:
            for self.inner.answer in answers:
                self.now += UNFIT_PAUSE_S
                self.link.open()
        return [line["error"] for line in lines]


@pytest.mark.parametrize("error", [UNFIT, TAKEN])
def test_a_plane_that_is_not_to_be_used_is_asked_again_after_a_pause(error):
    one = OneOfTwo()
    one.inner.answer = error
    assert one.link.open() is None
    one.inner.answer = 0
    assert one.link.open() is None
    one.now += UNFIT_PAUSE_S
    assert one.link.open() == 0
    assert one.inner.num_asked == 2


def test_a_plane_that_is_not_there_is_asked_again_at_once():
    one = OneOfTwo()
    assert [one.link.open(), one.link.open()] == [None, None]
    assert one.inner.num_asked == 2


@pytest.mark.parametrize("error", [UNFIT, TAKEN])
def test_without_another_plane_what_is_wrong_is_final(error):
    one = OneOfTwo()
    one.inner.answer, one.others_serve = error, False
    with pytest.raises(type(error), match=error.message):
        one.link.open()


def test_a_plane_that_is_taken_in_the_middle_is_lost_to_siblings_and_the_end_without_them():
    one = OneOfTwo()
    one.inner.answer = TAKEN
    with pytest.raises(LinkError, match=TAKEN.message):
        one.link.receive(None)
    one.others_serve = False
    with pytest.raises(FencedError):
        one.link.receive(None)


def test_why_a_plane_is_left_alone_is_said_once_until_it_changes_or_the_plane_was_there():
    one = OneOfTwo()
    unfit, taken = UNFIT.message, TAKEN.message
    assert one.complaints(UNFIT, UNFIT, None, UNFIT) == [unfit]
    assert one.complaints(TAKEN, TAKEN, UNFIT) == [taken, unfit]
    assert one.complaints(0, UNFIT) == [unfit]
