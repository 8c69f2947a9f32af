"""Output streams: the engine thread publishes, tasks of the event loop read.

One wake-up of the event loop a step, however many requests it brought tokens for. What a reader has
not taken yet is merged into one larger part, so a slow reader gets fewer and larger ones; a stream
never holds more than `max_tokens` tokens for each of the request's samples.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from control_plane.core.request import FinishReason
from control_plane.engine.events import RequestEnd, RequestUpdate


class SamplePart(NamedTuple):
    """What came of one sample since the last part. `finish_reason`: it has ended."""

    sample_index: int
    token_ids: list[int]
    finish_reason: FinishReason | None


class StreamPart(NamedTuple):
    """What came since the last part, of each sample there is news of.

    The first part may be empty: the request is admitted. `end`: of the request as a whole.
    """

    samples: list[SamplePart]
    end: RequestEnd | None


class TokenStream:
    """The output of one request, for one reading task."""

    __slots__ = ("_end", "_has_news", "_reasons", "_token_ids", "_waiter")

    def __init__(self) -> None:
        # By sample, in the order of their news; one that only ends has an empty list.
        self._token_ids: dict[int, list[int]] = {}
        self._reasons: dict[int, FinishReason] = {}
        self._end: RequestEnd | None = None
        self._has_news = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def has_ended(self) -> bool:
        """Whether the end has arrived, read or not."""
        return self._end is not None

    def push(self, update: RequestUpdate) -> None:
        """Append an update and wake the reader."""
        index, reason = update.sample_index, update.finish_reason
        if update.new_token_ids or reason is not None:
            token_ids = self._token_ids.get(index)
            if token_ids is None:
                token_ids = self._token_ids[index] = []
            token_ids.extend(update.new_token_ids)
            if reason is not None:
                self._reasons[index] = reason
        self._end = update.end
        self._has_news = True
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def next_part(self) -> StreamPart:
        """Wait for news and take all of it. After a part with an end there is nothing more."""
        while not self._has_news:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._has_news = False
        token_ids, self._token_ids = self._token_ids, {}
        reasons, self._reasons = self._reasons, {}
        samples = [SamplePart(i, tokens, reasons.get(i)) for i, tokens in token_ids.items()]
        return StreamPart(samples, self._end)


class StreamHub:
    """All open streams. `publish` belongs to the engine thread, the rest to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._streams: dict[int, TokenStream] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, request_id: int) -> TokenStream:
        """Make the stream of a request, before the request is submitted."""
        stream = self._streams[request_id] = TokenStream()
        self._idle.clear()
        return stream

    def close(self, request_id: int) -> None:
        """Forget a stream; later updates of its request are dropped."""
        self._streams.pop(request_id, None)
        if not self._streams:
            self._idle.set()

    async def wait_until_idle(self) -> None:
        """Wait until no stream is open."""
        await self._idle.wait()

    def publish(self, updates: Sequence[RequestUpdate]) -> None:
        """Hand a turn's updates to their streams, with one wake-up of the event loop."""
        try:
            self._loop.call_soon_threadsafe(self._deliver, updates)
        except RuntimeError:
            # The event loop is closed: the process ends and nobody reads any more.
            if not self._loop.is_closed():
                raise

    def _deliver(self, updates: Sequence[RequestUpdate]) -> None:
        streams = self._streams
        for update in updates:
            stream = streams.get(update.request_id)
            if stream is not None:
                stream.push(update)
