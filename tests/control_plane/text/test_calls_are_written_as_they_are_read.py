"""What prompts have of earlier calls where templates write none: their readers read it back."""

from __future__ import annotations

import json
import random

import pytest

from control_plane.text.answers.formats import CALL_READERS, HARMONY
from control_plane.text.answers.parameter_kinds import parameters_of_tools
from control_plane.text.answers.parser import AnswerFormat, Thinking
from control_plane.text.answers.written_calls import WRITERS, Call, message_with

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "properties": {"text": {"type": "string"}, "other": {"type": ["object", "array"]}}
            },
        },
    }
    for name in ("f", "other-tool")
]


def read(name: str, text: str, content: str = "") -> list[tuple[str, object]]:
    given = AnswerFormat(
        Thinking.IS_OVER, CALL_READERS[name], parameters=parameters_of_tools(TOOLS)
    )
    parser, calls, said = given.parser(), {}, ""
    for parts in (parser.push(text), parser.finish()):
        said += parts.content
        for call in parts.calls:
            calls.setdefault(call.number, [call.name, ""])[1] += call.arguments
    assert said.rstrip("\n") == content
    return [(name, json.loads(arguments)) for name, arguments in calls.values()]


def test_there_is_a_writer_for_every_format_whose_calls_are_text():
    assert WRITERS.keys() == CALL_READERS.keys() - {HARMONY}


@pytest.mark.spread(5)
@pytest.mark.parametrize("name", WRITERS)
def test_what_is_written_is_read_as_the_same_calls(name):
    rng = random.Random(3)
    for _ in range(300):
        calls = [
            Call(tool, _arguments(rng), number)
            for number, tool in enumerate(rng.choices(["f", "other-tool"], k=rng.randrange(1, 4)))
        ]
        expected = [(call.name, call.arguments) for call in calls]
        assert read(name, WRITERS[name](calls)) == expected
        assert read(name, message_with(name, "Well.", calls), "Well.") == expected


@pytest.mark.parametrize("name", WRITERS)
def test_arguments_that_were_no_json_are_there_too(name):
    assert "{x: oh" in WRITERS[name]([Call("f", "{x: oh")])


def _arguments(rng: random.Random) -> dict[str, object]:
    """Without what would close a value where nothing is quoted."""
    text = "".join(rng.choice("ab'\"\\ ,)]}:=é😀{[(|/") for _ in range(rng.randrange(1, 12)))
    nested = {"a": [True, None, -1.5], "b'": {"c": text}}
    drawn = {"text": text, "other": rng.choice([{}, [], nested, [text, 3]]), "more": 12}
    return {key: drawn[key] for key in drawn if rng.random() < 0.6}
