from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from grpc import _channel

from hetero_infer import Client, GenerationParams
from hetero_infer.client import Started
from hetero_infer.client.aside import AsideCall
from protos.hetero.inference.v1 import inference_pb2, inference_pb2_grpc

PARAMS = GenerationParams(max_tokens=9)

WAIT_S = 10.0


class Endless(inference_pb2_grpc.InferenceServiceServicer):
    """Answers nothing until its client has gone."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.ended = threading.Event()

    def Generate(self, _request, context):  # noqa: N802 - gRPC's name
        self._wait(context)

    def GenerateStream(self, _request, context):  # noqa: N802 - gRPC's name
        self._wait(context)
        yield from ()

    def _wait(self, context) -> None:
        self.began.set()
        gone = threading.Event()
        if context.add_callback(gone.set):
            gone.wait(WAIT_S)
        self.ended.set()


class Interrupting(Endless):
    """Sends a signal to its client, and waits like the other."""

    def _wait(self, context) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        super()._wait(context)


def stream(client: Client) -> None:
    with client.stream("x", PARAMS) as events:
        list(events)


def stream_without_closing(client: Client) -> None:
    list(client.stream("x", PARAMS))


def generate(client: Client) -> None:
    client.generate("x", PARAMS)


@pytest.fixture(params=[KeyboardInterrupt, SystemExit])
def interruption(request) -> Iterator[type[BaseException]]:
    """What the handler of SIGINT raises."""

    def handler(_number: int, _frame: object) -> None:
        raise request.param

    before = signal.signal(signal.SIGINT, handler)
    yield request.param
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("use", [stream, stream_without_closing, generate])
def test_a_signal_while_a_call_begins_ends_the_call_and_the_program_goes_on(
    serve, monkeypatch, interruption, use: Callable[[Client], None]
):
    """gRPC knows of the call by then, and has not handed it to anybody."""
    server = Endless()
    begin = _channel._run_channel_spin_thread

    def begin_with_a_signal(state):
        begin(state)
        assert server.began.wait(WAIT_S)
        os.kill(os.getpid(), signal.SIGINT)

    with Client(serve(server)) as client:
        monkeypatch.setattr(_channel, "_run_channel_spin_thread", begin_with_a_signal)
        with pytest.raises(interruption):
            use(client)
        assert server.ended.wait(WAIT_S)


@pytest.mark.parametrize("use", [stream, stream_without_closing, generate])
def test_a_signal_while_an_answer_is_awaited_ends_the_call(
    serve, interruption, use: Callable[[Client], None]
):
    server = Interrupting()
    with Client(serve(server)) as client:
        with pytest.raises(interruption):
            use(client)
        assert server.ended.wait(WAIT_S)


@pytest.mark.parametrize("in_main_thread", [True, False])
def test_a_call_that_is_cancelled_before_it_begins_ends_at_once(in_main_thread):
    class Call:
        is_cancelled = False

        def cancel(self) -> None:
            self.is_cancelled = True

    def use() -> bool:
        call = AsideCall(Call)
        call.cancel()
        return call.read(lambda made: made.is_cancelled)

    if in_main_thread:
        assert use()
    else:
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(use).result()


def test_what_cannot_begin_says_why_where_it_was_asked_for():
    def make() -> None:
        raise ValueError("no such method")

    with pytest.raises(ValueError, match="no such method"):
        AsideCall(make).read(lambda call: call)


def test_a_stream_that_is_interrupted_is_over(serve, interruption):
    with Client(serve(Interrupting())) as client:
        stream = client.stream("x", PARAMS)
        with pytest.raises(interruption):
            next(stream)
        assert next(stream, None) is None


def test_a_stream_that_is_given_up_ends_its_call(serve):
    class Starting(Endless):
        def GenerateStream(self, _request, context):  # noqa: N802 - gRPC's name
            context.add_callback(self.ended.set)
            yield inference_pb2.GenerateStreamResponse(started={"request_id": "1"})
            self._wait(context)

    server = Starting()
    with Client(serve(server)) as client:
        assert isinstance(next(client.stream("x", PARAMS)), Started)
        assert server.ended.wait(WAIT_S)
