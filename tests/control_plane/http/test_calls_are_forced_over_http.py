"""`tool_choice` that has tools called: whatever the model would say, over HTTP and gRPC."""

from __future__ import annotations

import json
import threading

import pytest

from control_plane.api import forced_calls
from control_plane.text.answers.tool_choice import with_calls
from tests.control_plane.http.conftest import MODEL
from tests.control_plane.http.test_answers_of_chats_come_in_parts import (
    PATH,
    MarkingTokenizer,
    merged,
)
from tests.control_plane.text.gemma4_template import GEMMA4
from tests.control_plane.text.known_templates import (
    HARMONY,
    LLAMA,
    MISTRAL,
    QWEN,
    QWEN_CODER,
)

KINDS = ["sun", "rain"]
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": KINDS}},
    "required": ["kind"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
NOW = {"type": "function", "function": {"name": "now"}}
ROOM = 4096
NAMED = {"type": "function", "function": {"name": "now"}}
THINKING = QWEN + "{%- if false %}<think>{%- endif %}"


def allowed_tools(mode: str, *tools: dict) -> dict:
    named = [{"type": "function", "function": {"name": t["function"]["name"]}} for t in tools]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}


def asked(choice, **fields) -> dict:
    return {
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [WEATHER, NOW],
        "tool_choice": choice,
        "seed": 5,
        **fields,
    }


def check(calls: list[dict], names: set[str]) -> None:
    """Each is a call of one of the tools, with the arguments that it may have."""
    assert calls
    for call in calls:
        function = call["function"]
        assert function["name"] in names
        arguments = json.loads(function["arguments"])
        assert arguments == {} if function["name"] == "now" else arguments["kind"] in KINDS


@pytest.mark.spread(3)
@pytest.mark.parametrize("is_marked", [False, True])
@pytest.mark.parametrize("template", [QWEN, THINKING, LLAMA, MISTRAL, QWEN_CODER, GEMMA4, HARMONY])
def test_whatever_is_said_is_calls_whole_and_streamed(on_loop, template, is_marked):
    """In all formats, with marks that are special tokens and marks that are letters."""

    async def test(served):
        served.engine.draws = True
        for seed in range(3):
            fields = asked("required", seed=seed, n=2)
            whole = await served.chat(**fields)
            streamed = merged(await served.events(PATH, fields))
            for choice in whole["choices"]:
                message = choice["message"]
                check(message["tool_calls"], {"weather", "now"})
                assert message["content"] is None
                assert choice["finish_reason"] == "tool_calls"
                one = streamed[choice["index"]]
                assert one["tool_calls"] == message["tool_calls"]
                assert one["finish_reason"] == "tool_calls"
                assert one["reasoning_content"] == message.get("reasoning_content", "")
                assert one["content"] is None

    tokenizer = MarkingTokenizer() if is_marked else None
    on_loop(test, template=template, tokenizer=tokenizer, max_model_len=ROOM)


@pytest.mark.parametrize("template", [QWEN, LLAMA, MISTRAL, QWEN_CODER, GEMMA4])
def test_the_piece_of_a_call_that_is_cut_off_is_not_said(on_loop, template):
    async def test(served):
        served.engine.draws = True
        for length in (1, 4, 9, 20):
            fields = asked("required", max_tokens=length)
            (choice,) = (await served.chat(**fields))["choices"]
            assert choice["finish_reason"] == "length"
            assert not choice["message"]["content"]
            one = merged(await served.events(PATH, fields))[0]
            assert one["finish_reason"] == "length"
            assert not one["content"]

    on_loop(test, template=template, max_model_len=ROOM)


def test_a_named_function_is_called_once_and_the_reason_is_openais(on_loop):
    async def test(served):
        served.engine.draws = True
        for seed in range(5):
            fields = asked(NAMED, seed=seed)
            (choice,) = (await served.chat(**fields))["choices"]
            (call,) = choice["message"]["tool_calls"]
            check([call], {"now"})
            assert choice["finish_reason"] == "stop"
            assert merged(await served.events(PATH, fields))[0]["finish_reason"] == "stop"

    on_loop(test, template=QWEN, max_model_len=ROOM)


def test_the_model_is_told_of_all_tools_whichever_is_to_be_called(on_loop):
    async def test(served):
        served.engine.draws = True
        for choice in ("auto", NAMED, allowed_tools("required", NOW)):
            served.engine.draws = choice != "auto"
            await served.chat(**asked(choice))
        prompts = [request.input_tokens for request in served.engine.submitted]
        assert prompts[0] == prompts[1] == prompts[2]
        assert b"weather" in bytes(prompts[0])

    on_loop(test, template=QWEN, max_model_len=ROOM)


def test_of_allowed_tools_one_is_called(on_loop):
    async def test(served):
        served.engine.draws = True
        for seed in range(5):
            fields = asked(allowed_tools("required", WEATHER), seed=seed)
            (choice,) = (await served.chat(**fields))["choices"]
            check(choice["message"]["tool_calls"], {"weather"})
            assert choice["finish_reason"] == "tool_calls"

    on_loop(test, template=QWEN, max_model_len=ROOM)


