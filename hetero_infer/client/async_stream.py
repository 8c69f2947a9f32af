"""The stream of an `AsyncClient`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import grpc

from hetero_infer.client.answers import Answer, Delta, Event
from hetero_infer.client.progress import BROKEN_OFF, StreamProgress
from hetero_infer.client.streaming import StreamFacts
from hetero_infer.client.unreached import error_of
from hetero_infer.wire_errors import ServerLostError
from planes.errors import EngineError

if TYPE_CHECKING:
    from hetero_infer.client.asynchronous import AsyncClient


class AsyncStream(StreamFacts):
    """The events of one request; as `Stream`, for an event loop.

    `close`, the end of an `async with` block, giving the stream up, or cancelling the task that
    reads aborts the request.
    """

    def __init__(self, client: AsyncClient, progress: StreamProgress) -> None:
        super().__init__(progress)
        self._client = client
        self._call: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False

    async def texts(self) -> AsyncIterator[str]:
        """Yield the pieces of the first sample's text, none of them empty; marks too (`parts`)."""
        async for event in self:
            if isinstance(event, Delta) and event.index == 0 and event.text:
                yield event.text

    async def answer(self) -> Answer:
        """Read what is left and return the whole answer.

        Of a resumed answer, text and tokens that came over this stream.
        """
        async for _ in self:
            pass
        return self._progress.whole_answer()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        while not self._progress.is_finished and not self._is_closed:
            try:
                response = await self._read()
            except EngineError as error:
                if self._is_closed:
                    break
                self._call = None
                self._client._check_open()
                pause_s = self._progress.pause_after(error)
            else:
                event = self._progress.take(response)
                if event is not None:
                    return event
                continue
            await asyncio.sleep(pause_s)
        await self._end()
        raise StopAsyncIteration

    async def close(self) -> None:
        """Abort the request if it is under way; nothing more comes. Any task may call it."""
        self._is_closed = True
        if self._call is not None:
            self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def __del__(self) -> None:
        call = getattr(self, "_call", None)
        # gRPC keeps a call that nobody reads. The loop may be another thread's, or over.
        if call is not None and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call.cancel)

    async def _read(self) -> Any:  # noqa: ANN401 - the message
        """Wait for the next message. Raises EngineError where there is none."""
        try:
            if self._call is None:
                self._loop = asyncio.get_running_loop()
                self._call = self._client._open_stream(self._progress)
            response = await self._call.read()
        except grpc.RpcError as error:
            raise error_of(error, self._client._route) from None
        except asyncio.CancelledError:
            # Another task closed the stream; unless this one itself is cancelled, too.
            task = asyncio.current_task()
            if self._is_closed and (task is None or not task.cancelling()):
                raise ServerLostError(BROKEN_OFF) from None
            raise
        if response is grpc.aio.EOF:  # type: ignore[attr-defined] # the stub lacks it
            raise ServerLostError(BROKEN_OFF)
        return response

    async def _end(self) -> None:
        """Let go of the call. After its last message only its status is awaited."""
        call, self._call = self._call, None
        if call is None:
            return
        if self._progress.is_finished and not self._is_closed:
            with contextlib.suppress(grpc.RpcError):  # everything has been said
                await call.read()
        call.cancel()
