"""Commands to the engine: any thread appends, the engine takes them all once a turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from control_plane.core.request import Request
from control_plane.engine.events import RequestInfo


class Submit(NamedTuple):
    """Compute this request."""

    request: Request


class Cancel(NamedTuple):
    """End this request; nothing happens if it has ended or is unknown."""

    request_id: int


class Inspect(NamedTuple):
    """Call `reply` on the engine thread with what the requests are doing."""

    reply: Callable[[list[RequestInfo]], None]
    include_ended: bool


Command = Submit | Cancel | Inspect


class Inbox:
    """An unbounded queue with a bell.

    Its length is bounded by the callers: each has one request under way, and the engine takes
    commands within a turn. `wake` is called after every append, from the appending thread.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        # `append` and `popleft` of a deque are atomic.
        self._commands: deque[Command] = deque()
        self._wake = wake

    def __len__(self) -> int:
        return len(self._commands)

    def submit(self, request: Request) -> None:
        """Hand a request over; the engine owns it from now on."""
        self._commands.append(Submit(request))
        self._wake()

    def cancel(self, request_id: int) -> None:
        """Ask for the end of a request."""
        self._commands.append(Cancel(request_id))
        self._wake()

    def inspect(
        self, reply: Callable[[list[RequestInfo]], None], *, include_ended: bool = False
    ) -> None:
        """Ask what the requests are doing, also those that ended not long ago if wanted."""
        self._commands.append(Inspect(reply, include_ended))
        self._wake()

    def drain(self) -> list[Command]:
        """Take what is there, in order of arrival. Engine thread only."""
        commands = self._commands
        return [commands.popleft() for _ in range(len(commands))]
