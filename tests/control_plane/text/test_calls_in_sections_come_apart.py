"""Calls of DeepSeek's and Kimi's formats, which stand in sections between marks of their own."""

from __future__ import annotations

import random

import pytest

from control_plane.text.answers.parser import AnswerFormat, Thinking
from control_plane.text.answers.parts import CallPiece, Parts
from control_plane.text.answers.section_readers import (
    DeepSeekV3Reader,
    DeepSeekV31Reader,
    KimiReader,
)
from tests.control_plane.text.test_answers_come_apart import cuts_of, order_of, read

READERS = {"v3": DeepSeekV3Reader, "v31": DeepSeekV31Reader, "kimi": KimiReader}
OPEN, CLOSE, BEGIN, END, SEP = DeepSeekV3Reader.NAMES
K_OPEN, K_CLOSE, K_BEGIN, K_END, K_ARGUMENTS = KimiReader.NAMES
G = '{"x": [1, {"y": "}"}], "z": "a\\"}b```"}'


def v3(name: str, arguments: str) -> str:
    return f"{BEGIN}function{SEP}{name}\n```json\n{arguments}\n```{END}"


def v31(name: str, arguments: str) -> str:
    return f"{BEGIN}{name}{SEP}{arguments}{END}"


def kimi(name: str, arguments: str, number: int = 0) -> str:
    return f"{K_BEGIN}functions.{name}:{number}{K_ARGUMENTS}{arguments}{K_END}"


LONG = "n" * 65
F = ("f", "{}")

CASES = [
    ("v3", f"{OPEN}{v3('f', '{}')}{CLOSE}", "", [F]),
    ("v3", f"Well.\n\n{OPEN}{v3('f', '{}')}\n{v3('g', G)}{CLOSE}", "Well.", [F, ("g", G)]),
    ("v3", f"{OPEN}\n{BEGIN}function{SEP}f\n```json\n{{}}```\n{END}\n{CLOSE}\n", "", [F]),
    ("v3", f"{OPEN}{v3('f', '{}')}{CLOSE} Done. ", " Done.", [F]),
    ("v3", f"{OPEN}{v3('f', '{}')}", "", [F]),  # no mark closes the section
    ("v3", f"{OPEN}{BEGIN}function{SEP}f\n```json\n{{}}", "", [F]),
    ("v3", f"{OPEN}{BEGIN}function{SEP}f\n```json\n{{}}{CLOSE}", "", [F]),
    ("v3", f"{OPEN}{v3('f', '{}')}{CLOSE}{OPEN}{v3('g', G)}{CLOSE}", "", [F, ("g", G)]),
    ("v3", f"{OPEN}{v3('f', '{}')}{OPEN}{v3('g', G)}{CLOSE}", "", [F, ("g", G)]),
    ("v31", f"{OPEN}{v31('f', '{}')}{v31('g', G)}{CLOSE}", "", [F, ("g", G)]),
    ("v31", f"{OPEN}{v31('my function', '{}')}{CLOSE}", "", [("my function", "{}")]),
    ("v31", f"{OPEN}{BEGIN}f{SEP}{{}}and{CLOSE}{OPEN}", f"and{CLOSE}{OPEN}", [F]),
    ("v31", f"{OPEN}{v31('f', '{}')} and", " and", [F]),
    ("kimi", f"Hm {K_OPEN}{kimi('f', '{}')}{kimi('g', G, 12)}{K_CLOSE}", "Hm", [F, ("g", G)]),
    ("kimi", f"{K_OPEN} {K_BEGIN} f:3 {K_ARGUMENTS} {{}} {K_END} {K_CLOSE}", "", [F]),
    ("kimi", f"{K_OPEN}{kimi('a.b:1', '{}')}{K_CLOSE}", "", [("a.b:1", "{}")]),
    # What is no call is text, and so is what stands around it.
    *(
        (reader, text, text, [])
        for reader, text in (
            ("v3", f"a < b, {OPEN[:-1]}, {BEGIN}f"),
            ("v3", f"{OPEN}{CLOSE}"),
            ("v3", f"{OPEN} no {CLOSE}"),
            ("v3", f"{OPEN}{BEGIN}function{SEP}f\n{{}}{END}{CLOSE}"),  # no fence
            ("v3", f"{OPEN}{BEGIN}f{SEP}f\n```json\n{{}}\n```{END}{CLOSE}"),  # no function
            ("v3", f"{OPEN}{v3(LONG, '{}')}{CLOSE}"),
            ("v3", f"{OPEN}{BEGIN}function{SEP}{'n' * 999}"),
            ("v31", f"{OPEN}{BEGIN}{SEP}{{}}{END}{CLOSE}"),
            ("v31", f"{OPEN}{BEGIN}f{{}}{END}{CLOSE}"),
            ("v31", f"{OPEN}{BEGIN}f"),
            ("v31", v31("f", "{}")),  # in no section
            ("kimi", f"{K_OPEN}{K_BEGIN}functions.f{K_ARGUMENTS}{{}}{K_END}{K_CLOSE}"),
            ("kimi", f"{K_OPEN}{K_BEGIN}functions.f:x{K_ARGUMENTS}{{}}{K_END}{K_CLOSE}"),
        )
    ),
    # What was taken for a header is read again: a section may begin in it.
    ("v31", f"{OPEN}{BEGIN}oh {OPEN}{v31('f', '{}')}{CLOSE}", f"{OPEN}{BEGIN}oh", [F]),
    # From their first brace on arguments are passed on as they are.
    ("v3", f"{OPEN}{BEGIN}function{SEP}f\n```json\n{{\"x\": 1", "", [("f", '{"x": 1')]),
    ("kimi", f"{K_OPEN}{kimi('f', '{x: }')}{K_CLOSE}", "", [("f", "{x: }")]),
    ("kimi", f"{K_OPEN}{kimi('f', G.replace('```', K_END))}{K_CLOSE}", "",
     [("f", G.replace("```", K_END))]),
]  # fmt: skip


