"""Writing to clients who may not read: what nobody takes ends its connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from control_plane.engine.streams import SEND_PATIENCE_S

UNREAD_PATIENCE_S = SEND_PATIENCE_S
"""For a client to take some of what was written, where much is left or its connection is to end."""


class WatchedTransport:
    """A transport that does not wait for ever for its client to read.

    asyncio closes a connection when all is written, however long that takes. `on_close` is told
    once that it is to end.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        on_close: Callable[[], None],
    ) -> None:
        self._transport = transport
        self.write = transport.write  # for every event of every stream: not by `__getattr__`
        self._loop = loop
        self._on_close = on_close
        self._timer: asyncio.TimerHandle | None = None
        self._num_unread = 0
        self._has_closed = False

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - all that a transport has
        """Be the transport in everything else."""
        return getattr(self._transport, name)

    def close(self) -> None:
        """End the connection when the client has taken what was written, or takes nothing."""
        if self._has_closed:  # TLS would forget, the second time, what it has to end
            return
        self._has_closed = True
        self._transport.close()
        # With TLS the buffer is not all that is left.
        self.watch()
        self._on_close()

    def watch(self) -> None:
        """End the connection if the client takes nothing from now on."""
        if self._timer is None:
            self._num_unread = self._transport.get_write_buffer_size()
            self._timer = self._loop.call_later(UNREAD_PATIENCE_S, self._look_again)

    def unwatch(self) -> None:
        """Stop watching, unless the connection is to end."""
        if not self._has_closed:
            self.forget()

    def forget(self) -> None:
        """Stop watching: the connection is gone."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_again(self) -> None:
        self._timer = None
        if 0 < self._transport.get_write_buffer_size() < self._num_unread:
            self.watch()
        else:
            self._transport.abort()
