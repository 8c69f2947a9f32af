"""Calls in the format of GLM-4.5 and 4.7: names and values between marks, nothing quoted."""

from __future__ import annotations

import json
import random

import pytest

from control_plane.text.answers.glm_reader import GlmReader
from control_plane.text.answers.parameter_kinds import parameters_of_tools
from control_plane.text.answers.parser import AnswerFormat, Thinking
from control_plane.text.answers.parts import CallPiece, Parts
from tests.control_plane.text.test_answers_come_apart import cuts_of, order_of, read

SCHEMA = {
    "properties": {
        "city": {"type": "string"},
        "maybe": {"type": ["string", "null"]},
        "days": {"type": "integer"},
        "wet": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "any": {},
        "odd": {"minProperties": 1},
    },
}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "bare"}},
]
OPEN_TEXT = ("tags", '["a')
GIVEN = AnswerFormat(Thinking.IS_OVER, GlmReader, parameters=parameters_of_tools(TOOLS))


def written(*parameters: tuple[str, str], name: str = "f", line: str = "\n") -> str:
    """A call as templates of GLM-4.5 write it; without lines, as those of GLM-4.7."""
    values = "".join(
        f"<arg_key>{key}</arg_key>{line}<arg_value>{value}</arg_value>{line}"
        for key, value in parameters
    )
    return f"<tool_call>{name}{line}{values}</tool_call>"


