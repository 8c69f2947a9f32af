"""Clients that go away from a real deployment: their blocks are free, the others go on."""

from __future__ import annotations

import grpc
import pytest

from protos.hetero.inference.v1 import inference_pb2_grpc
from tests.integration.asking import Server, request
from tests.integration.conftest import Deployment

pytestmark = pytest.mark.model

NUM_CANCELLED = 200


@pytest.fixture
def server(deployment: Deployment):
    with Server(deployment.control) as made:
        yield made
        made.wait_until(lambda: made.memory.used_blocks == 0)


@pytest.mark.parametrize("how", ["cancel", "disconnect", "deadline"])
def test_a_client_that_goes_frees_its_blocks_within_two_steps(server, how):
    cancelled = server.metrics.cancelled_requests
    with grpc.insecure_channel(server.address.target) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        stream = stub.GenerateStream(
            request("Once upon a time", 1500), timeout=1.0 if how == "deadline" else None
        )
        next(stream)
        if how == "cancel":
            stream.cancel()
        elif how == "disconnect":
            channel.close()
        else:
            with pytest.raises(grpc.RpcError) as caught:
                list(stream)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        server.wait_until(lambda: server.metrics.cancelled_requests == cancelled + 1)
        num_steps = server.metrics.num_steps  # those under way are counted already
        server.wait_until(lambda: server.memory.used_blocks == 0)
        assert server.metrics.num_steps == num_steps


@pytest.mark.wide
def test_after_two_hundred_cancelled_requests_the_next_one_is_answered_at_once(server):
    before = server.metrics
    streams = [
        server.stub.GenerateStream(request(f"Story number {i} begins", 1500))
        for i in range(NUM_CANCELLED)
    ]
    for stream in streams:
        assert next(stream).HasField("started")
    for stream in streams:
        stream.cancel()
    num_tokens = 8
    answer = server.stub.Generate(request("The capital of France is", num_tokens), timeout=60)
    assert len(answer.token_ids) == num_tokens
    after = server.metrics
    assert after.cancelled_requests - before.cancelled_requests == NUM_CANCELLED
    assert after.completed_requests - before.completed_requests == 1
    server.wait_until(lambda: server.memory.used_blocks == 0)
    assert server.metrics.waiting_requests == server.metrics.active_sequences == 0
