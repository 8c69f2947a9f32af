"""What a campaign measured on the way is shown in the summary; it decides nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> Callable[[str, object], None]:
    """Note a figure under a name."""
    return lambda name, value: request.node.user_properties.append((name, value))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = terminalreporter.getreports("passed")
    lines = [
        f"{report.head_line}: " + ", ".join(f"{name} {value}" for name, value in figures)
        for report in reports
        if (figures := report.user_properties) and report.when == "call"
    ]
    if lines:
        terminalreporter.section("measured", sep="-")
        for line in lines:
            terminalreporter.write_line(line)
