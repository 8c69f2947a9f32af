"""Whatever goes wrong on the routes of Anthropic's API, it is told in Anthropic's shape."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
import structlog.testing

from control_plane.access.keyring import Keyring
from control_plane.access.limits import Limits
from control_plane.access.token_file import add_token
from control_plane.core.request import FinishReason
from control_plane.errors import ComputeUnavailableError, QueueFullError, RequestFailedError
from control_plane.http.edge import MAX_HEAD_BYTES, Edge
from control_plane.http.places import refuse_connection
from control_plane.metrics.visits import VisitMeter
from tests.control_plane.http.anthropic_calls import COUNT, HI, PATH, asked, error_of
from tests.control_plane.http.conftest import Served
from tests.control_plane.http.conftest import error_of as openai_error_of

JSON = {"content-type": "application/json"}
INVALID = "invalid_request_error"


def said(*blocks: object, role: str = "user") -> dict:
    return {"messages": [*HI, {"role": role, "content": list(blocks)}]}


IMAGE = {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}
TEXT = {"type": "text", "text": "x"}
USE = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "1"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "Missing required parameter: 'max_tokens'."),
        ({"max_tokens": 0}, "Invalid 'max_tokens': Input should be greater than or equal to 1"),
        ({"max_tokens": "9"}, "'max_tokens': Input should be a valid integer, got '9'"),
        ({"messages": None}, "Missing required parameter: 'messages'."),
        ({"messages": []}, "'messages': List should have at least 1 item"),
        ({"messages": HI * 2049}, "'messages': List should have at most 2048 items"),
        ({"messages": [{"role": "tool", "content": "x"}]},
         "'messages[0].role': Input should be 'user', 'assistant' or 'system', got 'tool'"),
        ({"messages": [{"role": "user", "content": 5}]},
         "'messages[0].content': Input should be a string or a list of blocks, got 5"),
        (said(), "'messages[1].content': List should have at least 1 item"),
        (said(TEXT, IMAGE), "'messages[1].content[1].type': Input should be 'text' or "
         "'tool_result', got 'image'"),
        (said({"type": "document"}), "'messages[1].content[0].type'"),
        (said({"type": "document"}), "got 'document'"),
        (said(USE), "'messages[1].content[0].type': Input should be 'text' or 'tool_result'"),
        (said(RESULT, role="assistant"), "'messages[1].content[0].type': Input should be 'text', "),
        (said({"text": "x"}), "Missing required parameter: 'messages[1].content[0].type'"),
        (said({**RESULT, "content": [IMAGE]}), "'messages[1].content[0].content[0].type': Input "
         "should be 'text', got 'image'"),
        (said({**USE, "input": "{}"}, role="assistant"),
         "'messages[1].content[0].input': Input should be an object, got '{}'"),
        (said(*[USE] * 129, role="assistant"), "'messages[1].content': content must have at most "
         "128 tool_use blocks, got 129"),
        (said(USE, role="assistant"), "'messages[1]': the last message must be the user's"),
        (said(role="assistant"), "'messages[1]': the last message must be the user's"),
        ({"system": [IMAGE]}, "'system[0].type': Input should be 'text', got 'image'"),
        ({"stop_sequences": "x"}, "'stop_sequences': Input should be a valid array, got 'x'"),
        ({"stop_sequences": [""]}, "'stop_sequences[0]': String should have at least 1 character"),
        ({"stop_sequences": ["x"] * 17}, "'stop_sequences': List should have at most 16 items"),
        ({"stop": ["x"]}, "Unknown or unsupported parameter: 'stop'."),
        ({"temperature": 2.5}, "'temperature': Input should be less than or equal to 2, got 2.5"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}},
         "'thinking.budget_tokens': Input should be greater than or equal to 1024, got 5"),
        ({"thinking": {"type": "often"}}, "'thinking.type': Input should be 'enabled'"),
        ({"output_config": {"effort": "huge"}}, "'output_config.effort'"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "no"}}}},
         "output_config.format"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}},
          "structured_outputs": {"regex": "a"}}, "structured_outputs is not allowed with"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
         "'context_management.edits[0].type'"),
        ({"min_tokens": 300}, "'min_tokens': min_tokens must be at most max_tokens (250), got 300"),
        ({"mcp_servers": []}, "Unknown or unsupported parameter: 'mcp_servers'."),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "prompt is too long: the prompt"),
        ({"stream": 1}, "'stream': Input should be a valid boolean, got 1"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named_in_the_message(on_loop, fields, words):
    async def test(served):
        error = error_of(await served.post(PATH, asked(**fields)))
        assert error["type"] == INVALID
        assert words in error["message"]
        assert served.engine.submitted == []

    on_loop(test)


def test_the_field_and_a_word_for_what_is_wrong_are_told_to_programs(on_loop):
    async def test(served):
        for fields, code, param in (
            (said(TEXT, IMAGE), "invalid_value", "messages[1].content[1].type"),
            ({"max_tokens": None}, "missing_required_parameter", "max_tokens"),
            ({"mcp_servers": []}, "unknown_parameter", "mcp_servers"),
            ({"messages": [{"role": "user", "content": "x" * 600}]},
             "context_length_exceeded", "messages"),
            ({"thread": {"type": "create"}}, "thread_unsupported_request", "thread"),
        ):  # fmt: skip
            error = error_of(await served.post(PATH, asked(**fields)))
            assert error["details"] == {"error_code": code, "param": param}

    on_loop(test)


def test_what_a_message_may_not_have_a_count_may_not_either(on_loop):
    async def test(served):
        error = error_of(await served.post(COUNT, asked()))
        assert error["message"] == "Unknown or unsupported parameter: 'max_tokens'."

    on_loop(test)


@pytest.mark.parametrize("path", [PATH, COUNT])
def test_bodies_that_are_none_are_refused(on_loop, path):
    async def test(served):
        async def send(data: bytes, kind: str = "application/json"):
            return await served.client.post(path, content=data, headers={"content-type": kind})

        error = error_of(await send(b'{"model": '))
        assert (error["type"], "not valid JSON" in error["message"]) == (INVALID, True)
        error = error_of(await send(b"{}", "text/plain"), 415)
        assert (error["type"], "application/json" in error["message"]) == (INVALID, True)
        limit = 256 << 10
        error = error_of(await send(b'"' + b"x" * limit + b'"'), 413)
        assert error["type"] == "request_too_large"
        assert error["message"] == f"The body has at most {limit} bytes, got {limit + 2}."

    on_loop(test)


def test_an_unknown_model_and_an_unknown_path_are_not_found(on_loop):
    async def test(served):
        for path in (PATH, COUNT):
            body = {"model": "claude", "messages": HI}
            if path == PATH:
                body["max_tokens"] = 5
            error = error_of(await served.post(path, body), 404)
            assert (error["type"], "'claude'" in error["message"]) == ("not_found_error", True)
        error = error_of(await served.post(f"{PATH}/batches", {}), 404)
        assert error["type"] == "not_found_error"
        error = error_of(await served.client.get(PATH), 405)
        assert (error["type"], error["message"]) == (INVALID, f"Method not allowed (GET {PATH}).")
        openai_error_of(await served.post("/v1/messagesx", {}), 404)

    on_loop(test)


def test_a_head_that_is_too_large_is_refused(on_loop):
    async def test(served):
        response = await served.post(PATH, asked(), **{"anthropic-beta": "x" * MAX_HEAD_BYTES})
        assert error_of(response, 431)["type"] == INVALID

    on_loop(test)


def test_a_port_without_places_is_overloaded():
    async def ask(path: str) -> httpx.Response:
        transport = httpx.ASGITransport(Edge(refuse_connection, VisitMeter()))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(path)

    assert error_of(asyncio.run(ask(PATH)), 503)["type"] == "overloaded_error"
    openai_error_of(asyncio.run(ask("/v1/responses")), 503)


def test_a_full_queue_says_when_to_come_again_and_a_server_that_is_away_is_overloaded(on_loop):
    async def test(served):
        served.engine.refusal = QueueFullError("4 requests wait already")
        for stream in (False, True):
            response = await served.post(PATH, asked(stream=stream))
            assert error_of(response, 429)["type"] == "rate_limit_error"
            assert response.headers["retry-after"] == "1"
        served.gate.drain()
        assert error_of(await served.post(PATH, asked()), 503)["type"] == "overloaded_error"

    on_loop(test)


def test_a_failure_before_the_answer_is_a_status(on_loop):
    async def test(served):
        served.engine.hold, served.engine.error = 2, RequestFailedError("NaN logits")
        error = error_of(await served.post(PATH, asked()), 500)
        assert (error["type"], error["message"]) == ("api_error", "NaN logits")
        assert error["details"] == {"error_code": "request_failed", "param": None}
        served.engine.error = None
        served.engine.end_reason = FinishReason.CANCELLED
        assert error_of(await served.post(PATH, asked()), 503)["type"] == "overloaded_error"

    on_loop(test)


def test_a_failure_in_mid_stream_is_an_event_and_the_end(on_loop):
    async def test(served):
        served.engine.hold, served.engine.error = 2, ComputeUnavailableError("it is away")
        events = await served.events(PATH, asked())
        assert [name for name, _ in events] == [
            "message_start", "ping", "content_block_start", *["content_block_delta"] * 2, "error",
        ]  # fmt: skip
        error = events[-1][1]
        request_id = error.pop("request_id")
        assert events[0][1]["message"]["id"] == f"msg_{request_id}"
        assert error == {
            "type": "error",
            "error": {
                "type": "overloaded_error", "message": "it is away",
                "details": {"error_code": "compute_unavailable", "param": None},
            },
        }  # fmt: skip
        assert len(served.hub) == 0

    on_loop(test)


def test_a_fault_of_ours_says_where_the_log_has_it_and_nothing_more(on_loop):
    async def test(served):
        served.engine.submit = None
        with structlog.testing.capture_logs():
            response = await served.post(PATH, asked())
        error, request_id = error_of(response, 500), response.headers["x-request-id"]
        assert (error["type"], error["message"]) == (
            "api_error", f"internal error; the server's log has it under request {request_id}",
        )  # fmt: skip

    on_loop(test)


@pytest.fixture
def token(tmp_path):
    return add_token(tmp_path / "t.json", "alice", Limits(), admin=False, shares_cache=False)


@pytest.fixture
def keyring(tmp_path, token):  # noqa: ARG001 - the file has it
    return Keyring(tmp_path / "t.json")


def test_a_token_may_come_as_anthropics_clients_show_it(on_loop, keyring, token):
    async def test(served: Served):
        bearer = {"Authorization": f"Bearer {token}"}
        for shown in (bearer, {"x-api-key": token}, bearer | {"x-api-key": "wrong"}):
            for path, body in ((PATH, asked()), (COUNT, {"model": "tiny/bytes", "messages": HI})):
                assert (await served.post(path, body, **shown)).status_code == 200
        # Elsewhere it is no token.
        response = await served.post("/v1/responses", {"input": "Hi"}, **{"x-api-key": token})
        assert openai_error_of(response, 401)["code"] == "token_missing"

    on_loop(test, keyring=keyring)


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ([], "x-api-key: TOKEN, once, or Authorization: Bearer TOKEN"),
        ([("x-api-key", "wrong")], "does not know this token"),
        ([("x-api-key", "")], "1 to 512 characters, got 0"),
        ([("x-api-key", "x" * 513)], "1 to 512 characters, got 513"),
        ([("x-api-key", "x"), ("x-api-key", "y")], "x-api-key: TOKEN, once"),
        ([("Authorization", "Bearer wrong")], "does not know this token"),
    ],
)
@pytest.mark.parametrize("path", [PATH, COUNT, f"{PATH}/batches"])
def test_without_a_token_a_request_is_401(on_loop, keyring, headers, words, path):
    async def test(served):
        data = json.dumps(asked()).encode()
        response = await served.client.post(path, content=data, headers=[*JSON.items(), *headers])
        error = error_of(response, 401)
        assert error["type"] == "authentication_error"
        assert words in error["message"]
        assert response.headers["www-authenticate"] == "Bearer"

    on_loop(test, keyring=keyring)


def test_what_a_token_may_not_use_is_a_429(on_loop, tmp_path):
    limits = Limits(max_concurrent_requests=2, max_tokens_per_minute=40)
    file = tmp_path / "limits.json"
    shown = {"x-api-key": add_token(file, "bob", limits, admin=False, shares_cache=False)}

    async def test(served):
        assert (await served.post(PATH, asked(max_tokens=60), **shown)).status_code == 200
        counted = {"model": "tiny/bytes", "messages": HI}
        for path, body in ((PATH, asked()), (COUNT, counted)):
            response = await served.post(path, body, **shown)
            assert error_of(response, 429)["type"] == "rate_limit_error"
            assert int(response.headers["retry-after"]) > 0

    on_loop(test, keyring=Keyring(file))
