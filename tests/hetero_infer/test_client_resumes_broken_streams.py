"""A client that goes on where a broken stream ended, against a server that breaks as it is told."""

from __future__ import annotations

from concurrent import futures

import grpc
import pytest

from control_plane.api.status import describe_error
from control_plane.core.generation_params import GenerationParams
from control_plane.errors import DrainingError, QueueFullError, RequestFailedError
from hetero_infer.client import Client, Delta, Finished, PromptLogprobs, Started
from hetero_infer.wire_errors import ServerLostError
from planes.address import Address
from planes.errors import ValidationError
from protos.hetero.inference.v1 import inference_pb2 as pb
from protos.hetero.inference.v1 import inference_pb2_grpc

TEXT = "the text that it would have been"
SEED = 2**63 + 5


class Server(inference_pb2_grpc.InferenceServiceServicer):
    """Writes TEXT, one token a letter, and ends call i as `breaks[i]` says: where, and how."""

    def __init__(self):
        self.breaks = []
        self.requests = []

    def Resume(self, request, context):  # noqa: N802
        self.requests.append(pb.ResumeRequest.FromString(request.SerializeToString()))
        after, how = self.breaks.pop(0) if self.breaks else (len(TEXT) + 9, None)
        first = len(request.received_token_ids)
        assert bytes(request.received_token_ids) == TEXT[:first].encode()
        if after < 0:
            self.fail(how, context)
        sampling = request.generate.sampling
        if not sampling.HasField("seed"):
            sampling.seed = SEED
        yield pb.GenerateStreamResponse(
            started=pb.Started(request_id="r", model="m", sampling=sampling, received_tokens=first)
        )
        yield pb.GenerateStreamResponse(
            prompt_logprobs=pb.PromptLogprobs(logprobs=[pb.TokenLogprobs(logprob=-1)])
        )
        for offset in range(first, len(TEXT)):
            if offset - first == after:
                self.fail(how, context)
            letter = TEXT[offset]
            yield pb.GenerateStreamResponse(
                delta=pb.Delta(text=letter, token_ids=letter.encode(), offset=offset)
            )
        yield pb.GenerateStreamResponse(finished=pb.Finished(finish_reason=pb.FINISH_REASON_LENGTH))

    def fail(self, how, context):
        if isinstance(how, grpc.StatusCode):
            context.abort(how, "socket closed")
        told = describe_error(how)
        context.set_trailing_metadata(told.trailing_metadata)
        context.abort(told.code, told.message)


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
    with Client(address) as client:
        yield client
    grpc_server.stop(0).wait()


def read(client, *, params=None, **options):
    asked = params or GenerationParams(max_tokens=len(TEXT))
    return list(client.stream("hi", asked, resume=True, **options))


LOSSES = [
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    DrainingError("the server shut down"),
]


@pytest.mark.parametrize("how", LOSSES, ids=str)
def test_whatever_the_server_is_lost_by_the_reader_sees_one_stream(
    server, client, how, monkeypatch
):
    monkeypatch.setattr(DrainingError, "retry_after_s", 0.01)
    server.breaks = [(5, how), (0, how), (-1, how), (7, how)]
    events = read(client)
    deltas = [event for event in events if isinstance(event, Delta)]
    assert "".join(delta.text for delta in deltas) == TEXT
    assert [delta.offset for delta in deltas] == list(range(len(TEXT)))
    assert [type(event) for event in events if not isinstance(event, Delta)] == [
        Started,
        PromptLogprobs,
        Finished,
    ]
    assert len(server.requests) == 5


def test_the_continuation_is_asked_for_with_the_seed_and_model_that_began_it(server, client):
    server.breaks = [(5, grpc.StatusCode.UNAVAILABLE)]
    (started, *_) = read(client, priority=3, cache_salt="us")
    assert started.params.seed == SEED
    first, second = server.requests
    assert not first.generate.sampling.HasField("seed")
    assert (second.generate.sampling.seed, second.generate.model) == (SEED, "m")
    assert bytes(second.received_token_ids) == TEXT[:5].encode()
    for request in (first.generate, second.generate):
        assert (request.text, request.priority, request.cache_salt) == ("hi", 3, "us")


def test_a_prompt_may_be_token_ids(server, client):
    params = GenerationParams(max_tokens=len(TEXT))
    events = list(client.stream([1, 2, 3], params, resume=True))
    assert isinstance(events[-1], Finished)
    assert list(server.requests[0].generate.token_ids.ids) == [1, 2, 3]


@pytest.mark.parametrize("error", [QueueFullError("full"), RequestFailedError("NaN")], ids=str)
def test_what_is_no_loss_is_not_tried_again(server, client, error):
    server.breaks = [(5, error)]
    with pytest.raises(type(error)):
        read(client)
    assert len(server.requests) == 1


def test_patience_has_an_end_counted_from_the_last_sign_of_life(server, client):
    server.breaks = [(3, grpc.StatusCode.UNAVAILABLE)] * 3 + [(-1, LOSSES[0])] * 99
    stream = client.stream("hi", GenerationParams(), resume=True, patience_s=0.3)
    seen = []
    with pytest.raises(ServerLostError):
        seen.extend(stream)
    assert "".join(event.text for event in seen if isinstance(event, Delta)) == TEXT[:9]
    assert len(server.requests) < 20


@pytest.mark.parametrize("fields", [{"n": 2}, {"beam_width": 2}])
def test_several_samples_cannot_be_resumed(server, client, fields):
    with pytest.raises(ValidationError, match="one sample and no beams"):
        read(client, params=GenerationParams(**fields))
    assert server.requests == []


def test_leaving_the_stream_early_ends_it(server, client):
    server.breaks = [(5, grpc.StatusCode.UNAVAILABLE)]
    stream = client.stream("hi", GenerationParams(), resume=True)
    for _ in range(10):
        next(stream)
    stream.close()
    assert len(server.requests) == 2
