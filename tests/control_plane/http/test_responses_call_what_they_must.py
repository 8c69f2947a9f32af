"""`tool_choice` of `/v1/responses` that has functions called, whatever the model would say."""

from __future__ import annotations

import json

import pytest

from tests.control_plane.text.known_templates import LLAMA, MISTRAL, QWEN

PATH = "/v1/responses"
KINDS = ["sun", "rain"]
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": KINDS}},
    "required": ["kind"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "name": "weather", "parameters": SCHEMA}
NOW = {"type": "function", "name": "now"}
NAMED = {"type": "function", "name": "now"}
ROOM = 4096


def allowed(mode: str, *names: str) -> dict:
    tools = [{"type": "function", "name": name} for name in names]
    return {"type": "allowed_tools", "mode": mode, "tools": tools}


def asked(choice, **fields) -> dict:
    return {"tools": [WEATHER, NOW], "tool_choice": choice, "seed": 5, **fields}


def calls_of(items: list[dict]) -> list[tuple[str, str]]:
    """Check that items are reasoning and whole calls; their names and arguments."""
    assert {item["type"] for item in items} <= {"reasoning", "function_call"}
    calls = [item for item in items if item["type"] == "function_call"]
    assert {call["status"] for call in calls} == {"completed"}
    for call in calls:
        arguments = json.loads(call["arguments"])
        assert arguments == {} if call["name"] == "now" else arguments["kind"] in KINDS
    return [(call["name"], call["arguments"]) for call in calls]


@pytest.mark.spread(3)
@pytest.mark.parametrize("template", [QWEN, LLAMA, MISTRAL])
@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"weather", "now"}),
        (NAMED, {"now"}),
        (allowed("required", "weather"), {"weather"}),
    ],
)
def test_whatever_the_model_would_say_is_calls_whole_and_streamed(on_loop, template, choice, names):
    async def test(served):
        served.engine.draws = True
        for seed in range(3):
            fields = asked(choice, seed=seed)
            whole = await served.respond("Hi", **fields)
            calls = calls_of(whole["output"])
            assert {name for name, _ in calls} <= names
            assert whole["tool_choice"] == choice
            events = await served.events(PATH, {"input": "Hi", **fields})
            assert calls_of(events[-1][1]["response"]["output"]) == calls
            if choice == NAMED:
                assert len(calls) == 1

    on_loop(test, template=template, max_model_len=ROOM)


def test_calls_that_are_not_to_be_parallel_are_one(on_loop):
    async def test(served):
        served.engine.draws = True
        counts = set()
        for is_parallel in (False, True):
            for seed in range(6):
                fields = asked("required", seed=seed, parallel_tool_calls=is_parallel)
                calls = calls_of((await served.respond("Hi", **fields))["output"])
                counts.add((is_parallel, len(calls)))
                is_whole = served.engine.submitted[-1].constraints[0].is_complete
                assert is_whole or is_parallel
        assert {count for is_parallel, count in counts if not is_parallel} == {1}
        assert len(counts) > 2

    on_loop(test, template=QWEN, max_model_len=ROOM)


def test_strict_and_allowed_functions_are_kept_to_where_the_model_decides(on_loop):
    strict = {**WEATHER, "strict": True}

    async def test(served):
        served.engine.says = ["Hi"]
        answer = await served.respond("Hi", tools=[NOW, strict])
        assert [tool["strict"] for tool in answer["tools"]] == [False, True]
        await served.respond("Hi", **asked(allowed("auto", "now")))
        await served.respond("Hi", **asked("auto"))
        forms = [request.params.structured_outputs for request in served.engine.submitted]
        assert [json.loads(tool.schema) for tool in forms[0].tools] == [{"type": "object"}, SCHEMA]
        assert [tool.name for tool in forms[1].tools] == ["now"]
        assert forms[0].may_say
        assert forms[1].may_say
        assert forms[2] is None

    on_loop(test, template=QWEN, max_model_len=ROOM)


def test_where_the_format_of_calls_is_not_known_the_refusal_says_what_to_set(on_loop):
    async def test(served):
        body = {"model": "tiny/bytes", "input": "Hi"}
        error = await served.error(PATH, {**body, **asked("required")})
        assert error["param"] == "tool_choice"
        assert "--tool-call-parser" in error["message"]
        error = await served.error(PATH, {**body, "tools": [{**NOW, "strict": True}]})
        assert error["param"] == "tools"

    on_loop(test)  # its template has a place for tools, and none for calls


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (asked({**NAMED, "name": "tides"}), "tool_choice", "'tides', which is none"),
        (asked(allowed("required")), "tool_choice.tools", "at least 1 item"),
        (
            asked("required", text={"format": {"type": "json_object"}}),
            "text.format",
            "must be unset with a tool_choice",
        ),
        (
            asked("required", tools=[NOW, {**NOW, "name": "x", "parameters": {
                "properties": {"a": {"not": {}}}}}]),
            "tools[1].parameters",
            'is not supported: answers cannot keep to "not"',
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_called_is_refused_by_name(on_loop, fields, param, message):
    async def test(served):
        error = await served.error(PATH, {"model": "tiny/bytes", "input": "Hi", **fields})
        assert error["param"] == param
        assert message in error["message"]
        assert served.engine.submitted == []

    on_loop(test, template=QWEN, max_model_len=ROOM)
