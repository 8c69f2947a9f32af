"""How long a client may take nothing: one timer a stream, not one a message.

`asyncio.timeout` around every message would arm and cancel a timer for each, an eighth of what the
event loop pays for a token. Here a message notes when it began, and the timer looks at that when
its time has come, and again later if the message is a newer one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from control_plane.errors import SlowReaderError


class SendPatience:
    """Watches the sends of one task; made by `send_patience`."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._began: float | None = None
        self._timer = self._loop.call_later(patience_s, self._look)
        self.has_ended = False

    def begin(self) -> None:
        """Note that a send begins."""
        self._began = self._loop.time()

    def end(self) -> None:
        """Note that it is over."""
        self._began = None

    def close(self) -> None:
        """Watch no longer."""
        self._timer.cancel()

    def _look(self) -> None:
        now = self._loop.time()
        due = (now if self._began is None else self._began) + self._patience_s
        if due > now:
            self._timer = self._loop.call_at(due, self._look)
        elif self._task is not None:
            self.has_ended = True
            self._task.cancel()


@asynccontextmanager
async def send_patience(patience_s: float) -> AsyncIterator[SendPatience]:
    """Watch the sends of the current task, between `begin` and `end` each.

    Raises SlowReaderError where one takes longer than `patience_s`.
    """
    patience = SendPatience(patience_s)
    try:
        yield patience
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if not patience.has_ended or task is None or task.uncancel() > 0:
            raise  # somebody else wants it to end
        raise SlowReaderError(f"the client took nothing for {patience_s:g} s") from None
    finally:
        patience.close()
