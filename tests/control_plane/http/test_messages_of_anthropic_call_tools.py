"""Tools in `/v1/messages`: called, forced, forbidden, answered, and spoilt."""

from __future__ import annotations

import pytest

from tests.control_plane.http.anthropic_calls import (
    HI,
    PATH,
    asked,
    error_of,
    message,
    prompt,
    told,
    without_ids,
)
from tests.control_plane.text.known_templates import HARMONY, LLAMA, MISTRAL, QWEN

KINDS = ["sun", "rain"]
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": KINDS}},
    "required": ["kind"],
    "additionalProperties": False,
}
WEATHER = {"name": "weather", "description": "What it is like.", "input_schema": SCHEMA}
NOW = {"name": "now", "input_schema": {"type": "object", "additionalProperties": False}}
TOOLS = [WEATHER, NOW]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"town": "Köln"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
ROOM = 4096


def calls_of(answer: dict) -> list[tuple[str, dict]]:
    return [(b["name"], b["input"]) for b in answer["content"] if b["type"] == "tool_use"]


def with_texts(*texts: str) -> list[dict]:
    return [{"type": "text", "text": text, "citations": None} for text in texts]


def test_text_and_calls_are_blocks_in_their_order(on_loop):
    async def test(served):
        served.engine.says = [f"Let me see.\n{CALL}\nAnd then {OTHER}"]
        answer = await message(served, tools=TOOLS)
        said, call, more, other = answer["content"]
        assert [said, more] == with_texts("Let me see.", "\nAnd then")
        assert (call["name"], call["input"]) == ("weather", {"town": "Köln"})
        assert (other["name"], other["input"]) == ("now", {})
        assert call["id"] != other["id"]
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("tool_use", None)

    on_loop(test, template=QWEN, max_model_len=ROOM)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (QWEN, [f"Well:\n{CALL}\n{OTHER}", CALL, f"{CALL} then {OTHER} and {CALL}{CALL}.", "Hi"]),
        (LLAMA, ['{"name": "weather", "parameters": {"town": "Köln"}}', "Hi {"]),
        (MISTRAL, ['[TOOL_CALLS] [{"name": "weather", "arguments": {"town": "Köln"}}]', "[TOOL]"]),
    ],
)
def test_a_stream_of_blocks_equals_the_whole(on_loop, template, says):
    async def test(served):
        for text in says:
            served.engine.says = [text]
            fields = {"tools": TOOLS, "seed": 3, "max_tokens": 250}
            whole, streamed = await message(served, **fields), await told(served, **fields)
            assert without_ids(streamed) == without_ids(whole), text

    on_loop(test, template=template, max_model_len=ROOM)


@pytest.mark.parametrize("is_eager", [True, False])
def test_input_is_streamed_while_it_is_written_if_that_is_wanted_or_else_whole(on_loop, is_eager):
    async def test(served):
        served.engine.says = [CALL]
        tools = [{**WEATHER, "eager_input_streaming": is_eager}, NOW]
        events = await served.events(PATH, asked(tools=tools))
        start = next(data for name, data in events if name == "content_block_start")
        assert start["content_block"]["input"] == {}
        deltas = [data["delta"] for name, data in events if name == "content_block_delta"]
        text = '{"town": "Köln"}'
        assert [delta["type"] for delta in deltas] == ["input_json_delta"] * len(deltas)
        told_at_once = [*text] if is_eager else [text]
        assert [delta["partial_json"] for delta in deltas] == told_at_once

    on_loop(test, template=QWEN, max_model_len=ROOM)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_tool_is_called_where_one_must_be_and_its_input_keeps_to_the_schema(on_loop, choice):
    async def test(served):
        served.engine.draws = True
        for seed in range(4):
            fields = {"tools": TOOLS, "tool_choice": choice, "seed": seed, "max_tokens": 2000}
            answer = await message(served, **fields)
            calls = calls_of(answer)
            assert answer["stop_reason"] == "tool_use"
            assert calls
            if choice["type"] == "tool":
                assert [name for name, _ in calls] == ["weather"]
            for name, given in calls:
                assert given == {} if name == "now" else given["kind"] in KINDS
            assert without_ids(await told(served, **fields)) == without_ids(answer)

    on_loop(test, template=QWEN, max_model_len=ROOM)


