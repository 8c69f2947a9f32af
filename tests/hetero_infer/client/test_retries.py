"""What is tried again, how often and after how long: decided in one place, for both clients."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from control_plane.api.status import describe_error
from control_plane.errors import (
    ComputeUnavailableError,
    DrainingError,
    QueueFullError,
    RequestFailedError,
    TokenRateError,
)
from hetero_infer import AsyncClient, Client, GenerationParams, ServerLostError
from hetero_infer.client.answers import Delta, Finished, Started
from hetero_infer.client.attempts import MAX_RETRY_AFTER_S, Attempts, Deadline
from hetero_infer.client.progress import Going, StreamProgress
from hetero_infer.client.requests import TextRequest
from planes.errors import EngineError
from protos.hetero.inference.v1 import inference_pb2 as pb
from protos.hetero.inference.v1 import inference_pb2_grpc


class Server(inference_pb2_grpc.InferenceServiceServicer):
    """Refuses as often as it is told to, then answers."""

    def __init__(self):
        self.refusals = []
        self.num_calls = 0
        self.tokens_before = 0

    def Generate(self, _request, context):  # noqa: N802
        self.refuse(context)
        return pb.GenerateResponse(text="yes", finish_reason=pb.FINISH_REASON_STOP)

    def GenerateStream(self, _request, context):  # noqa: N802
        if not self.tokens_before:
            self.refuse(context)
        yield pb.GenerateStreamResponse(started=pb.Started(request_id="r"))
        if self.tokens_before:
            self.refuse(context)
        yield pb.GenerateStreamResponse(delta=pb.Delta(text="yes", token_ids=[1]))
        yield pb.GenerateStreamResponse(finished=pb.Finished(finish_reason=pb.FINISH_REASON_STOP))

    def refuse(self, context):
        self.num_calls += 1
        if not self.refusals:
            return
        how = self.refusals.pop(0)
        if isinstance(how, grpc.StatusCode):
            context.abort(how, "socket closed")
        told = describe_error(how)
        context.set_trailing_metadata(told.trailing_metadata)
        context.abort(told.code, told.message)


def soon(error):
    error.retry_after_s = 0.01
    return error


AGAIN = [
    lambda: grpc.StatusCode.UNAVAILABLE,
    lambda: soon(DrainingError("x")),
    lambda: soon(ComputeUnavailableError("x")),
    lambda: soon(QueueFullError("x")),
    lambda: TokenRateError("x", retry_after_s=0.01),
]
CALLS = [
    lambda client: client.generate("x"),
    lambda client: client.stream("x").answer(),
]


@pytest.fixture(params=["threads", "asyncio"])
def asking(request, serve):
    """A server, and a function that asks it by either client."""
    server = Server()
    address = serve(server)

    def ask(call, **options):
        if request.param == "threads":
            with Client(address, **options) as client:
                return call(client)

        async def story():
            async with AsyncClient(address, **options) as client:
                return await call(client)

        return asyncio.run(story())

    return server, ask


@pytest.mark.spread(6)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("refusal", AGAIN)
def test_who_is_refused_before_the_first_message_asks_again(asking, call, refusal):
    server, ask = asking
    server.refusals = [refusal(), refusal()]
    assert ask(call).text == "yes"
    assert server.num_calls == 3


@pytest.mark.parametrize("call", CALLS)
def test_trying_again_has_an_end_and_can_be_switched_off(asking, call):
    server, ask = asking
    server.refusals = [grpc.StatusCode.UNAVAILABLE] * 9
    with pytest.raises(ServerLostError):
        ask(call, retries=1)
    assert server.num_calls == 2
    with pytest.raises(ServerLostError):
        ask(call, retries=0)
    assert server.num_calls == 3


@pytest.mark.parametrize("call", CALLS)
def test_each_wait_before_asking_again_is_told(asking, call):
    server, ask = asking
    server.refusals = [TokenRateError("used up", retry_after_s=0.2), soon(QueueFullError("full"))]
    told = []
    answer = ask(call, on_wait=lambda error, pause_s: told.append((error.message, pause_s)))
    assert answer.text == "yes"
    (first, first_s), (second, second_s) = told
    assert (first, second) == ("used up", "full")
    assert first_s == pytest.approx(0.2)
    assert second_s >= 0.01


@pytest.mark.parametrize("call", CALLS)
def test_what_is_not_asked_again_is_no_wait(asking, call):
    server, ask = asking
    server.refusals = [wanting(MAX_RETRY_AFTER_S + 1)]
    told = []
    with pytest.raises(QueueFullError):
        ask(call, on_wait=lambda *wait: told.append(wait))
    assert told == []


@pytest.mark.parametrize("call", CALLS)
def test_what_asking_again_does_not_help_is_asked_once(asking, call):
    server, ask = asking
    server.refusals = [RequestFailedError("NaN")]
    with pytest.raises(RequestFailedError):
        ask(call)
    assert server.num_calls == 1


def test_nothing_is_made_twice_that_has_begun_to_answer(asking):
    server, ask = asking
    server.tokens_before = 1
    server.refusals = [grpc.StatusCode.UNAVAILABLE]
    with pytest.raises(ServerLostError) as caught:
        ask(CALLS[1])
    assert server.num_calls == 1
    assert caught.value.request_id == "r"


def wanting(seconds, cls=QueueFullError):
    error = cls("x")
    error.retry_after_s = seconds
    return error


def test_pauses_grow_and_are_as_long_as_the_server_asks():
    attempts = Attempts(4, Deadline(None))
    pauses = [attempts.pause_after(ServerLostError("x")) for _ in range(3)]
    assert 0.05 <= pauses[0] <= 0.1 <= pauses[1] <= 0.2 <= pauses[2] <= 0.4
    assert attempts.pause_after(wanting(7.0)) == 7.0
    with pytest.raises(QueueFullError):
        attempts.pause_after(wanting(0.0))


def test_a_server_that_asks_for_too_much_patience_is_believed_at_once():
    with pytest.raises(QueueFullError):
        Attempts(4, Deadline(None)).pause_after(wanting(MAX_RETRY_AFTER_S + 1))


def test_no_pause_outlasts_the_deadline():
    now = [0.0]
    attempts = Attempts(4, Deadline(3.0, lambda: now[0]))
    assert attempts.pause_after(wanting(2.0)) == 2.0
    now[0] = 2.0
    with pytest.raises(QueueFullError):
        attempts.pause_after(wanting(2.0))


def started():
    return pb.GenerateStreamResponse(
        started=pb.Started(model="m", sampling=pb.SamplingParams(seed=5, max_tokens=9))
    )


def test_a_resumed_stream_asks_for_what_is_left_with_the_seed_it_had():
    now = [0.0]
    progress = StreamProgress(
        TextRequest("x", GenerationParams(max_tokens=9)),
        Going(resume=True, patience_s=10.0),
        clock=lambda: now[0],
    )
    assert progress.next_call().message.received_token_ids == []
    assert isinstance(progress.take(started()), Started)
    delta = pb.GenerateStreamResponse(delta=pb.Delta(text="ab", token_ids=[1, 2]))
    assert isinstance(progress.take(delta), Delta)
    assert progress.pause_after(wanting(1.0, DrainingError)) == 1.0
    call = progress.next_call()
    assert call.method == "Resume"
    assert call.message.received_token_ids == [1, 2]
    assert (call.message.generate.sampling.seed, call.message.generate.model) == (5, "m")
    # The new server is full: it said when to come again, and nothing has come from it.
    assert progress.pause_after(wanting(2.0)) == 2.0
    progress.next_call()
    assert progress.take(started()) is None
    with pytest.raises(QueueFullError):
        progress.pause_after(wanting(2.0))


def test_patience_is_counted_from_the_last_tokens():
    now = [0.0]
    progress = StreamProgress(
        TextRequest("x"), Going(resume=True, patience_s=10.0), clock=lambda: now[0]
    )
    for _ in range(3):
        progress.next_call()
        progress.take(pb.GenerateStreamResponse(delta=pb.Delta(text="a", token_ids=[1])))
        progress.pause_after(ServerLostError("x"))
        now[0] += 8.0
    progress.pause_after(ServerLostError("x"))
    now[0] += 3.0
    with pytest.raises(EngineError):
        progress.pause_after(ServerLostError("x"))


def test_a_server_that_begins_and_never_computes_wears_patience_out():
    now = [0.0]
    progress = StreamProgress(
        TextRequest("x"), Going(resume=True, patience_s=10.0), clock=lambda: now[0]
    )
    progress.next_call()
    progress.take(started())
    progress.pause_after(ServerLostError("x"))
    now[0] += 11.0
    progress.next_call()
    progress.take(started())
    with pytest.raises(ServerLostError):
        progress.pause_after(ServerLostError("x"))


def test_the_end_is_known_only_when_it_has_come():
    progress = StreamProgress(TextRequest("x"), Going())
    progress.take(started())
    with pytest.raises(ServerLostError):
        progress.whole_answer()
    end = pb.GenerateStreamResponse(finished=pb.Finished(finish_reason=pb.FINISH_REASON_LENGTH))
    assert isinstance(progress.take(end), Finished)
    assert progress.is_finished
    assert progress.whole_answer().finish_reason == "length"


def test_each_loss_that_is_waited_for_is_told_once():
    told = []
    now = [0.0]
    going = Going(resume=True, patience_s=10.0, on_lost=lambda error, s: told.append((error, s)))
    progress = StreamProgress(TextRequest("x"), going, clock=lambda: now[0])
    first, second = ServerLostError("first"), ServerLostError("second")
    for error in (first, second):
        progress.next_call()
        progress.take(pb.GenerateStreamResponse(delta=pb.Delta(text="a", token_ids=[1])))
        progress.pause_after(error)
        progress.pause_after(ServerLostError("still"))
    now[0] = 11.0
    with pytest.raises(ServerLostError):
        progress.pause_after(ServerLostError("given up"))
    assert told == [(first, 10.0), (second, 10.0)]
