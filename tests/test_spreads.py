"""Which cases of a test `make test` has: those that `spread` leaves to it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import mark_what_spreads


class Case:
    """As much of pytest's item as is asked for."""

    def __init__(self, test: str, number: int, *marks: pytest.MarkDecorator) -> None:
        self.nodeid = f"{test}[{number}]"
        self.marks = {mark.name: mark for mark in marks}

    def get_closest_marker(self, name: str) -> SimpleNamespace | None:
        found = self.marks.get(name)
        return found and SimpleNamespace(args=found.args)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks[mark.name] = mark


def test_what_is_behind_the_first_cases_is_wide_and_slow_ones_do_not_count():
    spread, slow = pytest.mark.spread(2), pytest.mark.slow
    first = [Case("a", n, spread, *([slow] if n in (0, 3) else [])) for n in range(6)]
    second = [Case("b", n, spread) for n in range(3)]
    plain = [Case("c", n) for n in range(4)]
    cases = [*first, *plain, *second]
    mark_what_spreads(cases)  # type: ignore[arg-type]
    wide = [case.nodeid for case in cases if "wide" in case.marks]
    assert wide == ["a[4]", "a[5]", "b[2]"]


def test_make_test_and_make_test_wide_have_each_case_once():
    """What the Makefile leaves out of one is what it runs in the other."""
    text = (Path(__file__).parents[1] / "Makefile").read_text()
    assert '-m "not wide and not slow and not gpu"' in text
    assert '-m "wide and not slow and not gpu"' in text
    assert "make test\nmake test-wide\n" in (Path(__file__).parents[1] / ".ci/run").read_text()
