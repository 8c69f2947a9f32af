from __future__ import annotations

import pytest

from hetero_infer import Message, Tool, ToolCall, ValidationError
from hetero_infer.client.conversation import messages_of, tools_of
from hetero_infer.client.convert_requests import tools_to_proto

WHOLE = [
    {"role": "system", "content": "be brief"},
    Message("user", "hi"),
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
            {"id": "2", "function": {"name": "g", "arguments": {"y": 2}}},
        ],
    },
    {"role": "tool", "content": "7", "tool_call_id": "1", "name": "f"},
]


def test_messages_become_typed():
    assert messages_of(WHOLE) == (
        Message("system", "be brief"),
        Message("user", "hi"),
        Message(
            "assistant",
            "",
            tool_calls=(ToolCall("1", "f", '{"x": 1}'), ToolCall("2", "g", '{"y": 2}')),
        ),
        Message("tool", "7", name="f", tool_call_id="1"),
    )


def test_tools_become_typed():
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    given = [{"type": "function", "function": {**function, "strict": True}}, Tool("g")]
    assert tools_of(given) == (Tool("f", "d", {"type": "object"}, strict=True), Tool("g"))
    first, second = tools_to_proto(tools_of(given))
    assert (first.parameters_json, second.parameters_json) == ('{"type": "object"}', "")
    assert (first.strict, second.strict) == (True, False)


@pytest.mark.parametrize(
    ("message", "what"),
    [
        ("hi", "messages\\[0\\] must be an object"),
        ({"content": "x"}, "messages\\[0\\].role is missing"),
        ({"role": 1, "content": "x"}, "messages\\[0\\].role must be text"),
        ({"role": "user", "content": [1]}, "messages\\[0\\].content must be text"),
        ({"role": "user", "content": "x", "refusal": "y"}, "unknown key 'refusal'"),
        ({"role": "user", "content": "x", "tool_calls": "y"}, "tool_calls must be a list"),
        (
            {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": {}}]},
            "tool_calls\\[0\\].function.name must be text",
        ),
        (
            {"role": "assistant", "content": "", "tool_calls": [{"type": "custom"}]},
            "type must be 'function', got 'custom'",
        ),
    ],
)
def test_what_is_no_message_is_refused_by_name(message, what):
    with pytest.raises(ValidationError, match=what):
        messages_of([message])


@pytest.mark.parametrize(
    "tool",
    [{"function": {"name": 1}}, {"name": "f"}, 3, {"function": {"name": "f", "strict": "yes"}}],
)
def test_what_is_no_tool_is_refused(tool):
    with pytest.raises(ValidationError, match="tools\\[0\\]"):
        tools_of([tool])


@pytest.mark.parametrize("given", ["hi", {"role": "user"}, 3])
def test_one_message_is_no_conversation(given):
    with pytest.raises(ValidationError, match="must be a list"):
        messages_of(given)
