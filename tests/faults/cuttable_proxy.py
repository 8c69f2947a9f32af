"""Stands between the planes, passes bytes on, and cuts connections where a test wants it."""

from __future__ import annotations

import contextlib
import enum
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from planes.address import Address

CHUNK_BYTES = 65536
TIMEOUT_S = 20.0

Pair = tuple[socket.socket, socket.socket]
"""The connection to the control plane, and the one to the compute plane."""


class Way(enum.Enum):
    """The direction of bytes: UP is from the control plane to the compute plane."""

    UP = "up"
    DOWN = "down"


class CuttableProxy:
    """Listens on `listen` (port 0: a free one) and passes connections on to a unix socket.

    `hold` keeps the bytes of one way back, `pass_held` lets some of them go. `cut_after` cuts every
    connection of that moment once so many more bytes have gone one way.
    """

    def __init__(self, listen: Address, target: Path) -> None:
        if listen.path is not None:
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(listen.path)
            self.address = listen
        else:
            self._listener = socket.create_server((listen.host, listen.port))
            self.address = Address(host=listen.host, port=self._listener.getsockname()[1])
        self._listener.listen()
        self.target = target
        self._pairs: list[Pair] = []
        self._changed = threading.Condition()
        self._held: dict[Way, bytearray] = {}
        self._budget: dict[Way, int] = {}
        self.num_cuts = 0
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def hold(self, way: Way) -> None:
        """Keep back what comes on that way from now on."""
        with self._changed:
            self._held[way] = bytearray()

    def wait_held(self, way: Way) -> int:
        """Wait until something is kept back; how many bytes that is."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._held[way], TIMEOUT_S)
            return len(self._held[way])

    def pass_held(self, way: Way, num_bytes: int) -> None:
        """Let the first of the bytes kept back go; there is one connection."""
        with self._changed:
            ((client, server),) = self._pairs
            out = client if way is Way.DOWN else server
            out.sendall(self._held[way][:num_bytes])
            del self._held[way][:num_bytes]

    def cut_after(self, way: Way, num_bytes: int) -> None:
        """Cut all connections once so many more bytes have gone that way."""
        with self._changed:
            self._budget[way] = num_bytes

    def cut(self) -> None:
        """Cut all connections now; what is kept back is lost, and new ones are passed freely."""
        with self._changed:
            self._cut()

    def _cut(self) -> None:
        self.num_cuts += 1
        self._held.clear()
        self._budget.clear()
        for pair in self._pairs:
            _shut_down(pair)
        self._pairs.clear()

    def close(self) -> None:
        """Cut everything and listen no more."""
        self.cut()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(TIMEOUT_S)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            try:
                server.connect(str(self.target))
            except OSError:  # the plane is dead, and so is this connection
                client.close()
                server.close()
                continue
            pair = (client, server)
            with self._changed:
                self._pairs.append(pair)
            self._start(self._serve, pair)

    def _start(self, run: Callable[..., None], *args: object) -> None:
        self._threads.append(threading.Thread(target=run, args=args, daemon=True))
        self._threads[-1].start()

    def _serve(self, pair: Pair) -> None:
        """Pass bytes both ways until one end leaves."""
        up = threading.Thread(target=self._pump, args=(Way.UP, pair), daemon=True)
        up.start()
        self._pump(Way.DOWN, pair)
        up.join()
        for end in pair:
            end.close()

    def _pump(self, way: Way, pair: Pair) -> None:
        source, sink = pair if way is Way.UP else pair[::-1]
        with contextlib.suppress(OSError):
            while data := source.recv(CHUNK_BYTES):
                with self._changed:
                    if pair not in self._pairs:
                        break
                    self._pass_on(way, data, sink)
        with self._changed:
            if pair in self._pairs:  # one end left: so does the other
                self._pairs.remove(pair)
                _shut_down(pair)

    def _pass_on(self, way: Way, data: bytes, sink: socket.socket) -> None:
        held, budget = self._held.get(way), self._budget.get(way)
        if held is not None:
            held += data
            self._changed.notify_all()
        elif budget is not None and budget <= len(data):
            sink.sendall(data[:budget])
            self._cut()
        else:
            if budget is not None:
                self._budget[way] = budget - len(data)
            sink.sendall(data)


def _shut_down(pair: Pair) -> None:
    for end in pair:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
