"""What a client is told over HTTP when the server is full, drains or fails."""

from __future__ import annotations

import structlog.testing

from control_plane.core.request import FinishReason
from control_plane.errors import ComputeUnavailableError, QueueFullError, RequestFailedError
from tests.control_plane.http.conftest import error_of

MODEL = "tiny/bytes"
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
HI = [{"role": "user", "content": "Hi"}]


def test_a_full_queue_is_a_429_that_says_when_to_come_again(on_loop):
    async def test(served):
        served.engine.refusal = QueueFullError("4 requests wait already")
        for stream in (False, True):
            body = {"model": MODEL, "prompt": "Hi", "stream": stream}
            response = await served.post(COMPLETIONS, body)
            error = error_of(response, 429)
            assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
            assert response.headers["retry-after"] == "1"

    on_loop(test)


def test_a_server_without_an_engine_answers_503_and_is_alive_but_not_ready(on_loop):
    async def test(served):
        error = await served.error(COMPLETIONS, {"model": MODEL, "prompt": "x"}, 503)
        assert (error["type"], error["code"]) == ("server_error", "compute_unavailable")
        error_of(await served.client.get("/v1/models"), 503)
        served.gate.drain()
        assert (await served.client.get("/healthz")).status_code == 200
        assert (await served.client.head("/healthz")).status_code == 200
        for path in ("/readyz", "/health"):
            assert (await served.client.head(path)).status_code == 503
            response = await served.client.get(path)
            assert response.status_code == 503
            assert response.json() == {"status": "unavailable", "state": "draining"}

    on_loop(test, attached=False)


def test_a_server_that_drains_takes_nothing_new(on_loop):
    async def test(served):
        assert (await served.client.get("/readyz")).json() == {"status": "ok", "state": "open"}
        served.gate.drain()
        error = await served.error(CHAT, {"model": MODEL, "messages": HI}, 503)
        assert error["code"] == "draining"

    on_loop(test)


def test_a_failure_in_mid_stream_is_an_event_and_the_end(on_loop):
    async def test(served):
        served.engine.hold, served.engine.error = 2, ComputeUnavailableError("it is away")
        events = await served.events(COMPLETIONS, {"prompt": "Hi"})
        assert [data["choices"][0]["text"] for _, data in events[:-1]] == ["i", "H"]
        error = {
            "message": "it is away", "type": "server_error", "param": None,
            "code": "compute_unavailable",
        }  # fmt: skip
        assert events[-1] == ("error", {"error": error})
        events = await served.events(CHAT, {"messages": HI})
        assert events[-1] == ("error", {"error": error})
        events = await served.events(RESPONSES, {"input": "Hi"})
        assert events[-1][0] == "response.failed"
        failed = events[-1][1]["response"]
        assert failed["status"] == "failed"
        assert failed["error"] == {"code": "server_error", "message": "it is away"}

    on_loop(test)


def test_a_failure_before_the_answer_is_a_status(on_loop):
    async def test(served):
        served.engine.hold, served.engine.error = 2, RequestFailedError("NaN logits")
        error = await served.error(COMPLETIONS, {"model": MODEL, "prompt": "Hi"}, 500)
        assert (error["message"], error["code"]) == ("NaN logits", "request_failed")
        served.engine.error = None
        served.engine.end_reason = FinishReason.CANCELLED
        error = await served.error(COMPLETIONS, {"model": MODEL, "prompt": "Hi"}, 503)
        assert error["code"] == "request_cancelled"

    on_loop(test)


def test_one_failure_among_several_prompts_ends_the_others(on_loop):
    async def test(served):
        served.engine.hold, served.engine.error = 2, ComputeUnavailableError("it is away")
        body = {"model": MODEL, "prompt": ["a", "b", "c"]}
        error = await served.error(COMPLETIONS, body, 503)
        assert error["message"] == "it is away"
        assert len(served.hub) == 0

    on_loop(test)


def test_a_fault_of_ours_says_where_the_log_has_it_and_nothing_more(on_loop):
    async def test(served):
        served.engine.submit = None
        with structlog.testing.capture_logs() as logs:
            response = await served.post(COMPLETIONS, {"model": MODEL, "prompt": "Hi"})
        error = error_of(response, 500)
        request_id = response.headers["x-request-id"]
        assert error["message"] == (
            f"internal error; the server's log has it under request {request_id}"
        )
        assert [log["event"] for log in logs if log["log_level"] == "error"] == [
            "http request failed"
        ]

    on_loop(test)