@pytest.mark.parametrize(("reader", "text", "content", "calls"), CASES)
def test_calls_come_out_of_their_section_and_the_rest_is_content(reader, text, content, calls):
    given = AnswerFormat(Thinking.IS_OVER, READERS[reader])
    for pieces in cuts_of(text, random.Random(text)):
        assert read(given, pieces) == (content, "", calls)


@pytest.mark.parametrize(
    ("reader", "text"),
    [
        ("v3", f"{OPEN}{v3('f', '{}')}\n{v3('f', G)}{CLOSE}"),
        ("v31", f"{OPEN}{v31('f', '{}')}{v31('f', G)}{CLOSE}"),
        ("kimi", f"{K_OPEN}{kimi('f', '{}')}{kimi('f', G)}{K_CLOSE}"),
    ],
)
def test_reasoning_content_and_calls_are_told_in_their_order(reader, text):
    given = AnswerFormat(Thinking.MAY_BEGIN, READERS[reader])
    for pieces in cuts_of(f"<think>Hm {OPEN}?</think>So{text}then", random.Random(4)):
        assert order_of(given, pieces) == [f"Hm {OPEN}?So", 0, 1, "then"]


@pytest.mark.parametrize(
    ("reader", "whole", "rest"),
    [
        ("v3", f"{OPEN}{v3('f', '{}')}", f"\n{v3('g', G)}{CLOSE}"),
        ("v31", f"{OPEN}{v31('f', '{}')}", f"{CLOSE}and"),
        ("v31", f"{OPEN}{BEGIN}f{SEP}{{}}a", f"nd{CLOSE}"),
        ("kimi", f"{K_OPEN}{kimi('f', '{}')}", f"{kimi('g', G)}{K_CLOSE}"),
    ],
)
def test_behind_the_calls_that_are_wanted_nothing_is_read(reader, whole, rest):
    given = AnswerFormat(Thinking.IS_OVER, READERS[reader])
    for pieces in cuts_of(whole + rest, random.Random(5)):
        said, _, calls = read(given, pieces, max_calls=1)
        assert (said, calls) == ("", [F])


def test_arguments_are_told_as_they_come():
    parser = AnswerFormat(Thinking.IS_OVER, DeepSeekV3Reader).parser()
    assert parser.push(f"So {OPEN[:3]}") == Parts("So")
    assert parser.push(f"{OPEN[3:]}{BEGIN}function{SEP}f\n```json\n") == Parts()
    assert parser.push('{"x') == Parts(calls=(CallPiece(0, "f", '{"x'),))
    assert parser.push('": "`') == Parts(calls=(CallPiece(0, None, '": "`'),))
    assert not parser.is_calling
    assert parser.push('"}\n``') == Parts(calls=(CallPiece(0, None, '"}'),))
    assert parser.is_calling
    assert parser.push(f"`{END}{CLOSE}") == Parts()
    assert parser.finish() == Parts()
