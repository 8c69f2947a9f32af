"""Calls in GLM-4.5's format: how templates write them may be, and is read as what is meant."""

from __future__ import annotations

import pytest

from control_plane.text.answers.tool_choice import ToolChoice
from planes.errors import ValidationError
from tests.control_plane.structured.test_answers_are_calls_where_they_must_be import (
    constraint,
    format_of,
    grammars,
    read,
)
from tests.control_plane.structured.test_calls_that_may_be_keep_to_their_schema import (
    goes,
    tokens_of,
)

__all__ = ["grammars"]

SCHEMA = {
    "type": "object",
    "properties": {"any": {}, "k": {"type": "string"}, "tags": {"type": "array"}},
    "required": ["any", "k"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]


def parameter(name: str, value: str, line: str) -> list[str]:
    begin = ["<arg_key>", name, "</arg_key>", line, "<arg_value>"]
    return [*begin, value, "</arg_value>", line]


def called(line: str, **values: str) -> list[str]:
    given = [part for name, value in values.items() for part in parameter(name, value, line)]
    return ["<tool_call>", "f", line, *given, "</tool_call>"]


@pytest.mark.parametrize("has_tokens", [False, True])
@pytest.mark.parametrize("line", ["\n", ""])
@pytest.mark.parametrize("before", ["", "\n"])
def test_calls_come_with_lines_or_without(grammars, has_tokens, line, before):
    answer = format_of("glm45", has_tokens=has_tokens, tools=TOOLS)
    said = [before, *called(line, any="a", k="b\n"), line, *called(line, any="", k="", tags="[1]")]
    tokens = tokens_of(answer, [piece for piece in said if piece])
    made = constraint(grammars, answer, ToolChoice("required"), TOOLS)
    assert goes(made, tokens) == len(tokens)
    first, second = {"any": "a", "k": "b\n"}, {"any": "", "k": "", "tags": [1]}
    assert read(answer, "".join(said)) == ([("f", first), ("f", second)], "")


def test_what_looks_like_an_open_list_does_not_swallow_the_next_parameter(grammars):
    answer = format_of("glm45", tools=TOOLS)
    said = called("", any='["a', k='b"]', tags='["</arg_value>"]')
    made = constraint(grammars, answer, ToolChoice("required"), TOOLS)
    tokens = tokens_of(answer, [piece for piece in said if piece])
    assert goes(made, tokens) == len(tokens)
    arguments = {"any": '["a', "k": 'b"]', "tags": ["</arg_value>"]}
    assert read(answer, "".join(said)) == ([("f", arguments)], "")


@pytest.mark.parametrize("name", [" a", "a ", " ", "a>b", "a\nb", ""])
def test_parameters_whose_names_would_be_read_otherwise_are_refused(grammars, name):
    tools = [{"function": {"name": "f", "parameters": {"properties": {name: {"type": "string"}}}}}]
    with pytest.raises(ValidationError, match="names of parameters have no") as caught:
        constraint(grammars, format_of("glm45", tools=tools), ToolChoice("required"), tools)
    assert caught.value.field == "tools[0].function.parameters"
