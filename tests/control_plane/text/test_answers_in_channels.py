"""Answers of gpt-oss, in channels: content, reasoning and calls, however their text is cut."""

from __future__ import annotations

import itertools
import random
import re
from functools import partial

import pytest

from control_plane.core.generation_params import GenerationParams
from control_plane.core.structured_outputs import StructuredOutputs
from control_plane.engine.sample_text import SampleText
from control_plane.text.answers.harmony_reader import (
    CHANNEL,
    MESSAGE,
    HarmonyReader,
    HarmonyTextReader,
)
from control_plane.text.answers.parser import AnswerFormat, Thinking
from control_plane.text.answers.parts import CallPiece, Parts, Said, Thought
from control_plane.text.answers.reader import AnswerReader
from control_plane.text.answers.recognition import AnswerFormats
from control_plane.text.answers.text_form import text_form_of
from control_plane.text.answers.tool_choice import ToolChoice, with_calls
from control_plane.text.chat_template import ChatTemplate
from control_plane.text.detokenizer import make_detokenizer
from control_plane.text.simple_tokenizer import SimpleTokenizer
from planes.errors import ValidationError
from tests.control_plane.text.known_templates import HARMONY

ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
PREAMBLE = "<|channel|>commentary<|message|>"
NEXT = "<|end|><|start|>assistant"
TO_F = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
F = ("f", '{"x": 1}')
PROMPT = "<|start|>user<|message|>Hi<|end|><|start|>assistant"

ANSWERS = [
    (f"{FINAL}Hi there.", "Hi there.", "", []),
    (f"{FINAL}Hi.<|return|>", "Hi.", "", []),
    (f"{ANALYSIS}Hm, hm.{NEXT}{FINAL}Hi.", "Hi.", "Hm, hm.", []),
    (f"{ANALYSIS}Hm{NEXT}{ANALYSIS}Oh{NEXT}{FINAL}Hi.", "Hi.", "Hm\n\nOh", []),
    # A call, which what ends it ends with the answer, or a mark in the text.
    (f'{ANALYSIS}Hm{NEXT}{TO_F}{{"x": 1}}', "", "Hm", [F]),
    (f'{TO_F}{{"x": 1}}<|call|>', "", "", [F]),
    (f'{TO_F}{{"x": 1}}<|call|><|start|>assistant{TO_F}{{}}<|call|>', "", "", [F, ("f", "{}")]),
    (f"{TO_F}<|call|>", "", "", [("f", "{}")]),
    # The recipient may stand before the channel, as templates write it, and need be no function.
    (' to=functions.f<|channel|>commentary json<|message|>{"x": 1}', "", "", [F]),
    ('<|channel|>commentary to=browser.open<|message|>{"x": 1}', "", "", [("browser.open", F[1])]),
    ('<|channel|>analysis to=functions.f code<|message|>{"x": 1}', "", "", [F]),
    # What comes before a call is content, and so is what follows.
    (f'{PREAMBLE}I look.{NEXT}{TO_F}{{"x": 1}}', "I look.", "", [F]),
    (f"{PREAMBLE}I look.{NEXT}{FINAL}There.", "I look.\n\nThere.", "", []),
    (f'{TO_F}{{"x": 1}}<|call|> \n<|start|>assistant{FINAL}So.', "So.", "", [F]),
    (f"{FINAL}So.<|end|> \nOh", "So.\n\nOh", "", []),
    # Reasoning may stand between content and calls, and behind them.
    (f"{PREAMBLE}I look.{NEXT}{ANALYSIS}Hm{NEXT}{FINAL}There.", "I look.\n\nThere.", "Hm", []),
    (f'{TO_F}{{"x": 1}}{NEXT}{ANALYSIS}Hm', "", "Hm", [F]),
    # A call without arguments has none, whether a mark ends it or the answer.
    (TO_F, "", "", [("f", "{}")]),
    # Marks where they have no place are no text; a header without a text says nothing.
    ("<|message|>Hello.", "Hello.", "", []),
    (f"{FINAL}So{CHANNEL}final{MESSAGE}Oh<|constrain|>!", "So\n\nOh!", "", []),
    (f"{FINAL}So<|end|>{ANALYSIS}Hm", "So", "Hm", []),
    (f" to=functions.f{NEXT}<|message|>Hello.", "Hello.", "", []),
    # Anything that has no header is content.
    ('{"a": [1, 2]}', '{"a": [1, 2]}', "", []),
    (" to be or not", " to be or not", "", []),
    ("<|chan", "<|chan", "", []),
    ("", "", "", []),
    # A header that does not end says nothing, an endless one is none.
    (f"{FINAL}Hi.{NEXT}<|channel|>comm", "Hi.", "", []),
    (f"{ANALYSIS}Hm<|start|>assistant{FINAL}Hi <|en", "Hi <|en", "Hm", []),
    ("<|channel|>" + "a" * 1200, "<|channel|>" + "a" * 1200, "", []),
    (f"<|channel|>commentary to=functions.{'n' * 65}<|message|>{{}}", "{}", "", []),
    (f"<|start|>assistant{FINAL}Hi.", "Hi.", "", []),
]


