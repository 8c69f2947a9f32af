"""A server that is not there, or is another one, is told in words that say what to do."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
import traceback
from concurrent import futures
from pathlib import Path

import grpc
import pytest

from hetero_infer import (
    AsyncClient,
    Client,
    ClientFiles,
    DeadlineExceededError,
    ExecutionError,
    ServerLostError,
)
from protos.hetero.inference.v1 import inference_pb2_grpc
from tests.certificates import Authority

NOT_FOUND = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"


def words_of(target, tls=None, **options):
    """What both clients say, which is the same."""
    with Client(target, tls=tls, retries=0) as client, pytest.raises(ServerLostError) as caught:
        client.model_info(**options)

    async def ask():
        async with AsyncClient(target, tls=tls, retries=0) as other:
            await other.stream("x").answer()

    with pytest.raises(ServerLostError) as other:
        asyncio.run(ask())
    assert caught.value.message == other.value.message
    return caught.value.message.replace(target, "IT")


@contextlib.contextmanager
def listening(on_connection):
    """A port of this machine; `on_connection` gets each connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    on_connection(server.accept()[0])

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_a_port_and_a_socket_at_which_nothing_answers(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert words_of(f"127.0.0.1:{port}") == "nothing answers at IT"
    path = f"unix:{tmp_path}/none.sock"
    assert words_of(path) == "nothing answers at IT: there is no such socket"


@pytest.mark.parametrize("call", [lambda c: c.generate("x"), lambda c: c.stream("x").answer()])
def test_a_traceback_has_nothing_of_grpcs(tmp_path, call):
    target = f"unix:{tmp_path}/none.sock"

    async def ask():
        async with AsyncClient(target, retries=1) as client:
            await call(client)

    def ask_with_threads():
        with Client(target, retries=1) as client:
            call(client)

    for start in (ask_with_threads, lambda: asyncio.run(ask())):
        with pytest.raises(ServerLostError) as caught:
            start()
        lines = "".join(traceback.format_exception(caught.value))
        assert "RpcError" not in lines
        assert "another exception occurred" not in lines
        assert lines.endswith(f"nothing answers at {target}: there is no such socket\n")


@pytest.mark.parametrize("answer", [NOT_FOUND, b"<!DOCTYPE HTML>" + b" " * 99])
def test_an_http_port(answer):
    def refuse(connection):
        with connection:
            connection.sendall(answer)
            connection.recv(1 << 16)

    with listening(refuse) as target:
        assert words_of(target) == "IT speaks HTTP, not gRPC: is its gRPC port another one?"


def test_a_host_that_nobody_knows():
    assert words_of("nowhere.invalid:50051") == "the host of IT is not known"


def test_a_port_that_answers_something_else():
    def greet(connection):
        with connection:
            connection.sendall(b"220 mail.example.org ESMTP\r\n")
            connection.recv(1 << 16)

    with listening(greet) as target:
        assert words_of(target) == "IT takes connections, but does not speak gRPC"


@pytest.fixture(scope="module")
def authorities(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tls")
    return Authority(directory, "ours"), Authority(directory, "theirs")


@contextlib.contextmanager
def secured(authorities, *, wants_certificate=False):
    """A gRPC server with TLS that serves nothing."""
    identity = authorities[0].issue("server")
    pair = (Path(identity.key).read_bytes(), Path(identity.cert).read_bytes())
    root = Path(authorities[0].ca).read_bytes() if wants_certificate else None
    credentials = grpc.ssl_server_credentials([pair], root, wants_certificate)
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


def test_tls_that_does_not_match(authorities):
    ours, theirs = (ClientFiles(authority.ca) for authority in authorities)
    with secured(authorities) as target:
        assert words_of(target) == "IT closes every connection: does it want TLS?"
        assert words_of(target, theirs) == (
            "the certificate of IT is not signed by the authority that was given, or not valid"
        )
    with secured(authorities, wants_certificate=True) as target:
        assert words_of(target, ours) == (
            "IT closes every connection: does it want a certificate of this client?"
        )


def test_tls_to_a_server_without(authorities):
    server = grpc.server(futures.ThreadPoolExecutor(1))
    target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    tls = ClientFiles(authorities[0].ca)
    assert words_of(target, tls) == "IT does not speak TLS, which was asked for"
    server.stop(0).wait()


def test_a_server_that_keeps_silent_within_the_time_given():
    held = []
    with (
        listening(held.append) as target,
        Client(target) as client,
        pytest.raises(DeadlineExceededError, match="did not answer within the time given"),
    ):
        client.model_info(timeout_s=0.2)
    for connection in held:
        connection.close()


def test_a_server_far_away_is_reached(serve):
    # Half a second until its first word arrives, as over TLS from the other side of the world.
    path = serve(inference_pb2_grpc.InferenceServiceServicer()).path
    threads, opened = [], []

    def relay(connection):
        there = socket.socket(socket.AF_UNIX)
        there.connect(path)
        opened.extend((connection, there))

        def copy(source, sink, delay_s):
            with contextlib.suppress(OSError):
                while data := source.recv(1 << 16):
                    time.sleep(delay_s)
                    sink.sendall(data)
                    delay_s = 0.0
                sink.shutdown(socket.SHUT_WR)

        for pair in ((connection, there, 0.0), (there, connection, 0.5)):
            threads.append(threading.Thread(target=copy, args=pair))
            threads[-1].start()

    with (
        listening(relay) as target,
        Client(target, retries=0) as client,
        pytest.raises(ExecutionError, match="not implemented"),
    ):
        client.generate("it has no methods, but it has answered")
    for thread in threads:
        thread.join()
    for connection in opened:
        connection.close()
