"""Commands to the engine: any thread appends, the engine takes them all once a turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from control_plane.core.request import Request
from control_plane.engine.events import RequestInfo
from control_plane.engine.moving import Moving


class Submit(NamedTuple):
    """Compute this request."""

    request: Request


class Cancel(NamedTuple):
    """End this request; nothing happens if it has ended or is unknown."""

    request_id: int


class EndSample(NamedTuple):
    """End a sample with its first `num_tokens` tokens; nothing happens if it has ended."""

    request_id: int
    sample_index: int
    num_tokens: int


class FlushPrefixCache(NamedTuple):
    """Forget what earlier requests left; call `reply` on the engine thread: how many blocks."""

    reply: Callable[[int], None]


class Inspect(NamedTuple):
    """Call `reply` on the engine thread with what the requests are doing."""

    reply: Callable[[list[RequestInfo]], None]
    include_ended: bool


class Withdraw(NamedTuple):
    """If the compute plane is lost, give away the requests that may go.

    `reply` is called on the engine thread, after all news of them are published.
    """

    may_go: Callable[[Request], bool]
    reply: Callable[[list[Moving]], None]


class Adopt(NamedTuple):
    """Go on with a request that another engine gave away."""

    moving: Moving


Command = Submit | Cancel | EndSample | FlushPrefixCache | Inspect | Withdraw | Adopt


class RequestDoor(Protocol):
    """What the front end asks of an engine, or of several; see `Inbox` for what each means."""

    def submit(self, request: Request) -> None:
        """Hand a request over."""
        ...

    def cancel(self, request_id: int) -> None:
        """Ask for the end of a request."""
        ...

    def end_sample(self, request_id: int, sample_index: int, num_tokens: int) -> None:
        """Ask for the end of one sample."""
        ...

    def flush_prefix_cache(self, reply: Callable[[int], None]) -> None:
        """Ask for an empty prefix cache."""
        ...

    def inspect(
        self, reply: Callable[[list[RequestInfo]], None], *, include_ended: bool = False
    ) -> None:
        """Ask what the requests are doing."""
        ...


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

    def end_sample(self, request_id: int, sample_index: int, num_tokens: int) -> None:
        """Ask for the end of one sample, whose text is complete with `num_tokens` tokens."""
        self._commands.append(EndSample(request_id, sample_index, num_tokens))
        self._wake()

    def flush_prefix_cache(self, reply: Callable[[int], None]) -> None:
        """Ask for an empty prefix cache."""
        self._commands.append(FlushPrefixCache(reply))
        self._wake()

    def withdraw(
        self, may_go: Callable[[Request], bool], reply: Callable[[list[Moving]], None]
    ) -> None:
        """Ask for the requests that may go, if the compute plane is lost."""
        self._commands.append(Withdraw(may_go, reply))
        self._wake()

    def adopt(self, moving: Moving) -> None:
        """Hand over a request that another engine gave away."""
        self._commands.append(Adopt(moving))
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
