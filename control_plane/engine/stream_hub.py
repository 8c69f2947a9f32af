"""From engine threads to the streams on the event loop.

One wake-up of the loop a step, however many requests it brought tokens for, and less often than
that where writing to all of them keeps the loop too busy (`delivery_pace`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from control_plane.engine.delivery_pace import DeliveryPace
from control_plane.engine.events import RequestUpdate
from control_plane.engine.streams import RequestStream


class StreamHub:
    """All open streams. `publish` belongs to engine threads, the rest to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, pace: DeliveryPace | None = None) -> None:
        self._loop = loop
        self._pace = pace or DeliveryPace()
        self._streams: dict[int, RequestStream] = {}
        self._names: dict[int, str] = {}
        self._named: dict[str, set[int]] = {}
        # `append` and `popleft` of a deque are atomic.
        self._news: deque[Sequence[RequestUpdate]] = deque()
        self._is_woken = False
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, request_id: int, stream: RequestStream, name: str = "") -> None:
        """Begin to deliver to the stream of a request, before the request is submitted.

        `name`: what the request is called, which others may be, too; "": nothing.
        """
        self._streams[request_id] = stream
        if name:
            self._names[request_id] = name
            self._named.setdefault(name, set()).add(request_id)
        self._idle.clear()

    def close(self, request_id: int) -> None:
        """Forget a stream; later updates of its request are dropped."""
        self._streams.pop(request_id, None)
        name = self._names.pop(request_id, None)
        if name is not None:
            self._named[name].discard(request_id)
            if not self._named[name]:
                del self._named[name]
        if not self._streams:
            self._idle.set()

    def under_way(self, request: str | int) -> list[int]:
        """Return the ids of the requests of that name, or of that id, whose end has not come."""
        ids = self._named.get(request, set()) if isinstance(request, str) else {request}
        streams = self._streams
        return sorted(i for i in ids if i in streams and not streams[i].has_ended)

    async def wait_until_idle(self) -> None:
        """Wait until no stream is open."""
        await self._idle.wait()

    def publish(self, updates: Sequence[RequestUpdate]) -> None:
        """Hand a turn's updates to their streams, with one wake-up of the event loop at most."""
        self._news.append(updates)
        # The flag falls before news are taken, so what finds it up is still ahead of that.
        if self._is_woken:
            return
        self._is_woken = True
        try:
            self._loop.call_soon_threadsafe(self._wake)
        except RuntimeError:
            # The event loop is closed: the process ends and nobody reads any more.
            if not self._loop.is_closed():
                raise

    def _wake(self) -> None:
        """Deliver now, or when the loop has had its pause."""
        pause_s = self._pace.pause_s()
        if pause_s:
            self._loop.call_later(pause_s, self._deliver)
        else:
            self._deliver()

    def _deliver(self) -> None:
        self._is_woken = False
        news, streams = self._news, self._streams
        for _ in range(len(news)):
            for update in news.popleft():
                stream = streams.get(update.request_id)
                if stream is not None:
                    stream.push(update)
