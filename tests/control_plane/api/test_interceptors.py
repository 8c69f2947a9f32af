from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest
import structlog
from google.rpc import error_details_pb2, status_pb2

from control_plane.api.interceptors import RequestInterceptor, current_request_id
from control_plane.errors import RequestFailedError
from planes.errors import ValidationError
from protos.hetero.inference.v1.inference_pb2 import GenerateRequest

SERVICE = "test.Service"
METHOD = f"/{SERVICE}/Do"


def identity(data):
    return data


async def call(behaviour, read=identity):
    """Serve one streaming method and call it: what it wrote and how it ended."""
    server = grpc.aio.server(interceptors=[RequestInterceptor(SERVICE)])
    handler = grpc.unary_stream_rpc_method_handler(behaviour, read, identity)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE, {"Do": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    written, error = [], None
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            async for part in channel.unary_stream(METHOD, identity, identity)(b"x"):
                written.append(part)  # noqa: PERF401 - what came before an error counts
        except grpc.aio.AioRpcError as caught:
            error = caught
    await server.stop(None)
    return written, error


def test_an_unexpected_exception_is_internal_and_logged_once():
    async def fails(_request, _context):
        raise KeyError("secret")

    with structlog.testing.capture_logs() as logs:
        _, error = asyncio.run(call(fails))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in error.details()
    (fault,) = (line for line in logs if line["log_level"] == "error")
    assert fault["exc_info"]
    (ended,) = (line for line in logs if line["event"] == "rpc ended")
    assert (ended["code"], ended["log_level"]) == ("INTERNAL", "debug")


def test_an_engine_error_becomes_its_status_also_in_the_middle_of_a_stream():
    async def fails(_request, context):
        await context.write(b"1")
        raise ValidationError("no more", field="prompt")

    written, error = asyncio.run(call(fails))
    assert written == [b"1"]
    assert (error.code(), error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, "no more")
    (packed,) = (value for key, value in error.trailing_metadata() if key.endswith("-bin"))
    info = error_details_pb2.ErrorInfo()
    status_pb2.Status.FromString(packed).details[0].Unpack(info)
    assert info.reason == "INVALID_REQUEST"


@pytest.mark.parametrize(
    ("error", "level"), [(ValidationError("x"), "info"), (RequestFailedError("x"), "error")]
)
def test_a_callers_mistake_is_news_and_a_failure_of_ours_an_error(error, level):
    async def fails(_request, _context):
        raise error

    with structlog.testing.capture_logs() as logs:
        asyncio.run(call(fails))
    (line,) = (line for line in logs if line["event"] == "rpc refused")
    assert line["log_level"] == level


def test_a_refused_request_is_not_quoted_in_the_log():
    async def fails(_request, _context):
        raise ValidationError("no: my password is hunter2", field="messages")

    with structlog.testing.capture_logs() as logs:
        _, error = asyncio.run(call(fails))
    assert "hunter2" in error.details()
    assert "hunter2" not in str(logs)
    (line,) = (line for line in logs if line["event"] == "rpc refused")
    assert (line["reason"], line["field"]) == ("INVALID_REQUEST", "messages")


def test_a_message_that_cannot_be_read_is_the_callers_mistake():
    async def never_called(_request, _context):
        raise AssertionError

    written, error = asyncio.run(call(never_called, read=GenerateRequest.FromString))
    assert written == []
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "the message cannot be read" in error.details()


def test_every_call_has_an_id_of_its_own():
    async def tells(_request, context):
        await context.write(current_request_id().encode())

    ids = [asyncio.run(call(tells))[0][0] for _ in range(2)]
    assert len(set(ids)) == 2
    assert all(len(request_id) == 32 for request_id in ids)


def test_there_is_no_request_id_outside_of_a_call():
    with pytest.raises(LookupError):
        current_request_id()
