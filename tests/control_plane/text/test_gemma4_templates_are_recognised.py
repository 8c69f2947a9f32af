"""Gemma 4's chat template shows how its answers are read: calls, and reasoning in a channel."""

from __future__ import annotations

import dataclasses
import json
import random
import time

import pytest

from control_plane.core.generation_params import GenerationParams
from control_plane.text.answers.gemma4_reader import Gemma4Reader
from control_plane.text.answers.parser import Thinking
from control_plane.text.answers.reader import AnswerReader
from control_plane.text.answers.recognition import AnswerFormats
from control_plane.text.chat_template import ChatTemplate
from control_plane.text.simple_tokenizer import SimpleTokenizer
from tests.control_plane.text.gemma4_template import EARLIER_GEMMA4, GEMMA4
from tests.control_plane.text.test_answers_come_apart import cuts_of, order_of, read
from tests.control_plane.text.test_formats_of_answers_are_recognised import tokenizer_with
from tests.control_plane.text.test_reasoning_tokens_are_counted import Texts

CALL = "<|tool_call>call:f{a:AT}<tool_call|>"
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
    assert (found.calls, found.thinking) == (Gemma4Reader, Thinking.MAY_COME)
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
    assert known.of(template.render(ASK), tools=[]).thinking is Thinking.MAY_COME  # it is closed
    assert known.of(f"{prompt}{OPENING}\n", tools=[]).thinking is Thinking.HAS_BEGUN
    continued = known.of(f"{prompt}{OPENING}\nHm", tools=[], continued=f"{OPENING}\nHm")
    assert continued.thinking is Thinking.HAS_BEGUN
    continued = known.of(prompt, tools=[], continued=f"{OPENING}\n{END}Hi")
    assert continued.thinking is Thinking.MAY_COME


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        (f"{OPENING}\nHm <b>\n{END}Hello", "Hm <b>", "Hello"),
        (f"{OPENING}\n{END}Hello", "", "Hello"),
        (f"{OPENING}{END}\nHello", "", "Hello"),
        (f"{OPENING}\nHm", "Hm", ""),
        ("Hello", "", "Hello"),
        ("<|channel>final\nHello", "", "<|channel>final\nHello"),
        # What models write without being told to.
        (f"Hello{OPENING}\n{END}", "", "Hello"),
        (f"Hello\n{OPENING}\n{END}\n", "", "Hello"),
        (f"{OPENING}\n{END}Hello\n\n{END}", "", "Hello"),
        (f"{END}Hello{END}{END}", "", "Hello"),
        (
            f"{OPENING}\nA\n{END}Hello\n\n{OPENING}\nB {END} you {OPENING}C",
            "A\n\nB\n\nC",
            "Hello\n\nyou",
        ),
        ("Hello \n", "", "Hello \n"),
        (OPENING[:-2], "", OPENING[:-2]),
        (f"Hello {OPENING[:-2]}", "", f"Hello {OPENING[:-2]}"),
    ],
)
def test_reasoning_in_the_channel_is_split_off(template, text, reasoning, content):
    found = formats(template, reasoning_parser="gemma4").of("", tools=[])
    for pieces in cuts_of(text, random.Random(text)):
        assert read(found, pieces) == (content, reasoning, [])
    alone = dataclasses.replace(found, thinking=Thinking.IS_OVER)
    assert read(alone, [text]) == (text, "", [])


def test_reasoning_may_stand_beside_calls_and_its_marks_in_them(template):
    found = formats(template).of("", tools=[TOOL])
    text = f"{OPENING}\nA{END}So\n{CALL}{OPENING}\nB{END}{CALL}\n{OPENING}\n{END}then{END}"
    said = f"{OPENING} x{END}\n"
    text = text.replace("AT", f'<|"|>{said}<|"|>')
    calls = [("f", json.dumps({"a": said}))] * 2
    for pieces in cuts_of(text, random.Random(text)):
        assert read(found, pieces) == ("So\nthen", "A\n\nB", calls)
        assert order_of(found, pieces) == ["ASo", 0, "\n\nB", 1, "\nthen"]


PARTS = [
    *(OPENING, END, "<|channel>", CALL, "<|tool_call>call:f{a:", '<|"|>', "}<tool_call|>", "a"),
    *(" ", "\n", "<|", "b c"),
]


@pytest.mark.spread(2)
@pytest.mark.parametrize("thinking", Thinking)
@pytest.mark.parametrize("tools", [[], [TOOL]])
def test_no_cut_changes_what_comes_out(thinking, tools):
    known = formats(ChatTemplate(GEMMA4)).of("", tools=tools)
    found = dataclasses.replace(known, thinking=thinking)
    for seed in range(150):
        rng = random.Random(seed)
        text = "".join(rng.choices(PARTS, k=rng.randrange(12)))
        expected = read(found, [text])
        for pieces in cuts_of(text, rng):
            assert read(found, pieces) == expected, text


def test_reasoning_is_counted_wherever_it_stands():
    found = formats(ChatTemplate(GEMMA4)).of("", tools=[])
    texts = ["<|channel>", "thought", "\nAb", "c ", END, "Hello", OPENING, END, OPENING, "d", END]
    reader = AnswerReader(
        found, [1], GenerationParams(seed=1), make_detokenizer=lambda: Texts(texts)
    )
    for token, text in enumerate(texts):
        reader.push(0, text, [token])
    reader.finish(0, "stop")
    assert reader.num_reasoning_tokens == 3


@pytest.mark.parametrize("unit", [END, f" {END}", OPENING, f"{OPENING}{END}", f"{OPENING}a{END} b"])
def test_long_answers_take_time_as_they_are_long(unit):
    found = formats(ChatTemplate(GEMMA4)).of("", tools=[TOOL])

    def takes(length: int) -> float:
        text, parser = unit * (length // len(unit)), found.parser()
        begin = time.process_time()
        for at in range(0, len(text), 7):
            parser.push(text[at : at + 7])
        parser.finish()
        return time.process_time() - begin

    takes(1000)
    assert takes(80_000) < 12 * takes(20_000) + 0.2


def test_marks_that_are_special_tokens_are_spelled_out_and_the_label_is_text():
    names = ["<|channel>", END]
    tokenizer, token_id = tokenizer_with([*names, *Gemma4Reader.NAMES])
    known = AnswerFormats(tokenizer, ChatTemplate(GEMMA4))
    assert known.of("", tools=[]).spelled == {token_id(name): name for name in names}
    names += Gemma4Reader.NAMES
    assert known.of("", tools=[TOOL]).spelled == {token_id(name): name for name in names}
