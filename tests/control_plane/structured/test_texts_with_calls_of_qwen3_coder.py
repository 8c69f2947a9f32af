"""Texts with calls in Qwen3-Coder's format, which may begin with either of two marks."""

from __future__ import annotations

import json
import random

import pytest

from control_plane.text.answers.parser import Thinking
from control_plane.text.answers.tool_choice import ToolChoice
from control_plane.text.simple_tokenizer import EOS_TOKEN_ID
from tests.control_plane.structured.test_answers_are_calls_where_they_must_be import (
    allowed,
    constraint,
    format_of,
    grammars,
    take,
)
from tests.control_plane.structured.test_calls_of_qwen3_coder_keep_to_their_schema import goes, tool

__all__ = ["grammars"]

STRICT = ToolChoice(strict=("f",))
TOWN = {"properties": {"x": {"enum": ["Ulm", "Rom"]}}, "required": ["x"]}
TOOLS = [tool(TOWN), tool({"properties": {"y": {"type": "integer"}}}, name="free")]
ULM = "f>\n<parameter=x>\nUlm\n</parameter>\n</function>"
FREE = "free>\n<parameter=z>\n\n\n</parameter>\n<parameter=y>\nno\n</parameter>\n</function>"


@pytest.mark.parametrize("thinking", [Thinking.IS_OVER, Thinking.MAY_BEGIN])
def test_where_the_model_decides_a_call_keeps_to_it_with_both_marks_and_without(grammars, thinking):
    answer = format_of("qwen3_coder", thinking, tools=TOOLS)
    for text, may_come in (
        ("It rains in <tool_", True),
        ("Use <function", True),
        (f"So <tool_call>\n<function={ULM}\n</tool_call> and so", True),
        (f"So <function={ULM} and <function={ULM}\n</tool_call> and <tool_call>\n", True),
        (f"<function={FREE}\n</tool_call>", True),
        (f"<tool_call>\n<function={FREE}\n</tool_call>\n<function={ULM}", True),
        ("So <tool_call> ", False),
        ("So <function=name>", False),
        (f"So <function={ULM.replace('Ulm', 'Bonn')}", False),
        ("So <tool_call>\n<function=f>\n</function>", False),
        (f"<function={ULM} and <function=g", False),
        (f"<tool_call>\n<function={ULM}\n</tool_call> <tool_call>\n<function=g", False),
    ):
        made = constraint(grammars, answer, STRICT, TOOLS)
        assert goes(made, text) == may_come, text


def test_a_mark_that_is_a_token_begins_calls_and_the_bare_one_does_too(grammars):
    answer = format_of("qwen3_coder", has_tokens=True, tools=TOOLS)
    (begin, end) = (token for token, name in answer.spelled.items() if "tool_call" in name)
    for pieces, may_come in (
        ([b"So ", [begin], b"\n<function=", ULM.encode(), b"\n", [end], b" so", [begin]], True),
        ([b"So <function=", ULM.encode(), b"\n", [end], b" so <function=f"], True),
        ([b"So <function=", ULM.encode(), [begin], b"\n<fu"], True),
        ([b"So <tool_call>"], False),
        ([b"So <function=", ULM.encode(), b" so <tool_call>"], False),
        ([b"So <function=g"], False),
        ([b"So ", [begin], b"\n<function=g"], False),
    ):
        made = constraint(grammars, answer, STRICT, TOOLS)
        goes_on = True
        for token in (token for piece in pieces for token in piece):
            goes_on = goes_on and token in allowed(made)
            if goes_on:
                take(made, token)
        assert goes_on == may_come, pieces


@pytest.mark.parametrize("has_tokens", [False, True])
def test_at_most_one_call_where_they_are_not_parallel(grammars, has_tokens):
    choice = ToolChoice(strict=("f",), is_single=True)
    answer = format_of("qwen3_coder", has_tokens=has_tokens, tools=TOOLS)
    made = constraint(grammars, answer, choice, TOOLS)
    assert goes(made, f"So <function={ULM}")
    assert EOS_TOKEN_ID in allowed(made)
    assert not goes(made, " ")


TEXTS_AND_CALLS = [
    "<tool_call>\n", "<function=", ULM, FREE, "</tool_call>", "\n", "a", "<parameter=x>",
    "\n</parameter>", "</function>", "f", ">",
]  # fmt: skip


def test_what_is_drawn_of_texts_and_calls_is_read_as_what_was_kept_to(grammars):
    answer = format_of("qwen3_coder", tools=TOOLS)
    num_calls = 0
    for seed in range(24):
        draw, made, said = random.Random(seed), constraint(grammars, answer, STRICT, TOOLS), ""
        for _ in range(200):
            if made.is_complete:
                break
            piece = draw.choice(TEXTS_AND_CALLS)
            for character in piece:
                if not goes(made, character):
                    break
                said += character
        parser, calls = answer.parser(), {}
        for parts in (parser.push(said), parser.finish()):
            for call in parts.calls:
                calls.setdefault(call.number, [call.name, ""])[1] += call.arguments
        whole = [*calls.values()][: None if parser.is_calling else -1]
        for name, arguments in whole:
            value = json.loads(arguments)
            assert name == "free" or (name == "f" and value["x"] in ("Ulm", "Rom")), said
        num_calls += len(whole)
    assert num_calls > 10