def every_cut(text: str, given: AnswerFormat = GIVEN) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls, the same however the text is cut."""
    cuts = cuts_of(text, random.Random(text))
    first, *others = [read(given, pieces) for pieces in cuts]
    assert others == [first] * len(others)
    order, *orders = [order_of(given, pieces) for pieces in cuts]
    assert orders == [order] * len(orders)
    return first[0], first[2]


@pytest.mark.parametrize("line", ["\n", "", " \n "])
@pytest.mark.parametrize(
    ("key", "written_as", "value"),
    [
        ("city", "Köln", "Köln"),
        ("city", "42", "42"),
        ("city", "", ""),
        ("city", "\n a\n", "\n a\n"),
        ("city", 'a </arg_key> "b" </tool_call>', 'a </arg_key> "b" </tool_call>'),
        ("maybe", "null", None),
        ("maybe", "nil", "nil"),
        ("days", "3", 3),
        ("days", " 3\n", 3),
        ("days", "three", "three"),
        ("wet", "True", True),
        ("tags", '["a", "</arg_key>"]', ["a", "</arg_key>"]),
        ("tags", r'["\"</arg_value>", "</arg_value>\\"]', ['"</arg_value>', "</arg_value>\\"]),
        ("tags", "['a', \"b\", None]", ["a", "b", None]),  # as some templates write it
        ("tags", "['a', {1}]", "['a', {1}]"),
        ("odd", '{"</arg_value>": 1}', {"</arg_value>": 1}),
        ("odd", "True", "True"),
        ("any", "5", 5),
        ("any", "five", "five"),
        ("unknown", '{"a": 1}', {"a": 1}),
    ],
)
def test_values_become_what_the_tools_say(line, key, written_as, value):
    content, calls = every_cut(written((key, written_as), line=line))
    assert content == ""
    ((name, arguments),) = calls
    assert (name, json.loads(arguments)) == ("f", {key: value})


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("<tool_call>bare</tool_call>", "", [("bare", {})]),
        ("<tool_call>\nbare\n</tool_call>\n", "", [("bare", {})]),
        (f"So.\n{written(('city', 'a'))}\n{written(name='bare')}", "So.",
         [("f", {"city": "a"}), ("bare", {})]),
        (written(("city", "a"), ("days", "2")), "", [("f", {"city": "a", "days": 2})]),
        (f"{written(('city', 'a'))} then", " then", [("f", {"city": "a"})]),
        # The next call begins before this one is closed.
        ("<tool_call>f<arg_key>city</arg_key><arg_value>a</arg_value><tool_call>bare</tool_call>",
         "", [("f", {"city": "a"}), ("bare", {})]),
        # A parameter that it has already, one without a value and other text are content.
        (written(("city", "a"), ("city", "b")),
         "\n<arg_key>city</arg_key>\n<arg_value>b</arg_value>", [("f", {"city": "a"})]),
        ("<tool_call>f<arg_key>city</arg_key>so</tool_call>", "<arg_key>city</arg_key>so",
         [("f", {})]),
        ("<tool_call>f<arg_key> </arg_key><arg_value>a</arg_value></tool_call>",
         "<arg_key> </arg_key><arg_value>a</arg_value>", [("f", {})]),
        (f"<tool_call>f<arg_key>{'k' * 257}</arg_key></tool_call>",
         f"<arg_key>{'k' * 257}</arg_key>", [("f", {})]),
        ("<tool_call>f<arg_key>city</arg_key><arg_value>a</arg_value>oh</tool_call>", "oh",
         [("f", {"city": "a"})]),
        # A text in a list that nothing closes ends with the value after all.
        (f"{written(OPEN_TEXT, ('days', '3'))}\n{written(OPEN_TEXT)}", "",
         [("f", {"tags": '["a', "days": 3}), ("f", {"tags": '["a'})]),
        # Of what may be a text the first mark is the end, whatever quotes there are.
        (written(("any", '["a'), ("city", 'b"]')), "", [("f", {"any": '["a', "city": 'b"]'})]),
        # Nothing is lost behind what has wrong quotes.
        (f"{written(OPEN_TEXT)}Is 3 <", "Is 3 <", [("f", {"tags": '["a'})]),
        # What is no call is text.
        *((text, text, []) for text in (
            "<tool_call></tool_call>",
            "<tool_call>f<b>",
            "<tool_call>f\ng\n</tool_call>",
            f"<tool_call>{'n' * 65}</tool_call>",
            '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
            "<tool_call>\n<function=f>\n</function>\n</tool_call>",
            "<tool_call>f",
        )),
    ],
)  # fmt: skip
def test_calls_come_out_and_the_rest_is_content(text, content, calls):
    said, found = every_cut(text)
    assert said == content
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


def test_texts_are_told_as_they_come_and_what_is_cut_off_stays():
    parser = GIVEN.parser()
    assert parser.push("So <tool_call>f\n<arg_key>city</arg_key>") == Parts(
        "So", calls=(CallPiece(0, "f", "{"),)
    )
    assert parser.push("\n<arg_value>Kö") == Parts(calls=(CallPiece(0, None, '"city": "Kö'),))
    assert parser.push('ln "') == Parts(calls=(CallPiece(0, None, 'ln \\"'),))
    assert parser.push("</arg_val") == Parts()
    assert parser.finish(is_cut_off=True) == Parts()
    for begun in ("<arg_key>ci", "<arg_key>city</arg_key>", "<arg_key>city</arg_key>\n<arg_val"):
        assert every_cut(f"<tool_call>f{begun}") == ("", [("f", "{")])


def test_behind_the_call_that_is_wanted_nothing_is_read():
    whole = written(("city", "a"))
    for pieces in cuts_of(f"{whole}\n{written(name='bare')}", random.Random(6)):
        said, _, calls = read(GIVEN, pieces, max_calls=1)
        assert (said, calls) == ("", [("f", '{"city": "a"}')])


@pytest.mark.parametrize("end", ["", '"x</arg_value></tool_call>'])
def test_what_has_wrong_quotes_is_read_again_once_and_in_small_pieces(monkeypatch, end):
    seen = []
    in_call = GlmReader._in_call

    def counted(self, text):
        seen.append(len(text))
        return in_call(self, text)

    monkeypatch.setattr(GlmReader, "_in_call", counted)
    begin = '<tool_call>f<arg_key>tags</arg_key><arg_value>["a</arg_value>'
    again = '<arg_key>tags</arg_key><arg_value>["</arg_value>'
    text = begin + again * 400 + end
    parser = GIVEN.parser()
    parser.push(text)
    parser.finish()
    assert max(seen) <= 1024
    assert sum(seen) < 30 * len(text)