def harmony(thinking=Thinking.MAY_BEGIN, calls=HarmonyReader, **options) -> AnswerFormat:
    return AnswerFormat(thinking, calls, **options)


def joined(pieces: list[Parts]) -> tuple[str, str, list[tuple[str, str]]]:
    calls: dict[int, list[str]] = {}
    for piece in pieces:
        for call in piece.calls:
            calls.setdefault(call.number, [call.name or "", ""])[1] += call.arguments
    return (
        "".join(piece.content for piece in pieces),
        "".join(piece.reasoning for piece in pieces),
        [(name, arguments) for name, arguments in calls.values()],
    )


@pytest.mark.parametrize(("text", "content", "reasoning", "calls"), ANSWERS)
def test_an_answer_comes_apart_the_same_however_it_is_cut(text, content, reasoning, calls) -> None:
    random_ = random.Random(len(text))
    cuts = [[], range(1, len(text))]
    cuts += [sorted(random_.sample(range(len(text) + 1), min(4, len(text)))) for _ in range(20)]
    for cut in cuts:
        parser = harmony().parser()
        ends = [0, *cut, len(text)]
        pieces = [parser.push(text[first:end]) for first, end in itertools.pairwise(ends)]
        pieces.append(parser.finish())
        assert joined(pieces) == (content, reasoning, calls)
        assert parser.is_calling == bool(calls)
        spans = parser.reasoning
        assert "\n\n".join(text[first:end] for first, end in spans) == reasoning


def test_arguments_come_as_they_are_written_and_one_cut_off_is_no_whole_call() -> None:
    parser = harmony().parser()
    assert parser.push(TO_F[:-5]) == Parts()
    assert parser.push(TO_F[-5:] + '{"x"').calls == (CallPiece(0, "f", '{"x"'),)
    assert parser.push(": 1").calls == (CallPiece(0, None, ": 1"),)
    parser.finish()
    assert not parser.is_calling


def test_a_call_cut_off_before_its_arguments_has_none() -> None:
    parser = harmony().parser()
    assert joined([parser.push(TO_F), parser.finish(is_cut_off=True)]) == ("", "", [("f", "")])
    assert not parser.is_calling


def test_what_may_be_a_header_and_is_cut_off_is_no_text() -> None:
    for text, content in ((" to", ""), (" to=functions.f", ""), ("to", "to")):
        parser = harmony().parser()
        assert joined([parser.push(text), parser.finish(is_cut_off=True)]) == (content, "", [])


def test_no_end_of_arguments_comes_that_adds_nothing() -> None:
    parser = harmony().parser()
    parser.push(f'{TO_F}{{"x": 1}}')
    assert parser.finish() == Parts()


def test_content_reasoning_and_calls_are_told_in_the_order_in_which_they_were_written() -> None:
    text = f"{PREAMBLE}A{NEXT}{ANALYSIS}B{NEXT}{TO_F}{{}}{NEXT}{ANALYSIS}C{NEXT}{FINAL}D"
    parts = harmony().parser().push(text)
    order = Said("A"), Thought("B"), CallPiece(0, "f", "{}"), Thought("\n\nC", "\n\n")
    assert [*parts.in_order()] == [*order, Said("\n\nD", "\n\n")]


