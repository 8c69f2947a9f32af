"""Answers of gpt-oss, in channels: content, reasoning and calls, however their text is cut."""

from __future__ import annotations

import itertools
import random

import pytest

from control_plane.core.generation_params import GenerationParams
from control_plane.core.structured_outputs import StructuredOutputs
from control_plane.text.answers.harmony_reader import HarmonyReader, HarmonyTextReader
from control_plane.text.answers.parser import AnswerFormat, Thinking
from control_plane.text.answers.parts import CallPiece, Parts
from control_plane.text.answers.reader import AnswerReader
from control_plane.text.answers.recognition import AnswerFormats
from control_plane.text.chat_template import ChatTemplate
from control_plane.text.simple_tokenizer import SimpleTokenizer
from tests.control_plane.text.known_templates import HARMONY

ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
PREAMBLE = "<|channel|>commentary<|message|>"
NEXT = "<|end|><|start|>assistant"
TO_F = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
F = ("f", '{"x": 1}')

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
    parts = parser.push(f"<|channel|> and so on{NEXT}{FINAL}Hi.")
    assert joined([parts, parser.finish()]) == ("<|channel|> and so on\n\nHi.", "", [])


def test_an_answer_of_json_is_content_whatever_it_looks_like() -> None:
    form = StructuredOutputs(choice=(f"{ANALYSIS}a", "b"))
    reader = AnswerReader(harmony(), [1], GenerationParams(structured_outputs=form, seed=1))
    assert reader.push(0, f"{ANALYSIS}a").content == f"{ANALYSIS}a"


def test_a_template_with_channels_is_recognised_by_them_and_by_the_call_it_writes() -> None:
    known = AnswerFormats(SimpleTokenizer(), ChatTemplate(HARMONY))
    assert (known.calls, known.reasoning) == ("harmony", "harmony")
    tool = {"type": "function", "function": {"name": "f"}}
    with_tools, without = known.of("…", tools=[tool]), known.of("…", tools=[])
    assert with_tools is not None
    assert without is not None
    assert (with_tools.calls, without.calls) == (HarmonyReader, HarmonyTextReader)
    assert (with_tools.thinking, with_tools.is_start) == (Thinking.MAY_BEGIN, True)
    assert with_tools.form_opening == FINAL
    goes_on = known.of("…", tools=[], continued="so far")
    assert goes_on is not None
    assert (goes_on.is_start, goes_on.form_opening) == (False, "")


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


def test_with_both_off_answers_are_text() -> None:
    known = AnswerFormats(SimpleTokenizer(), ChatTemplate(HARMONY), "none", "none")
    assert known.of("…", tools=[]) is None
