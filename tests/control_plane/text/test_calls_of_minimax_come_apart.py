"""Calls of MiniMax-M2: several between two marks, names in quotes, values as they stand."""

from __future__ import annotations

import json
import random

import pytest

from control_plane.text.answers.parameter_kinds import parameters_of_tools
from control_plane.text.answers.parser import AnswerFormat, Thinking
from control_plane.text.answers.qwen3_coder_reader import MiniMaxReader
from tests.control_plane.text.test_answers_come_apart import cuts_of, order_of, read

OPEN, CLOSE = MiniMaxReader.NAMES
SCHEMA = {"properties": {"text": {"type": "string"}, "list": {"type": "array"}}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
GIVEN = AnswerFormat(Thinking.IS_OVER, MiniMaxReader, parameters=parameters_of_tools(TOOLS))
F = '<invoke name="f">\n</invoke>'
G = '<invoke name="g">\n<parameter name="x">1</parameter>\n</invoke>'
OF_F, OF_G = ("f", {}), ("g", {"x": 1})


def with_value(name: str, value: str) -> str:
    parameter = f'<parameter name="{name}">{value}</parameter>'
    return f'{OPEN}\n<invoke name="f">\n{parameter}\n</invoke>\n{CLOSE}'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"{OPEN}\n{F}\n{CLOSE}", "", [OF_F]),
        (f"Well.\n{OPEN}\n{F}\n{G}\n{CLOSE} Done.", "Well. Done.", [OF_F, OF_G]),
        (f"{OPEN}{F}{G}{CLOSE}", "", [OF_F, OF_G]),
        (f"{OPEN}\n{F}\n{CLOSE}\n{OPEN}\n{G}\n{CLOSE}", "", [OF_F, OF_G]),
        (f"{OPEN}\n{F}", "", [OF_F]),
        (f"{OPEN}\n{F} and", " and", [OF_F]),
        (f'{OPEN}\n<invoke name="f">\n{CLOSE}', "", [OF_F]),  # nothing closes the call
        (f'{OPEN}\n<invoke name="f "g"">\n</invoke>\n{CLOSE}', "", [('f "g"', {})]),
        (with_value("text", "a <b>\n </para\n"), "", [("f", {"text": "a <b>\n </para\n"})]),
        (with_value("text", "\n5"), "", [("f", {"text": "\n5"})]),
        (with_value("list", '["</parameter>"]'), "", [("f", {"list": ["</parameter>"]})]),
        *(
            (text, text, [])
            for text in (
                F,  # without the mark
                f"{OPEN}\n{CLOSE}",
                f"{OPEN} no {CLOSE}",
                f"{OPEN}\n<invoke name=f>\n</invoke>\n{CLOSE}",
                f'{OPEN}\n<invoke name="f>\n</invoke>\n{CLOSE}',
                f'{OPEN}\n<invoke name="">\n</invoke>\n{CLOSE}',
                f'{OPEN}\n<invoke name="{"n" * 65}">\n</invoke>\n{CLOSE}',
                f'{OPEN}\n<invoke name="f',
            )
        ),
        # A parameter without quotes stands in the call, and is content behind it.
        (
            f'{OPEN}\n<invoke name="f">\n<parameter name=x>1</parameter>\n</invoke>\n{CLOSE}',
            "\n<parameter name=x>1</parameter>",
            [OF_F],
        ),
    ],
)
def test_calls_come_out_of_the_text_and_the_rest_is_content(text, content, calls):
    for pieces in cuts_of(text, random.Random(text)):
        said, _, found = read(GIVEN, pieces)
        assert said == content
        assert [(name, json.loads(arguments)) for name, arguments in found] == calls


def test_a_name_may_be_as_long_as_any_other():
    name = "n" * 64
    text = f'{OPEN}\n<invoke name="{name}">\n</invoke>\n{CLOSE}'
    assert read(GIVEN, [text]) == ("", "", [(name, "{}")])


def test_reasoning_content_and_calls_are_told_in_their_order():
    given = AnswerFormat(Thinking.HAS_BEGUN, MiniMaxReader)
    for pieces in cuts_of(f"Hm {OPEN}?</think>So{OPEN}{F}{G}{CLOSE}then", random.Random(4)):
        assert order_of(given, pieces) == [f"Hm {OPEN}?So", 0, 1, "then"]


@pytest.mark.parametrize("rest", [f"\n{G}\n{CLOSE}", f"\n{CLOSE}and", " and"])
def test_behind_the_calls_that_are_wanted_nothing_is_read(rest):
    for pieces in cuts_of(f"{OPEN}\n{F}{rest}", random.Random(5)):
        assert read(GIVEN, pieces, max_calls=1) == ("", "", [("f", "{}")])
