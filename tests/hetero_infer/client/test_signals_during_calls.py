from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import grpc
import pytest
from grpc import _channel

from hetero_infer import Client, GenerationParams
from hetero_infer.client import Started, aside
from hetero_infer.client.aside import AsideCall
from hetero_infer.wire_errors import ServerLostError
from protos.hetero.inference.v1 import inference_pb2, inference_pb2_grpc
from tests.waiting import wait_until

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


@pytest.mark.wide
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


class Call:
    """Stands in for gRPC's."""

    is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


@pytest.fixture
def as_main_thread(monkeypatch) -> Callable[[Callable[[], None]], None]:
    """Run something as the main thread would; fail, and not hang, where that would hang."""

    def run(story: Callable[[], None]) -> None:
        ended: SimpleQueue[BaseException | None] = SimpleQueue()

        def play() -> None:
            try:
                story()
            except BaseException as error:  # noqa: BLE001 - the test's
                ended.put(error)
            else:
                ended.put(None)

        thread = threading.Thread(target=play, daemon=True)
        monkeypatch.setattr(aside, "is_main_thread", lambda: threading.current_thread() is thread)
        thread.start()
        error = ended.get(timeout=WAIT_S)
        if error is not None:
            raise error

    return run


@pytest.mark.parametrize("in_main_thread", [True, False])
def test_a_call_that_is_cancelled_before_it_begins_ends_at_once(in_main_thread):
    def use() -> bool:
        call = AsideCall(Call)
        call.cancel()
        return call.read(lambda made: made.is_cancelled)

    if in_main_thread:
        assert use()
    else:
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(use).result()


def test_a_call_that_is_cancelled_when_it_is_about_to_be_read_is_read_as_cancelled(
    monkeypatch, as_main_thread
):
    """A thread or a handler may cancel between any two steps of who reads."""
    start = aside.start_new_thread
    late: list[Callable[[], None]] = []

    def start_serving(function: Callable[[], None], arguments: tuple[()]) -> None:
        if function.__name__ == "_cancel":
            late.append(function)
        else:
            while late:
                late.pop()()
            start(function, arguments)

    monkeypatch.setattr(aside, "start_new_thread", start_serving)

    def story() -> None:
        call = AsideCall(Call)
        call.cancel()
        assert call.read(lambda made: made.is_cancelled)

    as_main_thread(story)


def test_a_call_that_is_cancelled_between_two_reads_is_not_made_again(as_main_thread):
    made: list[Call] = []

    def make() -> Call:
        made.append(Call())
        return made[-1]

    def story() -> None:
        call = AsideCall(make)
        assert not call.read(lambda made: made.is_cancelled)
        canceller = threading.Thread(target=call.cancel)
        canceller.start()
        canceller.join(WAIT_S)

        def is_given_up() -> bool:  # at first, its thread may have it still
            try:
                assert call.read(lambda made: made.is_cancelled)
            except ServerLostError:
                return True
            return False

        wait_until(is_given_up, "the end of the call")
        assert len(made) == 1
        assert made[0].is_cancelled

    as_main_thread(story)


def test_what_cannot_begin_says_why_where_it_was_asked_for():
    def make() -> None:
        raise ValueError("no such method")

    with pytest.raises(ValueError, match="no such method"):
        AsideCall(make).read(lambda call: call)


@pytest.mark.wide
def test_a_stream_that_is_interrupted_is_over(serve, interruption):
    with Client(serve(Interrupting())) as client:
        stream = client.stream("x", PARAMS)
        with pytest.raises(interruption):
            next(stream)
        assert next(stream, None) is None


def test_a_handler_may_close_a_stream_whatever_its_pause_is_doing(serve, as_main_thread):
    class Refusing(inference_pb2_grpc.InferenceServiceServicer):
        def Resume(self, _request, context):  # noqa: N802 - gRPC's name
            context.abort(grpc.StatusCode.UNAVAILABLE, "not now")

    def story() -> None:
        for num_lines in range(1, 7):
            left = num_lines
            stream = client.stream("x", PARAMS, resume=True)

            def trace(frame, event, _, stream=stream):
                nonlocal left
                if event == "line" and frame.f_code.co_name == "wait":
                    left -= 1
                    if left == 0:
                        stream.close()
                return trace

            sys.settrace(trace)
            try:
                assert next(stream, None) is None
            finally:
                sys.settrace(None)
            assert left <= 0

    with Client(serve(Refusing())) as client:
        as_main_thread(story)


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
