"""What a conversation is, whichever surface brings it."""

from __future__ import annotations

import pytest

from control_plane.text.conversation import (
    ROLES,
    call_arguments,
    check_tools,
    json_object,
    template_messages,
)
from planes.errors import ValidationError


def test_templates_hear_of_a_developer_as_the_system():
    given = [{"role": role, "content": role} for role in ROLES if role != "tool"]
    given.append({"role": "tool", "content": "x", "tool_call_id": "1", "name": "f"})
    found = template_messages(given)
    assert [m["role"] for m in found] == ["system", "system", "user", "assistant", "tool"]
    assert found[-1] == given[-1]
    assert given[1]["role"] == "developer"


def test_templates_hear_of_reasoning_by_either_word_but_not_of_both_it_and_content_at_a_call():
    said = {"role": "assistant", "content": "", "reasoning_content": "Hm", "tool_calls": [{}]}
    (found,) = template_messages([said])
    assert found == {**said, "thinking": "Hm"}
    (found,) = template_messages([{**said, "content": "I look."}])
    assert "thinking" not in found
    assert found["reasoning_content"] == "Hm"


@pytest.mark.parametrize(
    ("message", "field", "said"),
    [
        ({"role": "bot"}, "role", "system, developer, user, assistant, tool, got 'bot'"),
        ({"role": "User"}, "role", "got 'User'"),
        ({"role": ""}, "role", "got ''"),
        ({"role": ["user"]}, "role", "got ['user']"),
        ({}, "role", "got None"),
        ({"role": "user", "tool_calls": []}, "tool_calls", "got role 'user'"),
        ({"role": "user", "tool_call_id": "1"}, "tool_call_id", "unset for role 'user'"),
        ({"role": "tool"}, "tool_call_id", "given for role 'tool'"),
    ],
)
def test_what_is_no_message_is_named_by_its_place(message, field, said):
    with pytest.raises(ValidationError) as caught:
        template_messages([{"role": "user", "content": "x"}, message])
    assert caught.value.field == f"messages[1].{field}"
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("tools", "field"),
    [
        ([{"type": "function", "function": {"name": "f"}}] * 129, "tools"),
        ([{"type": "function", "function": {"name": ""}}], "tools[0]"),
        ([{"type": "function", "function": {"name": "f" * 65}}], "tools[0]"),
        ([{"name": "f"}], "tools[0]"),
    ],
)
def test_tools_have_names_and_are_not_too_many(tools, field):
    with pytest.raises(ValidationError) as caught:
        check_tools(tools)
    assert caught.value.field == field


def test_two_tools_of_one_name_are_refused():
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g", "f")]
    with pytest.raises(ValidationError, match=r"tools\[0\] is called 'f'") as caught:
        check_tools(tools)
    assert caught.value.field == "tools[2]"


def test_arguments_of_a_call_are_a_json_object_or_the_text_that_the_model_wrote():
    assert call_arguments("") == {}
    assert call_arguments('{"x": [1, null]}') == {"x": [1, None]}
    assert call_arguments(r'{"x": "\ud83d\ude00"}') == {"x": "😀"}
    for text in ("[", "[1]", "5", '{"x": NaN}', '{"x": 1e999}', "[" * 100_000):
        assert call_arguments(text) == text


def test_a_json_object_is_one():
    assert json_object("") == {}
    assert json_object('{"x": [1, null]}') == {"x": [1, None]}
    for text in ("[", "[1]", "5", '{"x": NaN}', '{"x": -Infinity}', "[" * 100_000):
        with pytest.raises(ValueError, match="must be"):
            json_object(text)
