"""The HTTP port: taken at every address of its host, in plaintext and with TLS, and given back."""

from __future__ import annotations

import asyncio
import socket

import httpx
import pytest

from control_plane.engine.gate import Gate
from control_plane.http.server import HttpServer, take_port
from planes.address import Address
from planes.errors import ConfigError
from planes.tls import ServerTls
from planes.tls_files import ServerFiles
from tests.certificates import Authority

HOSTS = ["127.0.0.1", "127.0.0.2"]


@pytest.fixture
def of_two(monkeypatch):
    """An address whose host is a name of two addresses."""
    monkeypatch.setattr(
        "planes.listening.socket.getaddrinfo",
        lambda _host, port, **_: [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in HOSTS
        ],
    )
    return Address(host="localhost", port=0)


@pytest.mark.parametrize("has_tls", [False, True])
def test_a_name_of_two_addresses_is_served_at_both(of_two, has_tls, tmp_path):
    tls, verify = None, False
    if has_tls:
        authority = Authority(tmp_path, "authority")
        identity = authority.issue("server")
        tls = ServerTls(ServerFiles(cert=identity.cert, key=identity.key))

    async def main():
        server = HttpServer(of_two, Gate(), tls=tls)
        await server.start()
        port, scheme = server.address.port, "https" if has_tls else "http"
        async with httpx.AsyncClient(verify=verify) as client:
            for host in HOSTS:
                answer = await client.get(f"{scheme}://{host}:{port}/healthz")
                assert answer.status_code == 200
        await server.stop()
        for host in HOSTS:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))

    asyncio.run(main())


def test_a_port_in_use_is_one_line():
    (listener,), address = take_port(Address(host="127.0.0.1", port=0))
    with listener, pytest.raises(ConfigError) as caught:
        take_port(address)
    assert caught.value.message == (
        f"http_port: cannot listen on {address}: it is in use; another one is --http-port, "
        "none --no-http"
    )


def test_a_server_that_never_started_gives_its_port_back():
    async def main():
        server = HttpServer(Address(host="127.0.0.1", port=0), Gate())
        await server.stop()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", server.address.port))

    asyncio.run(main())
