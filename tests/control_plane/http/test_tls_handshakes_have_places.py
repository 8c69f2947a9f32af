"""Who draws out a TLS handshake takes a place like everybody else, and gives way."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl

import pytest

from control_plane.http import tls_door
from control_plane.http.places import Connections, refuse_connection
from control_plane.http.tls_door import TlsDoor
from control_plane.metrics.visits import VisitMeter
from tests.certificates import Authority


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"), "authority")


@pytest.fixture(scope="module")
def identity(authority):
    return authority.issue("server")


class Greeter(asyncio.Protocol):
    """Serves a connection: says hello and waits for its client's end."""

    here: set[Greeter]

    def connection_made(self, transport) -> None:
        self.here.add(self)
        transport.write(b"hello")

    def connection_lost(self, exc) -> None:  # noqa: ARG002 - asyncio's signature
        self.here.discard(self)


@pytest.fixture
def behind_door(authority, identity):
    """Plays a story at a door with so many places: where it is, how to greet, the greeters."""

    def play(story, limit: int) -> None:
        async def main() -> None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(identity.cert, identity.key)
            greeter = type("Greeter", (Greeter,), {"here": set()})
            crowd = Connections(limit, refuse_connection, VisitMeter())
            with socket.create_server(("127.0.0.1", 0)) as listener:
                listener.setblocking(False)
                door = TlsDoor(
                    listener,
                    context,
                    crowd,
                    make=greeter,
                    num_connections=lambda: len(greeter.here),
                )
                running = asyncio.create_task(door.run())
                trusted = ssl.create_default_context(cafile=authority.ca)

                async def greet():
                    reader, writer = await asyncio.open_connection(
                        *listener.getsockname(), ssl=trusted, server_hostname="localhost"
                    )
                    assert await reader.readexactly(5) == b"hello"
                    return writer

                async with asyncio.timeout(20):
                    await story(listener.getsockname(), greet, greeter.here)
                running.cancel()
                await asyncio.wait([running])
                assert running.cancelled()

        asyncio.run(main())

    return play


async def is_closed(reader) -> bool:
    with contextlib.suppress(ConnectionResetError):
        return await reader.read(1) == b""
    return True


def test_the_longest_in_its_handshake_gives_way_to_who_comes(behind_door):
    async def story(address, greet, _):
        silent = [await asyncio.open_connection(*address) for _ in range(4)]
        writer = await greet()
        assert await is_closed(silent[0][0])
        assert await is_closed(silent[1][0])
        assert not silent[3][0].at_eof()
        for _, one in (*silent, (None, writer)):
            one.transport.abort()

    behind_door(story, limit=3)


def test_a_handshake_that_takes_too_long_or_is_none_ends(behind_door, monkeypatch):
    monkeypatch.setattr(tls_door, "HANDSHAKE_PATIENCE_S", 0.05)

    async def story(address, greet, here):
        silent, first = await asyncio.open_connection(*address)
        plain, writer = await asyncio.open_connection(*address)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert await is_closed(plain)
        assert await is_closed(silent)
        late = await greet()
        assert len(here) == 1
        for one in (first, writer, late):
            one.transport.abort()

    behind_door(story, limit=10)


def test_many_handshakes_at_once_are_all_served(behind_door):
    async def story(_, greet, here):
        writers = await asyncio.gather(*(greet() for _ in range(30)))
        assert len(here) == 30
        for writer in writers:
            writer.transport.abort()

    behind_door(story, limit=40)