def known_marks(text: str) -> list[tuple[int, str]]:
    """Return the marks of a text that are not spelled behind a backslash, and where they are."""
    names = "|".join(map(re.escape, HarmonyReader.NAMES))
    return [(found.start(), found.group()) for found in re.finditer(rf"(?<!\\)(?:{names})", text)]


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls"),
    [
        (f"{FINAL}The mark \\<|end|> ends, \\<|start|>assistant begins.",
         "The mark \\<|end|> ends, \\<|start|>assistant begins.", "", []),
        (f"{ANALYSIS}Hm \\<|channel|>final\\<|message|>{NEXT}{FINAL}Hi.", "Hi.",
         "Hm \\<|channel|>final\\<|message|>", []),
        (f'{TO_F}{{"x": "a\\<|call|>b"}}{NEXT}{FINAL}Hi.', "Hi.", "",
         [("f", '{"x": "a\\<|call|>b"}')]),
        ("\\<|channel|>analysis", "\\<|channel|>analysis", "", []),
    ],
)  # fmt: skip
def test_where_marks_are_known_what_a_text_spells_is_text(text, content, reasoning, calls) -> None:
    random_ = random.Random(len(text))
    for cut in ([], range(1, len(text)), sorted(random_.sample(range(len(text)), 5))):
        parser = harmony().parser(knows_marks=True)
        for at, name in known_marks(text):
            parser.note_mark(at, name)
        pieces = [
            parser.push(text[first:end]) for first, end in itertools.pairwise([0, *cut, len(text)])
        ]
        assert joined([*pieces, parser.finish()]) == (content, reasoning, calls)
        assert "\n\n".join(text[first:end] for first, end in parser.reasoning) == reasoning


def test_calls_beyond_those_that_are_wanted_are_left_out() -> None:
    parser = harmony().parser(max_calls=1)
    parts = parser.push(f'{TO_F}{{"x": 1}}<|call|><|start|>assistant{TO_F}{{}}<|call|>')
    assert parser.is_over
    assert joined([parts, parser.finish()]) == ("", "", [F])


def test_without_functions_what_is_said_to_one_is_content() -> None:
    parser = harmony(calls=HarmonyTextReader).parser()
    parts = parser.push(f'{ANALYSIS}Hm{NEXT}{TO_F}{{"x": 1}}')
    assert joined([parts, parser.finish()]) == ('{"x": 1}', "Hm", [])


def test_reasoning_is_content_where_it_is_not_to_be_told_apart() -> None:
    parser = harmony(Thinking.IS_OVER).parser()
    parts = parser.push(f"{ANALYSIS}Hm{NEXT}{FINAL}Hi.")
    assert joined([parts, parser.finish()]) == ("Hm\n\nHi.", "", [])
    assert not parser.may_think


def test_a_message_that_is_gone_on_with_begins_with_its_text() -> None:
    parser = harmony(is_start=False).parser()
    parts = parser.push(f" to=me and so on{NEXT}{FINAL}Hi.")
    assert joined([parts, parser.finish()]) == (" to=me and so on\n\nHi.", "", [])


def test_an_answer_of_json_is_content_whatever_it_looks_like() -> None:
    form = StructuredOutputs(choice=(f"{ANALYSIS}a", "b"))
    reader = AnswerReader(harmony(), [1], GenerationParams(structured_outputs=form, seed=1))
    assert reader.push(0, f"{ANALYSIS}a").content == f"{ANALYSIS}a"


def test_a_template_with_channels_is_recognised_by_them_and_by_the_call_it_writes() -> None:
    known = AnswerFormats(SimpleTokenizer(), ChatTemplate(HARMONY))
    assert (known.calls, known.reasoning) == ("harmony", "harmony")
    tool = {"type": "function", "function": {"name": "f"}}
    with_tools, without = known.of(PROMPT, tools=[tool]), known.of(PROMPT, tools=[])
    assert with_tools is not None
    assert without is not None
    assert (with_tools.calls, without.calls) == (HarmonyReader, HarmonyTextReader)
    assert (with_tools.thinking, with_tools.is_start) == (Thinking.MAY_BEGIN, True)
    assert with_tools.form_opening == FINAL
    for prompt, continued in ((PROMPT, "so far"), ("<|start|>user<|message|>Hi<|end|>", None)):
        goes_on = known.of(prompt, tools=[], continued=continued)
        assert goes_on is not None
        assert (goes_on.is_start, goes_on.form_opening) == (continued is None, "")


