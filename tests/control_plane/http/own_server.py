"""The HTTP server on a real port, for clients that want one; behind it the scripted engine."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future

from control_plane.http.server import HttpServer
from planes.address import Address
from tests.control_plane.http.conftest import Served


class Server:
    """An HTTP server on an event loop of its own thread."""

    def __init__(self, **options) -> None:
        self._options = options
        self._ready: Future[None] = Future()
        self._stop: asyncio.Event
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))
        self._thread.start()
        self._ready.result(20)

    async def _main(self) -> None:
        self.loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        served = Served(attached=False, **self._options)
        address, keyring = Address(host="127.0.0.1", port=0), self._options.get("keyring")
        server = HttpServer(address, served.gate, keyring=keyring)
        await server.start()
        server.attach(served.frontend)
        self.address, self.engine = server.address, served.engine
        self._ready.set_result(None)
        await self._stop.wait()
        await server.stop()
        await served.client.aclose()

    def run(self, action):
        """Do something on the server's event loop, where its engine lives."""

        async def call():
            return action()

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(10)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)
