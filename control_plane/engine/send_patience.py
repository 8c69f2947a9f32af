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
    """Watches the sends of one stream, which may overlap; made by `send_patience`."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._num_sends = 0
        self._began = 0.0  # or when the last one of those under way together was over
        self._timer = self._loop.call_later(patience_s, self._look)
        self.has_ended = False

    def begin(self) -> None:
        """Note that a send begins."""
        if not self._num_sends:
            self._began = self._loop.time()
        self._num_sends += 1

    def end(self) -> None:
        """Note that one is over."""
        self._num_sends -= 1
        if self._num_sends:
            self._began = self._loop.time()

    def close(self) -> None:
        """Watch no longer."""
        self._timer.cancel()

    def _look(self) -> None:
        now = self._loop.time()
        due = (self._began if self._num_sends else now) + self._patience_s
        if due > now:
            self._timer = self._loop.call_at(due, self._look)
        elif self._task is not None:
            self.has_ended = True
            self._task.cancel()


@asynccontextmanager
async def send_patience(patience_s: float) -> AsyncIterator[SendPatience]:
    """Watch the sends of a block and of the tasks it waits for, between `begin` and `end` each.

    Raises SlowReaderError where none is over for longer than `patience_s`.
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
