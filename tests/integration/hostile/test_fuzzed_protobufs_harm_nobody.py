"""Thousands of messages nobody would send, to every method: the caller's fault, and only his."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from tests.integration.asking import PATIENCE_S
from tests.integration.hostile.fuzzed_messages import METHODS, TOO_LARGE, fuzzed
from tests.integration.hostile.neighbour import neighbour

pytestmark = pytest.mark.model

CALLERS_FAULT = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
}


def send(channel, method, data):
    """The status of one call with these bytes, and what is said of it."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    call = channel.unary_stream if method.server_streaming else channel.unary_unary
    call = call(path, request_serializer=bytes, response_deserializer=bytes)
    try:
        answer = call(data, timeout=PATIENCE_S)
        if method.server_streaming:
            list(answer)
    except grpc.RpcError as error:
        return error.code(), error.details()
    return grpc.StatusCode.OK, ""


def test_every_method_of_the_four_services_is_among_them():
    assert {method.containing_service.name for method in METHODS} == {
        "InferenceService", "ModelService", "TokenizerService", "AdminService"
    }  # fmt: skip
    asked = Counter(method.name for method, _ in fuzzed("all", 2 * len(METHODS)))
    assert asked == dict.fromkeys((method.name for method in METHODS), 2)


@pytest.mark.wide
@pytest.mark.parametrize("count", [2000, pytest.param(50_000, marks=pytest.mark.slow)])
def test_two_thousand_messages_are_their_callers_fault_and_no_neighbour_notices(ports, count):
    codes = Counter()
    with (
        grpc.insecure_channel(ports.server.address.target) as channel,
        ThreadPoolExecutor(8) as pool,
        neighbour(ports),
    ):

        def check(asked):
            method, data = asked
            code, said = send(channel, method, data)
            if code is grpc.StatusCode.RESOURCE_EXHAUSTED and len(data) >= TOO_LARGE:
                code = grpc.StatusCode.INVALID_ARGUMENT  # gRPC's own word for what is too large
            assert code in CALLERS_FAULT, (method.name, data[:300], code, said)
            return code

        codes.update(pool.map(check, fuzzed(f"messages {count}", count)))
    assert codes.total() == count
    # They are not all refused for the same reason, nor by chance all of them.
    assert codes[grpc.StatusCode.OK] > count / 20
    assert codes[grpc.StatusCode.INVALID_ARGUMENT] > count / 4


@pytest.mark.parametrize(
    "path",
    [
        "/hetero.inference.v1.InferenceService/Nothing", "/hetero.inference.v1.Nobody/Generate",
        "/", "//", "/x", "/hetero.inference.v1.InferenceService/", "/" + "a" * 5000,
    ],
)  # fmt: skip
def test_a_method_that_is_not_there_is_unimplemented(ports, path):
    call = ports.channel.unary_unary(path, request_serializer=bytes, response_deserializer=bytes)
    with pytest.raises(grpc.RpcError) as refused:
        call(b"", timeout=PATIENCE_S)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