def test_calls_that_are_not_to_be_parallel_are_one(on_loop):
    async def test(served):
        served.engine.says = [CALL + OTHER]
        for single, count in ((True, 1), (False, 2)):
            choice = {"type": "auto", "disable_parallel_tool_use": single}
            answer = await message(served, tools=TOOLS, tool_choice=choice)
            assert len(calls_of(answer)) == count
        served.engine.draws = True
        for seed in range(4):
            choice = {"type": "any", "disable_parallel_tool_use": True}
            answer = await message(served, tools=TOOLS, tool_choice=choice, seed=seed)
            assert len(calls_of(answer)) == 1

    on_loop(test, template=QWEN, max_model_len=ROOM)


def test_where_none_may_be_called_calls_are_text(on_loop):
    async def test(served):
        served.engine.says = [CALL]
        for fields in ({}, {"tools": TOOLS, "tool_choice": {"type": "none"}}):
            answer = await message(served, **fields)
            assert answer["content"] == with_texts(CALL)
            assert answer["stop_reason"] == "end_turn"

    on_loop(test, template=QWEN, max_model_len=ROOM)


def test_a_strict_tool_keeps_to_its_schema_where_the_model_decides(on_loop):
    async def test(served):
        served.engine.says = ["Hi"]
        await message(served, tools=[NOW, {**WEATHER, "strict": True}])
        form = served.engine.submitted[-1].params.structured_outputs
        assert form.may_say
        assert [tool.name for tool in form.tools] == ["now", "weather"]
        assert form.tools[1].place == "tools[1].input_schema"

    on_loop(test, template=QWEN, max_model_len=ROOM)


def test_calls_and_their_results_are_told_to_the_model(on_loop):
    async def test(served):
        served.engine.says = [f"Hm.\n{CALL}"]
        called = await message(served, tools=TOOLS)
        call_id = called["content"][-1]["id"]
        served.engine.says = ["It rains."]
        for result, seen in (
            ({"content": "rain"}, "rain"),
            ({"content": [{"type": "text", "text": "ra"}, {"type": "text", "text": "in"}]}, "rain"),
            ({"content": "not there", "is_error": True}, "Error: not there"),
            ({}, ""),
        ):
            block = {"type": "tool_result", "tool_use_id": call_id, **result}
            conversation = [
                *HI,
                {"role": "assistant", "content": called["content"]},
                {"role": "user", "content": [block, {"type": "text", "text": "And?"}]},
            ]
            told_to_it = await prompt(served, tools=TOOLS, messages=conversation)
            assert told_to_it.endswith(
                "<|im_start|>assistant\nHm.\n" + CALL + "<|im_end|>\n<|im_start|>user\n"
                f"<tool_response>\n{seen}\n</tool_response><|im_end|>\n"
                "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
            )

    on_loop(test, template=QWEN, max_model_len=ROOM)


def test_a_template_that_refuses_text_behind_results_is_told_both_as_one(on_loop):
    async def test(served):
        call = {"type": "tool_use", "id": "abcdef123", "name": "weather", "input": {"kind": "sun"}}
        result = {"type": "tool_result", "tool_use_id": "abcdef123", "content": "It shines."}
        turns = [
            *HI,
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
        ]
        seen = await prompt(served, tools=TOOLS, messages=turns)
        assert "It shines.\n\nAnd now?" in seen
        # What is wrong for another reason is refused with that.
        turns.insert(0, {"role": "assistant", "content": "Hm."})
        response = await served.post(PATH, asked(tools=TOOLS, messages=turns))
        assert "alternate" in error_of(response)["message"]

    on_loop(test, template=MISTRAL, max_model_len=ROOM)


