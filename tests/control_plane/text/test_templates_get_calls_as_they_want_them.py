"""Earlier calls are given to a chat template in the form in which it can write them."""

from __future__ import annotations

import pytest

from control_plane.text.chat_template import ChatTemplate

CALL = (
    "{% for m in messages %}{% if m.role == 'user' %}<u>{{ m.content }}{% elif CONDITION %}"
    "{% for c in m.tool_calls %}{{ '<c>' + c.function.name + ':' + ARGUMENTS }}{% endfor %}"
    "{% else %}{{ '<a>' + m.content }}{% endif %}{% endfor %}"
)
ANY, NO_CONTENT = "m.tool_calls", "m.content is none"
WRITTEN = "<u>Hi<c>f:{}<a>Köln?<c>g:{}"


def template(condition: str, arguments: str) -> ChatTemplate:
    return ChatTemplate(CALL.replace("CONDITION", condition).replace("ARGUMENTS", arguments))


def called(name: str, arguments: object, content: str = "") -> dict:
    call = {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


MESSAGES = [
    {"role": "user", "content": "Hi"},
    called("f", {"city": "Köln"}),
    {"role": "assistant", "content": "Köln?"},
    called("g", "{no JSON"),
]


@pytest.mark.parametrize("condition", [ANY, NO_CONTENT])
@pytest.mark.parametrize(
    ("arguments", "other"),
    [
        ("c.function.arguments | tojson", '"{no JSON"'),
        ("c.function.arguments", "{no JSON"),
        ("c.function.arguments | string", "{no JSON"),
    ],
)
def test_arguments_are_json_whatever_a_template_makes_of_objects(condition, arguments, other):
    rendered = template(condition, arguments).render(MESSAGES)
    assert rendered == WRITTEN.format('{"city": "Köln"}', other)
    assert MESSAGES[1] == called("f", {"city": "Köln"})  # the caller's are as they were


def test_a_template_that_takes_values_apart_gets_objects():
    values = "c.function.arguments.items() | map('join', '=') | join(',')"
    assert template(ANY, values).render(MESSAGES[:2]) == "<u>Hi<c>f:city=Köln"


def test_content_beside_a_call_stands_before_it_where_calls_without_any_are_wanted():
    messages = [called("f", {}, "So"), called("g", {})]
    rendered = template(NO_CONTENT, "c.function.arguments").render(messages)
    assert rendered == "<a>So<c>f:{}<c>g:{}"


def test_a_template_that_writes_no_call_gets_what_there_is():
    assert ChatTemplate("{{ messages[1].content == '' }}").render(MESSAGES) == "True"
    assert ChatTemplate("{{ messages[1].tool_calls[0].function.arguments.city }}").render(
        MESSAGES
    ) == "Köln"  # fmt: skip


def test_empty_content_is_none_where_it_would_be_an_empty_message_behind_the_call():
    both = CALL.replace("CONDITION", ANY).replace("ARGUMENTS", "c.function.arguments | tojson")
    both += "{% if messages[-1].content is not none %}<a>{{ messages[-1].content }}{% endif %}"
    assert ChatTemplate(both).render([called("f", {})]) == "<c>f:{}"
