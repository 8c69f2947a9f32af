"""Who looks on while a request is answered: it is told, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from control_plane.core.request import Request
from control_plane.engine.events import RequestEnd
from planes.errors import EngineError


class StreamWatch(Protocol):
    """Is told on the event loop what happens to one request's stream."""

    def admit(self) -> None:
        """Note that the engine has taken the request; at most once, before all else."""
        ...

    def take(self, sample_index: int, num_tokens: int, at: float) -> None:
        """Note that tokens of a sample came, committed `at`, and `num_tokens` are given out.

        Fewer than came, where they may belong to a stop string; more, with those held back before.
        """
        ...

    def give(self, num_tokens: int) -> None:
        """Note that tokens held back until now are given out at the end of the request."""
        ...

    def end(self, end: RequestEnd) -> None:
        """Note the end as the reader sees it; nothing follows but `leave`."""
        ...

    def fail(self, error: EngineError) -> None:
        """Note that the stream cannot go on, by its own fault or its reader's."""
        ...

    def leave(self) -> None:
        """Note that the reader leaves; always the last call."""
        ...


class _Nobody:
    """Looks away."""

    def admit(self) -> None:
        """Do nothing."""

    def take(self, sample_index: int, num_tokens: int, at: float) -> None:
        """Do nothing."""

    def give(self, num_tokens: int) -> None:
        """Do nothing."""

    def end(self, end: RequestEnd) -> None:
        """Do nothing."""

    def fail(self, error: EngineError) -> None:
        """Do nothing."""

    def leave(self) -> None:
        """Do nothing."""


NOBODY: StreamWatch = _Nobody()

WatchMaker = Callable[[Request], StreamWatch]


def watch_nothing(_request: Request) -> StreamWatch:
    """Return a watch that looks away."""
    return NOBODY
