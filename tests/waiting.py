"""Waiting for what only asking can tell: other processes and threads raise no event for a test.

Where there is an event, tests wait for that. Nothing here is expected to take long; the patience
only ends a test that would hang.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable

POLL_S = 0.01
PATIENCE_S = 120.0


def happens(holds: Callable[[], bool], within_s: float = PATIENCE_S) -> bool:
    """Ask until it is so; whether it came in time."""
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def wait_until(holds: Callable[[], bool], what: str) -> None:
    """Wait for something that must come."""
    assert happens(holds), f"not in time: {what}"


async def until(holds: Callable[[], bool | Awaitable[bool]]) -> None:
    """Let this event loop go on until it is so."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            answer = holds()
            if await answer if inspect.isawaitable(answer) else answer:
                return
            await asyncio.sleep(POLL_S / 10)