@pytest.mark.parametrize(
    ("arguments", "length"), [('{"town": Köln}', 250), ('{"town": "Köln", "kind": "ra', 60)]
)
def test_what_is_no_object_stands_in_one_and_comes_back_to_the_model_as_it_was(
    on_loop, arguments, length
):
    async def test(served):
        said = f'<tool_call>\n{{"name": "weather", "arguments": {arguments}'
        closed = said + "}\n</tool_call>" if length > len(said) else said + "x" * 99
        served.engine.says = [closed]
        fields = {"tools": TOOLS, "max_tokens": min(length, len(closed.encode()))}
        answer = await message(served, **fields)
        assert without_ids(await told(served, **fields)) == without_ids(answer)
        ((name, given),) = calls_of(answer)
        assert (name, list(given)) == ("weather", ["INVALID_JSON"])
        assert given["INVALID_JSON"].startswith(arguments[:10])
        handed_back = [
            *HI,
            {"role": "assistant", "content": answer["content"]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": answer["content"][0]["id"]}]},
        ]  # fmt: skip
        seen = await prompt(served, tools=TOOLS, messages=handed_back)
        assert f'"arguments": {given["INVALID_JSON"]}}}' in seen

    on_loop(test, template=QWEN, max_model_len=ROOM)


def test_what_is_told_eagerly_is_what_was_written_whatever_it_is(on_loop):
    async def test(served):
        served.engine.says = [CALL.replace('"Köln"', "Köln")]
        tools = [{**WEATHER, "eager_input_streaming": True}]
        events = await served.events(PATH, asked(tools=tools))
        deltas = [data["delta"] for name, data in events if name == "content_block_delta"]
        assert "".join(delta["partial_json"] for delta in deltas) == '{"town": Köln}'

    on_loop(test, template=QWEN, max_model_len=ROOM)


def test_a_call_that_is_cut_off_ends_for_its_length(on_loop):
    async def test(served):
        served.engine.says = [CALL]
        answer = await message(served, tools=TOOLS, max_tokens=50)
        assert answer["stop_reason"] == "max_tokens"
        answer = await message(served, tools=TOOLS, stop_sequences=["ln"])
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "ln")

    on_loop(test, template=QWEN, max_model_len=ROOM)


def test_what_is_said_behind_a_call_in_channels_is_no_part_of_it(on_loop):
    call = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    text = f'{call}{{"x": 1}}<|call|><|start|>assistant<|channel|>analysis<|message|>Rain?'

    async def test(served):
        served.engine.says = [text]
        for answer in (await message(served, tools=TOOLS), await told(served, tools=TOOLS)):
            call, thought = answer["content"]
            assert (call["input"], thought["thinking"]) == ({"x": 1}, "Rain?")
        # Handed back, it does not stand between the call and its result.
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "rain"}
        turns = [
            {"role": "assistant", "content": answer["content"]},
            {"role": "user", "content": [result]},
        ]
        seen = await prompt(served, tools=TOOLS, messages=[*HI, *turns])
        without = [{**turns[0], "content": answer["content"][:1]}, turns[1]]
        assert seen == await prompt(served, tools=TOOLS, messages=[*HI, *without])

    on_loop(test, template=HARMONY, max_model_len=1000)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tool_choice": {"type": "any"}}, "tool_choice must be auto or none where there are no"),
        ({"tool_choice": {"type": "tool", "name": "x"}, "tools": TOOLS}, "tool_choice names 'x'"),
        ({"tool_choice": {"type": "tool"}, "tools": TOOLS}, "'tool_choice.name': name is required"),
        ({"tool_choice": {"type": "auto", "name": "x"}}, "only allowed with the type tool"),
        ({"tool_choice": {"type": "required"}}, "'tool_choice.type': Input should be 'auto'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
         "'tools[0].type': Input should be 'custom', got 'web_search_20250305'"),
        ({"tools": [{"name": "f"}]}, "Missing required parameter: 'tools[0].input_schema'"),
        ({"tools": [{"name": "f", "input_schema": {}, "input_examples": []}]},
         "Unknown or unsupported parameter: 'tools[0].input_examples'"),
        ({"tools": [NOW, NOW]}, "tools[1] must have a name of its own"),
        ({"tools": [NOW] * 129}, "'tools': List should have at most 128 items"),
        ({"tools": [{"name": "f", "input_schema": {"properties": {"a": {"not": {}}}},
                     "strict": True}]}, "tools[0].input_schema"),
    ],
)  # fmt: skip
def test_what_cannot_be_called_is_refused_by_name(on_loop, fields, words):
    async def test(served):
        error = error_of(await served.post(PATH, asked(**fields)))
        assert error["type"] == "invalid_request_error"
        assert words in error["message"]
        assert served.engine.submitted == []

    on_loop(test, template=QWEN, max_model_len=ROOM)
