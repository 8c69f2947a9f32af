"""What a body may hold: bytes, values, fields, and all bodies together; a chat's length."""

from __future__ import annotations

import asyncio
import gc
import json

import pytest

from control_plane.http import body_size
from control_plane.http.body_size import Held, check_elements
from control_plane.http.chat_schema import ChatRequest
from control_plane.http.errors import HttpRefusal
from control_plane.http.responses_schema import ResponseRequest
from control_plane.text.bounds import (
    MAX_ELEMENTS,
    MAX_INLINE_BYTES,
    MAX_MESSAGES,
    max_body_bytes,
    max_message_bytes,
)
from tests.control_plane.http.conftest import MODEL, error_of

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
EMBEDDINGS = "/v1/embeddings"
HI = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f"}}
FLAT_TOOL = {"type": "function", "name": "f"}


def test_the_bounds_follow_from_the_longest_request():
    assert [max_body_bytes(n) for n in (1, 2048, 1 << 20)] == [256 << 10, 512 << 10, 8 << 20]
    assert [max_message_bytes(n) for n in (0, 2048, 1 << 20)] == [256 << 10, 512 << 10, 16 << 20]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"messages": [HI] * (MAX_MESSAGES + 1)}, "messages"),
        (CHAT, {"messages": [HI], "tools": [TOOL] * 129}, "tools"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 1025}]},
            "messages[0].content",
        ),
        (COMPLETIONS, {"prompt": ["a"] * 257}, "prompt"),
        (EMBEDDINGS, {"input": ["a"] * 2049}, "input"),
        (EMBEDDINGS, {"input": [[1]] * 2049}, "input"),
        (COMPLETIONS, {"prompt": "a", "metadata": {str(i): "" for i in range(17)}}, "metadata"),
        (COMPLETIONS, {"prompt": "a", **dict.fromkeys(map(str, range(5000)), 0)}, None),
        (RESPONSES, {"input": [HI] * (MAX_MESSAGES + 1)}, "input"),
        ("/tokenize", {"messages": [HI] * (MAX_MESSAGES + 1)}, "messages"),
    ],
)
def test_too_many_of_anything_are_refused(on_loop, path, fields, param):
    async def test(served):
        error = await served.error(path, {"model": MODEL, **fields})
        assert error["param"] == param
        assert "at most" in error["message"]

    on_loop(test)


@pytest.mark.parametrize("metadata", [{"k" * 65: "v"}, {"k": "v" * 513}])
def test_metadata_are_as_long_as_openais(on_loop, metadata):
    async def test(served):
        body = {"model": MODEL, "prompt": "a", "metadata": metadata}
        assert "metadata" in (await served.error(COMPLETIONS, body))["param"]

    on_loop(test)


def test_the_arguments_of_a_call_are_bounded(on_loop):
    async def test(served):
        function = {"name": "f", "arguments": json.dumps({"x": "y" * (33 << 10)})}
        call = {"id": "1", "type": "function", "function": function}
        body = {"model": MODEL, "messages": [{"role": "assistant", "tool_calls": [call]}]}
        error = await served.error(CHAT, body)
        assert error["param"] == "messages[0].tool_calls[0].function.arguments"

    on_loop(test)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "é" * 70_000}]}, "messages"),
        (CHAT, {"messages": [HI] * 9, "tools": [TOOL | {"function": {
            "name": "f", "description": "x" * 140_000}}]}, "tools"),
        (RESPONSES, {"input": "x" * 140_000}, "input"),
        (COMPLETIONS, {"prompt": "x" * 140_000}, "prompt"),
    ],
)  # fmt: skip
def test_a_text_longer_than_any_prompt_exceeds_the_context(on_loop, path, fields, param):
    async def test(served):
        error = await served.error(path, {"model": MODEL, **fields})
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)

    on_loop(test)


def test_values_are_counted_outside_of_texts_only():
    check_elements(json.dumps({"prompt": '[{",\\"' * MAX_ELEMENTS}).encode(), 0)
    check_elements(b'{"a": ' + b"[" * (MAX_ELEMENTS - 2), 0)  # no JSON: its parser says so
    check_elements(b'"\\' + b'\\"' * 100_000, 0)
    for data in (b"[" * (MAX_ELEMENTS + 1), b'"",' * (MAX_ELEMENTS + 1), b"0," * 100_000):
        with pytest.raises(HttpRefusal, match="at most"):
            check_elements(data, 0)
    check_elements(b"0," * 80_000 + b"0", 2048)


def test_bodies_are_held_together_up_to_a_bound():
    held = Held(limit=1000)
    with held.body(2048) as one, held.body(2048) as other:
        one.add(b"x" * (MAX_INLINE_BYTES + 900))
        other.add(b"x" * MAX_INLINE_BYTES)  # what is small is always taken
        with pytest.raises(HttpRefusal) as refused:
            other.add(b"x" * 101)
        assert refused.value.failure.status == 503
        assert refused.value.failure.headers["Retry-After"] == "1"
        other.add(b"x" * 100)
        assert held.num_bytes == 1000
    assert held.num_bytes == 0


def test_a_slow_body_gives_way_to_others(monkeypatch):
    monkeypatch.setattr(body_size, "GRACE_S", 0.0)
    first = b"x" * (MAX_INLINE_BYTES + 900)

    async def test():
        held, has_begun = Held(limit=1000), asyncio.Event()

        async def slowly():
            yield first
            has_begun.set()
            await asyncio.Event().wait()

        async def receive():
            with held.body(2048) as body:
                await body.receive(slowly(), 60)

        slow = asyncio.create_task(receive())
        await has_begun.wait()
        with held.body(2048) as other:
            other.add(first)
            assert held.num_bytes == 900
            with pytest.raises(HttpRefusal) as refused:
                await asyncio.wait_for(slow, 10)
            assert refused.value.failure.error["code"] == "too_many_large_requests"
            assert held.num_bytes == 900
        assert held.num_bytes == 0

    asyncio.run(test())


def test_a_conversation_is_let_go_of_once_it_is_a_prompt(on_loop):
    async def test(served):
        served.engine.hold = 0
        fields = {"messages": [HI] * 7, "tools": [TOOL], "tool_choice": "none", "max_tokens": 4}
        asking = [
            asyncio.create_task(served.chat(**fields)),
            asyncio.create_task(
                served.respond([HI] * 7, tools=[FLAT_TOOL], tool_choice="none", max_output_tokens=4)
            ),
        ]
        while len(served.engine.submitted) < 2:
            await served.engine.news.wait()
            served.engine.news.clear()
        objects = gc.get_objects()
        chats = [one for one in objects if type(one) is ChatRequest]
        responses = [one for one in objects if type(one) is ResponseRequest]
        assert {(len(one.messages), one.tools) for one in chats} == {(0, None)}
        assert {(one.input, one.tools) for one in responses} == {("", None)}
        served.engine.go.set()
        _, response = await asyncio.gather(*asking)
        assert [tool["name"] for tool in response["tools"]] == ["f"]  # it is repeated nevertheless

    on_loop(test)


def test_a_large_body_is_refused_where_no_model_says_how_large_it_may_be(on_loop):
    async def test(served):
        body = {"model": MODEL, "prompt": "x" * 300_000}
        error_of(await served.post(COMPLETIONS, body), 503)

    on_loop(test, attached=False)
