"""`python -m pytest -p tests.amx.plugin …`: runs tests of this process on the set `amx`.

Processes that tests start choose their own. What has tiles itself is run on those.
"""

from __future__ import annotations

import os

import pytest

from tests.amx import sets

sets.choose(sets.AMX.name)
stderr = os.dup(2)
"""What pytest captures is lost when a fault ends the process."""


@pytest.hookimpl(trylast=True)  # behind pytest's own handler of the same signal
def pytest_configure() -> None:
    """Do in software what this processor does not."""
    sets.stand_in(stderr)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail if a thread has kept its registers: the system would save them with every switch."""
    if sets.needs_software():
        from tests.amx.registers import threads_with_registers

        if threads_with_registers():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what software did."""
    if sets.needs_software():
        from tests.amx.registers import threads_with_registers
        from tests.amx.trap import counts

        done = ", ".join(f"{count} {name}" for name, count in counts().items())
        kept = threads_with_registers()
        terminalreporter.write_line(f"AMX in software: {done}; {kept} threads keep registers")
