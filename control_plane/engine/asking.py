"""Questions of tasks to the engine thread."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

from control_plane.errors import EngineStoppedError

T = TypeVar("T")

PATIENCE_S = 10.0
"""The engine answers between two turns, each of which waits for one step at most."""


async def ask(put: Callable[[Callable[[T], None]], None]) -> T:
    """Put a question to the engine and wait for its answer. Raises EngineStoppedError."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(value: T) -> None:
        if not answer.done():
            answer.set_result(value)

    def reply(value: T) -> None:
        # Nobody waits for it where the event loop is closed: the process ends.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, value)

    put(reply)
    try:
        return await asyncio.wait_for(answer, PATIENCE_S)
    except TimeoutError:
        raise EngineStoppedError("the engine does not answer; see its log") from None
