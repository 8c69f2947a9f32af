"""What `/v1/responses` takes as input: items of earlier responses, calls and what they returned."""

from __future__ import annotations

import json

import pytest
from pydantic import TypeAdapter

from control_plane.http.chat_schema import Message, plain_messages
from control_plane.http.responses_input import Input, plain_input
from tests.control_plane.text.known_templates import QWEN

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
ANSWER = (
    "<think>\nRain?\n</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"town": "Köln"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "tides", "arguments": {}}\n</tool_call>'
)


def test_items_that_are_handed_back_are_what_a_chat_hands_back(on_loop):
    async def test(served):
        served.engine.says = [ANSWER]
        asked = {"tools": [TOOL], "seed": 3}
        output = (await served.respond("Hi", **asked, max_output_tokens=250))["output"]
        call_ids = [item["call_id"] for item in output if item["type"] == "function_call"]
        given = [
            {"role": "user", "content": "Hi"},
            *output,
            *(
                {"type": "function_call_output", "call_id": call_id, "output": "rain"}
                for call_id in call_ids
            ),
        ]
        await served.respond(given, **asked, max_output_tokens=9)
        function = {"name": "weather", "parameters": TOOL["parameters"]}
        tools = [{"type": "function", "function": function}]
        answer = await served.chat("Hi", tools=tools, seed=3, max_tokens=250)
        message = answer["choices"][0]["message"]
        messages = [
            {"role": "user", "content": "Hi"},
            message,
            *(
                {"role": "tool", "tool_call_id": call["id"], "content": "rain"}
                for call in message["tool_calls"]
            ),
        ]
        await served.chat(messages=messages, tools=tools, max_tokens=9)
        by_responses, by_chat = [served.engine.submitted[at].input_tokens for at in (1, 3)]
        assert bytes(by_responses).decode() == bytes(by_chat).decode()
        assert "<think>\nRain?\n</think>" in bytes(by_responses).decode()

    on_loop(test, template=QWEN)


USER = {"role": "user", "content": "u"}
THOUGHT_ITEM = {
    "type": "reasoning", "id": "rs_1", "summary": [], "status": "completed",
    "content": [{"type": "reasoning_text", "text": "t"}, {"type": "reasoning_text", "text": "!"}],
}  # fmt: skip
CALL_ITEM = {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"x": 3}'}
OUTPUT_ITEM = {
    "type": "function_call_output", "call_id": "1",
    "output": [{"type": "input_text", "text": "4"}, {"type": "input_text", "text": "2"}],
}  # fmt: skip
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]}
PARSED = {**SAID, "content": [{**SAID["content"][0], "parsed": {"name": "Ulm"}}]}
CHAT_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 3}'}}
CHAT_RESULT = {"role": "tool", "tool_call_id": "1", "content": "42"}


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        (
            [USER, THOUGHT_ITEM, SAID, CALL_ITEM, SAID, CALL_ITEM, OUTPUT_ITEM, OUTPUT_ITEM],
            [
                USER,
                {"role": "assistant", "content": "aa", "reasoning_content": "t!",
                 "tool_calls": [CHAT_CALL, CHAT_CALL]},
                CHAT_RESULT,
                CHAT_RESULT,
            ],
        ),
        ([SAID, SAID, USER], [{"role": "assistant", "content": "a"}] * 2 + [USER]),
        (
            [CALL_ITEM, OUTPUT_ITEM, CALL_ITEM, USER],
            [
                {"role": "assistant", "tool_calls": [CHAT_CALL]},
                CHAT_RESULT,
                {"role": "assistant", "tool_calls": [CHAT_CALL]},
                USER,
            ],
        ),
        (
            [SAID, THOUGHT_ITEM, CALL_ITEM],
            [
                {"role": "assistant", "content": "a"},
                {"role": "assistant", "content": "", "reasoning_content": "t!",
                 "tool_calls": [CHAT_CALL]},
            ],
        ),
        ([{"type": "reasoning"}, SAID], [{"role": "assistant", "content": "a"}]),
        ([{"type": "reasoning", "id": None}, SAID], [{"role": "assistant", "content": "a"}]),
        ([PARSED, {**CALL_ITEM, "parsed_arguments": {"x": 3}}],
         [{"role": "assistant", "content": "a", "tool_calls": [CHAT_CALL]}]),
    ],
)  # fmt: skip
def test_what_belongs_to_one_turn_of_the_assistant_is_one_message(items, messages):
    given = TypeAdapter(Input).validate_python(items)
    said = TypeAdapter(list[Message]).validate_python(messages)
    assert plain_input(given) == plain_messages(said)


def test_calls_that_a_template_leaves_out_are_written_in_their_message(on_loop):
    async def test(served):
        given = [
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"x": 1}'},
            {"type": "function_call_output", "call_id": "1", "output": "42"},
        ]
        await served.respond(given, tools=[TOOL], max_output_tokens=1)
        prompt = bytes(served.engine.submitted[0].input_tokens).decode()
        call = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
        assert prompt.startswith("<system># Tools")
        assert prompt.endswith(f"<assistant>{call}<user><tool_response>\n42\n</tool_response>")

    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    on_loop(test, template=template, max_model_len=4096)


def test_a_template_without_any_place_for_tools_or_calls_is_told(on_loop):
    async def test(served):
        error = await served.error(PATH, {"model": "tiny/bytes", "input": "Hi", "tools": [TOOL]})
        assert (error["param"], error["code"]) == ("tools", "invalid_value")
        given = [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}]
        error = await served.error(PATH, {"model": "tiny/bytes", "input": given})
        assert error["param"] == "input"
        assert "has no place for tool calls" in error["message"]

    on_loop(test, template="Hi")


def test_numbers_that_json_does_not_have_are_refused(on_loop):
    async def test(served):
        for fields, param in (
            ('"tools": [{"type": "function", "name": "f", "parameters": {"x": NaN}}]',
             "tools[0].parameters"),
            ('"text": {"format": {"type": "json_schema", "name": "n", "schema": {"x": NaN}}}',
             "text.format"),
        ):  # fmt: skip
            body = f'{{"model": "tiny/bytes", "input": "Hi", {fields}}}'
            json.loads(body)  # Python takes it
            headers = {"content-type": "application/json"}
            response = await served.client.post(PATH, content=body, headers=headers)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == param

    on_loop(test)