@pytest.mark.parametrize(
    ("options", "calls", "thinking"),
    [
        ({"reasoning_parser": "none"}, HarmonyReader, Thinking.IS_OVER),
        ({"tool_call_parser": "none"}, HarmonyTextReader, Thinking.MAY_BEGIN),
        ({"reasoning_parser": "harmony"}, HarmonyReader, Thinking.MAY_BEGIN),
    ],
)
def test_settings_hold_before_the_template(options, calls, thinking) -> None:
    known = AnswerFormats(SimpleTokenizer(), ChatTemplate(HARMONY), **options)
    answer = known.of("…", tools=[{"type": "function", "function": {"name": "f"}}])
    assert answer is not None
    assert (answer.calls, answer.thinking) == (calls, thinking)


@pytest.mark.parametrize("parser", ["none", "hermes"])
def test_calls_that_must_be_are_refused_where_none_are_read(parser: str) -> None:
    known = AnswerFormats(SimpleTokenizer(), ChatTemplate(HARMONY), tool_call_parser=parser)
    tool = {"type": "function", "function": {"name": "f"}}
    answer = known.of(PROMPT, tools=[tool])
    for choice in (ToolChoice("required"), ToolChoice(strict=("f",))):
        with pytest.raises(ValidationError, match="the format of its calls is not known"):
            with_calls(GenerationParams(), choice, [tool], answer)
    assert known.calls is None


def test_with_both_off_answers_are_text() -> None:
    known = AnswerFormats(SimpleTokenizer(), ChatTemplate(HARMONY), "none", "none")
    assert known.of("…", tools=[]) is None


IDS = dict(zip(range(300, 307), HarmonyReader.NAMES, strict=True))
"""Special tokens beside those of a tokenizer of bytes."""


def tokens_of(text: str) -> list[int]:
    """Return the tokens of a text whose marks are one each, but for those behind a backslash."""
    found, done = list[int](), 0
    for at, name in known_marks(text):
        found += [*text[done:at].encode(), *(token for token in IDS if IDS[token] == name)]
        done = at + len(name)
    return [*found, *text[done:].encode()]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_only_special_tokens_are_marks_where_tokens_are_known(size: int) -> None:
    text = f"{ANALYSIS}É \\<|end|>{NEXT}{TO_F}{{'x': '\\<|call|>'}}{NEXT}{FINAL}€\\<|start|>"
    make = partial(make_detokenizer, SimpleTokenizer(), IDS)
    for thinking in (Thinking.MAY_BEGIN, Thinking.IS_OVER):
        reader = AnswerReader(
            harmony(thinking, spelled=IDS), [1], GenerationParams(seed=1), make_detokenizer=make
        )
        tokens, detokenizer, pieces = tokens_of(text), make(), []
        for first in range(0, len(tokens), size):
            piece = tokens[first : first + size]
            pieces.append(reader.push(0, detokenizer.push(piece), piece))
        pieces += [reader.push(0, detokenizer.finish()), reader.finish(0, "stop")]
        thought, said = "É \\<|end|>", "€\\<|start|>"
        if thinking is Thinking.IS_OVER:
            thought, said = "", f"{thought}\n\n{said}"
        assert joined(pieces) == (said, thought, [("f", "{'x': '\\<|call|>'}")])
        assert reader.num_reasoning_tokens == len(thought.encode())


def test_an_answer_whose_message_the_prompt_opened_for_its_form_begins_with_its_text() -> None:
    form = StructuredOutputs(regex=" to=.*")
    for given, said in ((form, " to=me "), (None, "")):
        params = GenerationParams(structured_outputs=given, seed=1)
        reader = AnswerReader(harmony(form_opening=FINAL), [1], params)
        assert reader.push(0, " to=me ").content == said


def test_an_answer_of_one_call_ends_with_the_mark_of_its_end_and_not_with_one_it_spells() -> None:
    call = f'{TO_F}{{"x": "\\<|call|> \\<|end|>"}}<|end|>'
    for params in (GenerationParams(seed=1), GenerationParams(seed=1, stop=("never",))):
        form = text_form_of(harmony(spelled=IDS), params, is_single=True)
        text = SampleText(SimpleTokenizer(), params, form)
        made = text.push(tokens_of(f"{call}<|start|>assistant"))
        assert made.text == call
        assert text.has_ended
