"""Gemma 4's chat template shows how its answers are read: calls, and reasoning in a channel."""

from __future__ import annotations

import json
import random

import pytest

from control_plane.text.answers.gemma4_reader import Gemma4Reader
from control_plane.text.answers.parser import Thinking
from control_plane.text.answers.recognition import AnswerFormats
from control_plane.text.chat_template import ChatTemplate
from control_plane.text.simple_tokenizer import SimpleTokenizer
from tests.control_plane.text.gemma4_template import EARLIER_GEMMA4, GEMMA4
from tests.control_plane.text.test_answers_come_apart import cuts_of, read
from tests.control_plane.text.test_formats_of_answers_are_recognised import tokenizer_with

ASK = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "description": "looks up"}}
OPENING, END = "<|channel>thought", "<channel|>"


@pytest.fixture(params=[GEMMA4, EARLIER_GEMMA4], ids=["now", "earlier"])
def template(request) -> ChatTemplate:
    return ChatTemplate(request.param)


def formats(template, **options) -> AnswerFormats:
    return AnswerFormats(SimpleTokenizer(), template, **options)


def test_calls_are_read_in_the_format_that_the_template_writes(template):
    known = formats(template)
    assert known.calls == "gemma4"
    found = known.of(template.render(ASK, tools=[TOOL]), tools=[TOOL])
    assert (found.calls, found.thinking) == (Gemma4Reader, Thinking.IS_OVER)
    written = '<|tool_call>call:f{a:<|"|>b c<|"|>,n:[1,{x:true}]}<tool_call|>'
    arguments = {"a": "b c", "n": [1, {"x": True}]}
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "f"}}
    call["function"] |= {"arguments": arguments}  # type: ignore[operator]
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    prompt = template.render([*ASK, calling], tools=[TOOL], add_generation_prompt=False)
    assert written in prompt
    expected = ("", "", [("f", json.dumps(arguments))])
    for pieces in cuts_of(written, random.Random(2)):
        assert read(found, pieces) == expected


def test_reasoning_may_begin_where_the_prompt_does_not_close_it(template):
    known = formats(template)
    assert known.reasoning == "gemma4"
    prompt = template.render(ASK, variables={"enable_thinking": True})
    found = known.of(prompt, tools=[])
    assert found.thinking is Thinking.MAY_BEGIN
    assert known.of(template.render(ASK), tools=[]) is None  # the channel is closed
    assert known.of(f"{prompt}{OPENING}\n", tools=[]).thinking is Thinking.HAS_BEGUN
    continued = known.of(f"{prompt}{OPENING}\nHm", tools=[], continued=f"{OPENING}\nHm")
    assert continued.thinking is Thinking.HAS_BEGUN
    assert known.of(prompt, tools=[], continued=f"{OPENING}\n{END}Hi") is None


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        (f"{OPENING}\nHm <b>\n{END}Hello", "Hm <b>", "Hello"),
        (f"{OPENING}\n{END}Hello", "", "Hello"),
        (f"{OPENING}{END}\nHello", "", "Hello"),
        (f"{OPENING}\nHm", "Hm", ""),
        ("Hello", "", "Hello"),
        (f"<|channel>final\nHello{END}", "", f"<|channel>final\nHello{END}"),
        (f"Hello{OPENING}\n{END}", "", f"Hello{OPENING}\n{END}"),
        (OPENING[:-2], "", OPENING[:-2]),
    ],
)
def test_reasoning_in_the_channel_is_split_off(template, text, reasoning, content):
    found = formats(template, reasoning_parser="gemma4").of("", tools=[])
    for pieces in cuts_of(text, random.Random(text)):
        assert read(found, pieces) == (content, reasoning, [])


def test_marks_that_are_special_tokens_are_spelled_out_and_the_label_is_text():
    names = ["<|channel>", END]
    tokenizer, token_id = tokenizer_with([*names, *Gemma4Reader.NAMES])
    known = AnswerFormats(tokenizer, ChatTemplate(GEMMA4))
    assert known.of("", tools=[]).spelled == {token_id(name): name for name in names}
    names += Gemma4Reader.NAMES
    assert known.of("", tools=[TOOL]).spelled == {token_id(name): name for name in names}
