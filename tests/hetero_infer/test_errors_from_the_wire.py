from __future__ import annotations

from concurrent import futures

import grpc
import pytest

import hetero_infer
from control_plane.api.status import STATUS_OF, describe_error
from control_plane.core.errors import ContextLengthError
from control_plane.core.generation_params import GenerationParams
from control_plane.errors import QueueFullError
from hetero_infer.client import Client, Delta, Finished, Started
from hetero_infer.wire_errors import ServerLostError
from planes.address import Address
from planes.errors import (
    EngineError,
    ExecutionError,
    FieldViolation,
    SchedulerError,
    ValidationError,
)
from protos.hetero.inference.v1 import inference_pb2, inference_pb2_grpc


class Server(inference_pb2_grpc.InferenceServiceServicer):
    """Ends every stream with `failure`, or answers with `events`."""

    def __init__(self):
        self.failure = None
        self.code = None
        self.events = []
        self.requests = []

    def GenerateStream(self, request, context):  # noqa: N802
        self.requests.append(request)
        yield from self.events
        if self.failure is not None:
            told = describe_error(self.failure, "r-1")
            context.set_trailing_metadata(told.trailing_metadata)
            context.abort(told.code, told.message)
        if self.code is not None:
            context.abort(self.code, "no details")


def test_every_class_that_a_server_may_mean_is_a_public_name():
    assert {cls.__name__ for cls in STATUS_OF} <= set(hetero_infer.__all__)
    for cls in STATUS_OF:
        assert getattr(hetero_infer, cls.__name__) is cls


@pytest.fixture
def server():
    return Server()


@pytest.fixture
def client(server, tmp_path):
    address = Address(path=str(tmp_path / "s.sock"))
    grpc_server = grpc.server(futures.ThreadPoolExecutor(2))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(server, grpc_server)
    grpc_server.add_insecure_port(address.target)
    grpc_server.start()
    with Client(address, retries=0) as client:
        yield client
    grpc_server.stop(0).wait()


def failure_of(cls, message, *, field):
    """An error without the own constructor of a class that takes something else."""
    failure = cls.__new__(cls)
    EngineError.__init__(failure, message, field=field)
    return failure


def stream(client):
    return list(client.stream("hi", GenerationParams(seed=2**64 - 1)))


@pytest.mark.parametrize("cls", STATUS_OF, ids=lambda cls: cls.__name__)
def test_every_error_of_the_server_arrives_as_itself(server, client, cls):
    server.failure = failure_of(cls, "the limit is 3, got 4", field="max_tokens")
    with pytest.raises(cls) as caught:
        stream(client)
    assert type(caught.value) is cls
    assert caught.value.message == "the limit is 3, got 4"
    assert caught.value.field == "max_tokens"
    (violation,) = caught.value.field_violations
    assert violation == FieldViolation("sampling.max_tokens", "the limit is 3, got 4")
    assert caught.value.retry_after_s == cls.retry_after_s
    assert caught.value.request_id == "r-1"


@pytest.mark.parametrize(
    ("code", "cls"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, ValidationError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, SchedulerError),
        (grpc.StatusCode.UNAVAILABLE, ServerLostError),
        (grpc.StatusCode.INTERNAL, ExecutionError),
        (grpc.StatusCode.UNKNOWN, ExecutionError),
    ],
)
def test_an_error_without_details_takes_the_family_of_its_code(server, client, code, cls):
    server.code = code
    with pytest.raises(cls, match="no details"):
        stream(client)


def test_a_class_that_is_refined_still_is_its_family(server, client):
    for failure, family in (
        (ContextLengthError("x"), ValidationError),
        (QueueFullError("x"), SchedulerError),
    ):
        server.failure = failure
        with pytest.raises(family):
            stream(client)


def response(**event):
    return inference_pb2.GenerateStreamResponse(**event)


def test_a_stream_arrives_as_values(server, client):
    server.events = [
        response(
            started=inference_pb2.Started(
                request_id="r",
                model="m",
                prompt_tokens=3,
                sampling=inference_pb2.SamplingParams(
                    max_tokens=2, temperature=0.0, top_p=1.0, seed=0
                ),
            )
        ),
        response(delta=inference_pb2.Delta(text="é", token_ids=[7, 8])),
        response(
            finished=inference_pb2.Finished(
                finish_reason=inference_pb2.FINISH_REASON_LENGTH,
                usage=inference_pb2.Usage(prompt_tokens=3, completion_tokens=2),
                timings=inference_pb2.Timings(queue_s=0.5, time_to_first_token_s=1.0, total_s=2.0),
            )
        ),
    ]
    assert stream(client) == [
        Started("r", "m", 3, GenerationParams(max_tokens=2, temperature=0.0, top_p=1.0, seed=0)),
        Delta("é", (7, 8)),
        Finished("length", 3, 2, 0.5, 1.0, 2.0),
    ]
    (request,) = server.requests
    assert request.sampling.seed == 2**64 - 1
    assert request.sampling.HasField("temperature")


def test_a_stream_that_ends_without_an_end_is_an_error(server, client):
    server.events = [response(delta=inference_pb2.Delta(text="a"))]
    with pytest.raises(ServerLostError, match="before the end"):
        stream(client)


def test_a_server_that_is_not_there_is_lost(tmp_path):
    with (
        Client(Address(path=str(tmp_path / "none.sock"))) as client,
        pytest.raises(ServerLostError),
    ):
        client.model_info()
