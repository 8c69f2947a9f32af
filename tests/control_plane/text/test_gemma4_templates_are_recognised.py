"""Gemma 4's chat template shows how its answers are read: reasoning in a channel with a label."""

from __future__ import annotations

import random

import pytest

from control_plane.text.answers.parser import Thinking
from control_plane.text.answers.recognition import AnswerFormats
from control_plane.text.chat_template import ChatTemplate
from control_plane.text.simple_tokenizer import SimpleTokenizer
from tests.control_plane.text.gemma4_template import EARLIER_GEMMA4, GEMMA4
from tests.control_plane.text.test_answers_come_apart import cuts_of, read
from tests.control_plane.text.test_formats_of_answers_are_recognised import tokenizer_with

ASK = [{"role": "user", "content": "Hi"}]
OPENING, END = "<|channel>thought", "<channel|>"


@pytest.fixture(params=[GEMMA4, EARLIER_GEMMA4], ids=["now", "earlier"])
def template(request) -> ChatTemplate:
    return ChatTemplate(request.param)


def formats(template, **options) -> AnswerFormats:
    return AnswerFormats(SimpleTokenizer(), template, **options)


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
    tokenizer, token_id = tokenizer_with(["<|channel>", END])
    found = AnswerFormats(tokenizer, ChatTemplate(GEMMA4)).of("", tools=[])
    assert found.spelled == {token_id(name): name for name in ("<|channel>", END)}
