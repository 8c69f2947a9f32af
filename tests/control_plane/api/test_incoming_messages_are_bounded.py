"""What clients send of their messages, and hold back, takes a bounded part of the server."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as aio_health
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from control_plane.access.keyring import Keyring
from control_plane.access.limits import Limits
from control_plane.access.token_file import add_token
from control_plane.api import bystanders, incoming
from control_plane.api.bystanders import Bystanders
from control_plane.api.incoming import Incoming
from control_plane.api.interceptors import RequestInterceptor
from control_plane.api.message_size import MAX_UNCOUNTED_BYTES
from control_plane.errors import QueueFullError
from planes.transport import client_server_options
from tests.control_plane.api.raw_grpc import INITIAL_WINDOW_SIZE, RawClient, message

SERVICE = "test.Service"
ECHO, WAIT = f"/{SERVICE}/Echo", f"/{SERVICE}/Wait"
WATCH = "/grpc.health.v1.Health/Watch"


@asynccontextmanager
async def serving(interceptor=None, **options):
    """A server of the public port's kind that echoes messages, or waits for ever; its address."""

    async def echo(request, _context):
        return request

    async def wait(_request, _context):
        await asyncio.Event().wait()

    server = grpc.aio.server(
        interceptors=[interceptor or RequestInterceptor(SERVICE)],
        options=client_server_options(1 << 20, **options),
    )
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(behaviour, bytes, bytes)
        for name, behaviour in (("Echo", echo), ("Wait", wait))
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    health_pb2_grpc.add_HealthServicer_to_server(aio_health.HealthServicer(), server)
    reflection.enable_server_reflection((SERVICE,), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def echoes(address, data=b"x"):
    async with grpc.aio.insecure_channel(address) as channel:
        return await channel.unary_unary(ECHO)(data, timeout=60)


async def refusal(call) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return refused.value.code(), refused.value.details()


def test_of_many_slow_messages_the_slowest_give_way(monkeypatch):
    monkeypatch.setattr(incoming, "GRACE_S", 0.01)
    monkeypatch.setattr("control_plane.api.interceptors.Incoming", lambda: Incoming(max_slow=2))

    async def test():
        async with serving() as address:
            client = await RawClient.connect(address)
            slow = [client.call(ECHO, message(b"some", size=1000)) for _ in range(4)]
            await client.until(lambda: client.ended >= set(slow[:2]))
            # What comes now is not slow, however long a busy machine takes over it.
            monkeypatch.setattr(incoming, "GRACE_S", 60.0)
            assert await echoes(address) == b"x"
            client.send(slow[3], b"y" * 996, ends=True)
            await client.until(lambda: slow[3] in client.ended)
            assert slow[2] not in client.ended
            await client.close()

    asyncio.run(test())


def test_who_sends_no_message_at_all_is_told_so_at_last(monkeypatch):
    monkeypatch.setattr(incoming, "PATIENCE_S", 0.02)

    async def test():
        async with serving() as address:
            client = await RawClient.connect(address)
            never = client.call(ECHO)
            checks = client.call(WATCH)
            asks = client.call("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
            await client.until(lambda: client.ended >= {never, checks, asks})
            await client.close()

    with structlog.testing.capture_logs() as logs:
        asyncio.run(test())
    (line,) = (line for line in logs if line["event"] == "rpc refused")
    assert line["reason"] == "SENDER_TOO_SLOW"


def test_a_call_without_a_message_is_its_callers_mistake():
    async def test():
        async with serving() as address:
            client = await RawClient.connect(address)
            empty = client.call(ECHO)
            client.send(empty, b"", ends=True)
            await client.until(lambda: empty in client.ended)
            await client.close()

    with structlog.testing.capture_logs() as logs:
        asyncio.run(test())
    (line,) = (line for line in logs if line["event"] == "rpc refused")
    assert line["reason"] == "INVALID_REQUEST"


def test_the_log_says_of_a_message_that_grpc_refuses_what_may_have_become_of_it():
    async def test():
        async with serving() as address:
            code, words = await refusal(echoes(address, b"x" * ((1 << 20) + 1)))
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "larger than max (1048577 vs. 1048576)" in words

    with structlog.testing.capture_logs() as logs:
        asyncio.run(test())
    assert any("gRPC refused it for its size" in line["event"] for line in logs)


def test_who_has_no_token_is_told_so_before_anything_of_the_message_has_come(tmp_path):
    path = tmp_path / "tokens.json"
    add_token(path, "alice", Limits(), admin=False, shares_cache=False)

    async def test():
        async with serving(RequestInterceptor(SERVICE, keyring=Keyring(path))) as address:
            client = await RawClient.connect(address)
            call = client.call(ECHO)
            await client.until(lambda: call in client.ended)
            await client.close()

    with structlog.testing.capture_logs() as logs:
        asyncio.run(test())
    (line,) = (line for line in logs if line["event"] == "rpc refused")
    assert line["reason"] == "TOKEN_MISSING"


def test_a_stream_may_send_little_that_nobody_waits_for():
    async def test():
        async with serving() as address:
            await echoes(address, b"x" * 900_000)  # what is waited for, may be more
            client = await RawClient.connect(address)
            await client.until(lambda: client.settings)
            assert client.settings.get(INITIAL_WINDOW_SIZE, 65535) <= 65535
            await client.close()

    asyncio.run(test())


def test_more_connections_than_there_may_be_are_closed():
    async def test():
        async with serving(max_connections=2) as address:
            first, second = [await RawClient.connect(address) for _ in range(2)]
            await first.until(lambda: first.settings)
            await second.until(lambda: second.settings)
            third = await RawClient.connect(address)
            await third.until(lambda: third.is_closed)
            for client in (first, second, third):
                await client.close()
            assert not first.is_closed

    asyncio.run(test())


class Context:
    """Of an RPC whose message has come."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def read(self) -> bytes:
        return self._data


def test_large_messages_are_held_up_to_a_bound_until_their_calls_end():
    async def test():
        messages = Incoming(max_held_bytes=1000)
        large, small = Context(bytes(MAX_UNCOUNTED_BYTES + 600)), Context(b"x" * 100)
        async with messages.message(large, len) as size, messages.message(small, len):
            assert size == MAX_UNCOUNTED_BYTES + 600
            with pytest.raises(QueueFullError):
                async with messages.message(large, len):
                    pytest.fail("taken")
        async with messages.message(large, len):
            pass

    asyncio.run(test())


def test_so_many_watch_the_health_and_no_more(monkeypatch):
    monkeypatch.setattr(
        "control_plane.api.interceptors.Bystanders",
        lambda messages: Bystanders(messages, max_calls=2),
    )

    async def test():
        async with serving() as address, grpc.aio.insecure_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest()
            watchers = [stub.Watch(request) for _ in range(2)]
            for watcher in watchers:
                assert (await watcher.read()).status == health_pb2.HealthCheckResponse.SERVING
            code, words = await refusal(stub.Check(request))
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "at most 2 calls" in words
            assert await echoes(address) == b"x"
            watchers[0].cancel()
            async with asyncio.timeout(20):
                while True:
                    try:
                        answer = await stub.Check(request)
                        break
                    except grpc.aio.AioRpcError:
                        await asyncio.sleep(0.01)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            unknown = health_pb2.HealthCheckRequest(service="nobody")
            assert (await refusal(stub.Check(unknown)))[0] is grpc.StatusCode.NOT_FOUND
            watchers[1].cancel()

    asyncio.run(test())


def test_health_and_reflection_take_short_names_only():
    async def test():
        async with serving() as address, grpc.aio.insecure_channel(address) as channel:
            long = "x" * bystanders.MAX_MESSAGE_BYTES
            stub = health_pb2_grpc.HealthStub(channel)
            code, _ = await refusal(stub.Check(health_pb2.HealthCheckRequest(service=long)))
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            info = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
            ask = reflection_pb2.ServerReflectionRequest
            answers = [a async for a in info(iter([ask(list_services=""), ask(list_services="")]))]
            assert [a.list_services_response.service[0].name for a in answers] == [SERVICE] * 2
            call = info(iter([ask(file_containing_symbol=long)]))
            code, _ = await refusal(call.read())
            assert code is grpc.StatusCode.INVALID_ARGUMENT

    asyncio.run(test())