def test_calls_that_are_not_to_be_parallel_are_one(on_loop):
    async def test(served):
        served.engine.draws = True
        counts = set()
        for is_parallel in (False, True):
            for seed in range(6):
                fields = asked("required", seed=seed, parallel_tool_calls=is_parallel)
                answer = await served.chat(**fields)
                tokens = served.engine.submitted[-1].constraints[0]
                counts.add((is_parallel, len(answer["choices"][0]["message"]["tool_calls"])))
                assert tokens.is_complete or is_parallel
        assert {count for is_parallel, count in counts if not is_parallel} == {1}
        assert len(counts) > 2

    on_loop(test, template=QWEN, max_model_len=ROOM)


def test_a_strict_tool_is_called_with_its_arguments_where_the_model_decides(on_loop):
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}

    async def test(served):
        served.engine.says = ["Hi"]
        for fields in ({}, {"tool_choice": "auto"}, {"tool_choice": "none"}):
            await served.chat(**{**asked(None), **fields, "tools": [NOW, strict]})
        forms = [request.params.structured_outputs for request in served.engine.submitted]
        assert forms[0] == forms[1]
        assert forms[2] is None
        assert forms[0].may_say
        schemas = [json.loads(tool.schema) for tool in forms[0].tools]
        assert schemas == [{"type": "object"}, SCHEMA]
        # Another form is kept to, and has no calls in it.
        fields = asked(None, tools=[strict], response_format={"type": "json_object"})
        await served.chat(**fields)
        assert served.engine.submitted[-1].params.structured_outputs.kind == "json_object"

    on_loop(test, template=QWEN, max_model_len=ROOM)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (LLAMA, '{"name": "weather", "parameters": {"kind": "hail"}}'),
        (MISTRAL, '{"a": "[TOOL_CALLS]weather{}"}'),
    ],
)
def test_json_that_was_asked_for_is_content_also_where_it_looks_like_a_call(
    on_loop, template, said
):
    async def test(served):
        served.engine.says = [said]
        fields = asked(None, response_format={"type": "json_object"})
        (choice,) = (await served.chat(**fields))["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (said, "stop")
        assert "tool_calls" not in choice["message"]
        assert merged(await served.events(PATH, fields))[0]["content"] == said

    on_loop(test, template=template, max_model_len=ROOM)


def test_schemas_are_spelled_off_the_event_loop_and_only_where_they_count(on_loop, monkeypatch):
    """The longest take 80 ms."""
    threads = []

    def spelled(*args, **kwargs):
        threads.append(threading.current_thread().name)
        return with_calls(*args, **kwargs)

    monkeypatch.setattr(forced_calls, "with_calls", spelled)

    async def test(served):
        served.engine.says = ["Hi"]
        for path in (PATH, "/v1/responses"):
            flat = [{"type": "function", **NOW["function"], "strict": True}]
            nested = [{**NOW, "function": {**NOW["function"], "strict": True}}]
            is_chat = path == PATH
            said = {"messages": [{"role": "user", "content": "Hi"}]} if is_chat else {"input": "Hi"}
            body = {"model": MODEL, **said, "tools": nested if is_chat else flat}
            for choice, num_threads in (("none", 0), ("auto", 1)):
                response = await served.post(path, {**body, "tool_choice": choice})
                assert response.status_code == 200, response.text
                assert [name[:5] for name in threads] == ["apart"] * num_threads
            threads.clear()

    on_loop(test, template=QWEN, max_model_len=ROOM)


def test_of_allowed_tools_one_may_be_called(on_loop):
    async def test(served):
        served.engine.says = ["Hi"]
        await served.chat(**asked(allowed_tools("auto", NOW)))
        form = served.engine.submitted[-1].params.structured_outputs
        assert (form.may_say, [tool.name for tool in form.tools]) == (True, ["now"])

    on_loop(test, template=QWEN, max_model_len=ROOM)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (asked("required", tools=[]), "tool_choice", "must be auto or none where there are no"),
        (asked({**NAMED, "function": {"name": "tides"}}), "tool_choice", "'tides', which is none"),
        (asked(allowed_tools("required", {"function": {"name": "x"}})), "tool_choice", "'x'"),
        (asked(allowed_tools("required")), "tool_choice.allowed_tools.tools", "at least 1 item"),
        (
            asked("required", response_format={"type": "json_object"}),
            "response_format",
            "must be unset with a tool_choice",
        ),
        (
            asked("required", structured_outputs={"regex": "a"}),
            "structured_outputs",
            "must be unset with a tool_choice",
        ),
        (
            asked("required", tools=[NOW, {**WEATHER, "function": {
                "name": "x", "parameters": {"properties": {"a": {"not": {}}}}}}]),
            "tools[1].function.parameters",
            'is not supported: answers cannot keep to "not"',
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_called_is_refused_by_name(on_loop, fields, param, message):
    async def test(served):
        error = await served.error(PATH, {"model": "tiny/bytes", **fields})
        assert error["param"] == param
        assert message in error["message"]
        assert served.engine.submitted == []

    on_loop(test, template=QWEN, max_model_len=ROOM)


def test_where_the_format_of_calls_is_not_known_the_refusal_says_what_to_set(on_loop):
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}

    async def test(served):
        fields = {"model": "tiny/bytes", **asked("auto", tools=[NOW, strict])}
        error = await served.error(PATH, fields)
        assert error["param"] == "tools"
        assert "strict must be false for this model" in error["message"]
        error = await served.error(PATH, {"model": "tiny/bytes", **asked("required")})
        assert (error["param"], error["code"]) == ("tool_choice", "invalid_value")
        assert "--tool-call-parser" in error["message"]

    on_loop(test)  # its template has a place for tools, and none for calls
