"""The application as the server calls it, with a client that goes away in the middle."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest
import structlog

from control_plane.engine import send_patience
from control_plane.engine.send_patience import SendPatience
from control_plane.http import reply

CASES = [
    ("/v1/completions", {"prompt": ["Hi", "there"], "n": 2}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
    ("/v1/responses", {"input": "Hi"}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50}),
]


class Caller:
    """One request by hand. `leave` ends it; `sent`: what the application has written."""

    def __init__(self, served, path: str, body: dict) -> None:
        self.app = served.app
        self.sent: list[dict] = []
        self.has_sent = asyncio.Event()
        self.may_send = asyncio.Event()
        self.may_send.set()
        self.inbound: asyncio.Queue[dict] = asyncio.Queue()
        data = json.dumps({"model": "tiny/bytes", **body}).encode()
        self.inbound.put_nowait({"type": "http.request", "body": data, "more_body": False})
        self.scope = {
            "type": "http", "http_version": "1.1", "method": "POST", "path": path,
            "raw_path": path.encode(), "query_string": b"", "root_path": "", "scheme": "http",
            "headers": [(b"content-type", b"application/json")],
            "server": ("test", 80), "client": ("test", 1), "asgi": {"version": "3.0"},
        }  # fmt: skip

    async def send(self, message: dict) -> None:
        await self.may_send.wait()
        self.sent.append(message)
        self.has_sent.set()

    def call(self) -> asyncio.Task[None]:
        return asyncio.create_task(self.app(self.scope, self.inbound.get, self.send))

    def leave(self) -> None:
        self.inbound.put_nowait({"type": "http.disconnect"})


@contextlib.contextmanager
def no_fault(served):
    """What is done here is counted as nobody's error, and told as none."""
    errors = served.backend.visits.num_errors.copy()
    with structlog.testing.capture_logs() as lines:
        yield
    assert served.backend.visits.num_errors == errors
    assert [line for line in lines if line["log_level"] not in ("debug", "info")] == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), CASES)
def test_a_client_that_leaves_ends_its_requests(on_loop, path, body, stream):
    async def test(served):
        served.engine.hold = 3
        caller = Caller(served, path, {**body, "stream": stream})
        task = caller.call()
        expected = len(body.get("prompt", ["one"]))
        while len(served.engine.submitted) < expected:
            await served.engine.news.wait()
            served.engine.news.clear()
        if stream:
            await caller.has_sent.wait()
        caller.leave()
        await task
        assert len(served.engine.cancelled) == expected
        assert len(served.hub) == 0
        if not stream:
            assert caller.sent == []

    on_loop(test)


def test_a_client_that_leaves_while_the_answer_is_written_ends_its_request(on_loop):
    async def test(served):
        caller = Caller(served, "/v1/completions", {"prompt": "Hi", "stream": True})
        caller.may_send.clear()
        served.engine.hold = 3
        task = caller.call()
        await served.engine.news.wait()
        caller.leave()
        await task
        assert len(served.engine.cancelled) == 1

    on_loop(test)


@pytest.mark.parametrize("prompt", ["Hi", ["Hi", "there"]])
def test_a_client_that_takes_nothing_for_long_is_taken_for_gone(on_loop, monkeypatch, prompt):
    monkeypatch.setattr(reply, "SEND_PATIENCE_S", 0.01)

    async def test(served):
        served.engine.hold = 3
        caller = Caller(served, "/v1/completions", {"prompt": prompt, "stream": True})
        with no_fault(served):
            task = caller.call()
            await caller.has_sent.wait()
            caller.may_send.clear()
            await task
        assert len(served.engine.cancelled) == len(served.engine.submitted)

    on_loop(test)


def test_a_stream_whose_next_token_is_late_goes_on(on_loop, monkeypatch):
    monkeypatch.setattr(reply, "SEND_PATIENCE_S", 0.001)
    looks = asyncio.Semaphore(0)

    class Watched(SendPatience):
        def _look(self) -> None:
            super()._look()
            looks.release()

    monkeypatch.setattr(send_patience, "SendPatience", Watched)

    async def test(served):
        served.engine.hold = 3
        caller = Caller(served, "/v1/completions", {"prompt": "Hi", "stream": True})
        task = caller.call()
        for _ in range(3):
            await looks.acquire()
        served.engine.go.set()
        await task
        assert b"".join(m.get("body", b"") for m in caller.sent).endswith(reply.DONE)
        assert served.engine.cancelled == []

    on_loop(test)


def test_a_stream_has_one_timer_however_many_events_it_has(on_loop, monkeypatch):
    timers = []

    async def test(served):
        loop = asyncio.get_running_loop()
        call_at = loop.call_at

        def noting_call_at(when: float, *rest, **named):
            timers.append(when)
            return call_at(when, *rest, **named)

        monkeypatch.setattr(loop, "call_at", noting_call_at)
        body = {"prompt": "Hi" * 20, "max_tokens": 50, "stream": True}
        caller = Caller(served, "/v1/completions", body)
        await caller.call()
        assert len(caller.sent) > 20
        assert len(timers) == 2  # one for its body, one for all its events

    on_loop(test)


def test_a_server_that_cuts_a_request_off_leaves_nothing(on_loop):
    async def test(served):
        served.engine.hold = 3
        caller = Caller(served, "/v1/completions", {"prompt": "Hi", "stream": True})
        task = caller.call()
        await caller.has_sent.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(served.engine.cancelled) == 1
        assert len(served.hub) == 0

    on_loop(test)


def test_a_client_that_leaves_while_it_sends_its_body_is_no_fault(on_loop):
    async def test(served):
        caller = Caller(served, "/v1/completions", {"prompt": "Hi"})
        caller.inbound.get_nowait()
        caller.inbound.put_nowait({"type": "http.request", "body": b"{", "more_body": True})
        caller.leave()
        with no_fault(served):
            await caller.call()
        assert served.engine.submitted == []
        assert caller.sent == []

    on_loop(test)
