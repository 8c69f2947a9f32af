"""Calls that LFM2 and OLMo 3 write as Python would, and those that Granite 3 has in lists."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest

from control_plane.text.answers.keyword_arguments import KeywordArguments
from control_plane.text.answers.list_readers import GraniteReader
from control_plane.text.answers.parser import AnswerFormat, Thinking
from control_plane.text.answers.parts import CallPiece, Parts
from control_plane.text.answers.pythonic_readers import Lfm2Reader, Olmo3Reader
from tests.control_plane.text.test_answers_come_apart import cuts_of, order_of, read

READERS = {"lfm2": Lfm2Reader, "olmo3": Olmo3Reader, "granite": GraniteReader}
OPEN, CLOSE = Lfm2Reader.NAMES
O_OPEN, O_CLOSE = Olmo3Reader.NAMES
G_OPEN = GraniteReader.MARKERS[0]
F = ("f", "{}")
G = ("g", '{"x": 1}')

CASES = [
    ("lfm2", f"{OPEN}[f()]{CLOSE}", "", [F]),
    ("lfm2", f"Well.\n{OPEN}[f(), g(x=1)]{CLOSE} Done.", "Well. Done.", [F, G]),
    ("lfm2", f" {OPEN}\n[ f ( ) ,\n g( x = 1 , ) , ] {CLOSE}\n", "", [F, G]),
    ("lfm2", f"{OPEN}f(){CLOSE}", "", [F]),  # no list
    ("lfm2", f"{OPEN}[f(){CLOSE}", "", [F]),  # no end of it
    ("lfm2", f"{OPEN}[f()", "", [F]),
    ("lfm2", f"{OPEN}[f()]", "", [F]),
    ("lfm2", f"{OPEN}[f()] then", " then", [F]),
    ("lfm2", f"{OPEN}[f()]{CLOSE}{OPEN}[g(x=1)]{CLOSE}", "", [F, G]),
    ("lfm2", f"{OPEN}[a.b-c(x=1)]{CLOSE}", "", [("a.b-c", '{"x": 1}')]),
    ("lfm2", f"{OPEN}[f(x='{CLOSE}')]{CLOSE}", "", [("f", json.dumps({"x": CLOSE}))]),
    ("lfm2", f'{OPEN}[{{"name": "g", "arguments": {{"x": 1}}}}, f()]{CLOSE}', "", [G, F]),
    ("olmo3", f"{O_OPEN}f()\ng(x=1){O_CLOSE}", "", [F, G]),
    ("olmo3", f"Well. {O_OPEN}\nf()\n\ng(x=1)\n{O_CLOSE} Done.", "Well. Done.", [F, G]),
    ("olmo3", f"{O_OPEN}[f(), g(x=1)]{O_CLOSE}", "", [F, G]),
    ("granite", f'{G_OPEN}[{{"name": "g", "arguments": {{"x": 1}}}}]', "", [G]),
    ("granite", '<tool_call> [{"name": "f"}, {"name": "f"}] then', " then", [F, F]),
    # What is no call is text, and so is what stands around it.
    *(
        (reader, text, text, [])
        for reader, text in (
            ("lfm2", f"[f()], {OPEN[:-1]}, {CLOSE}"),
            ("lfm2", f"{OPEN}[]{CLOSE}"),
            ("lfm2", f"{OPEN}{CLOSE}"),
            ("lfm2", f"{OPEN}[f]{CLOSE}"),
            ("lfm2", f"{OPEN}[f"),
            ("lfm2", f"{OPEN}[two\nwords()]{CLOSE}"),
            ("lfm2", f"{OPEN}[()]{CLOSE}"),
            ("lfm2", f"{OPEN}[{'n' * 65}()]{CLOSE}"),
            ("lfm2", f'{OPEN}[{{"x": 1}}]{CLOSE}'),
            ("olmo3", f"{O_OPEN} nothing {O_CLOSE}"),
            ("granite", f'{G_OPEN}{{"name": "f", "arguments": {{}}}}'),
        )
    ),
    # From its parenthesis on a call is one, as far as it comes.
    ("lfm2", f"{OPEN}[f(x='a", "", [("f", '{"x": "a')]),
    ("lfm2", f"{OPEN}[f(x=12", "", [("f", '{"x": 12')]),
    ("lfm2", f"{OPEN}[f(x", "", [("f", "{")]),
    ("lfm2", f"{OPEN}[f(x=San Fr", "", [("f", '{"x": "San Fr')]),
    ("lfm2", f"{OPEN}[f(x=('a", "", [("f", '{"x": "a')]),
    ("lfm2", f"{OPEN}[f(x=[1, ", "", [("f", '{"x": [1')]),
]  # fmt: skip


@pytest.mark.parametrize(("reader", "text", "content", "calls"), CASES)
def test_calls_come_out_of_the_text_and_the_rest_is_content(reader, text, content, calls):
    given = AnswerFormat(Thinking.IS_OVER, READERS[reader])
    for pieces in cuts_of(text, random.Random(text)):
        assert read(given, pieces) == (content, "", calls)


VALUES = {
    "'x'": '"x"',
    '"it\'s"': '"it\'s"',
    r"'it\'s'": '"it\'s"',
    "'it's'": '"it\'s"',  # templates of LFM2 escape none
    "'a' ": '"a"',
    "''": '""',
    "''''a'b''\n'''": "\"'a'b''\\n\"",
    '"""a"""': '"a"',
    r"'\n\t\\\"\x41\101\u00e9\U0001f600\d\a'": '"\\n\\t\\\\\\"AA\\u00e9😀\\\\d\\u0007"',
    r"'\ud83d\ude00'": '"\\ud83d\\ude00"',  # halves, as JSON spells them
    r"'\U0000d83D\U0000DFff'": '"\\ud83d\\udfff"',
    r"'\x4'": '"\\\\x4"',
    "'a\\\nb'": '"ab"',
    "'\x00\n'": '"\\u0000\\n"',
    "True": "true",
    "False": "false",
    "None": "null",
    "true": "true",
    "null": "null",
    "12": "12",
    "-1.5e-7": "-1.5e-7",
    "1_000": "1000",
    "0x1F": "31",
    ".5": "0.5",
    "+3": "3",
    "012": '"012"',
    "1e999": "1e999",  # JSON has no bounds
    "[1, [], (2,), 'x',]": '[1, [], [2], "x"]',
    "{'a': {}, \"b\": [None], 3: True,}": '{"a": {}, "b": [null], "3": true}',
    "('a')": '"a"',  # no list
    "((1), ('a',), (), ({'k': (2)}))": '[1, ["a"], [], {"k": 2}]',
    "(" * 40 + "1" + ")" * 40: "[" * 24 + "1" + "]" * 24,
    "{1, 'b'}": '[1, "b"]',
    "{'b', 1}": '["b", 1]',
    "{'x'}": '["x"]',
    "date(2024, 1, [2])": '"date(2024, 1, [2])"',
    "San Francisco": '"San Francisco"',
    "[a b, c]": '["a b", "c"]',
    "http://x/?y=1": '"http://x/?y=1"',
    "[1][0]": "[1]",  # what no call has
    "": "null",
}


@pytest.mark.parametrize("value", VALUES)
def test_a_value_that_python_spells_is_told_as_json(value):
    for pieces in cuts_of(f"x={value}, y=1)]", random.Random(value)):
        assert _read(pieces) == (f'{{"x": {VALUES[value]}, "y": 1}}', "]")


def test_values_without_names_get_those_of_the_parameters_by_their_place():
    told = _read(["'a', [1], z='c', 4)"], ["first", "second"])
    assert told == ('{"first": "a", "second": [1], "z": "c", "2": 4}', "")
    tools = {"f": {"first": None}}
    parser = AnswerFormat(Thinking.IS_OVER, Lfm2Reader, parameters=tools).parser()
    assert parser.push(f"{OPEN}[f('a')]").calls == (CallPiece(0, "f", '{"first": "a"}'),)


@pytest.mark.parametrize("spell", [repr, json.dumps, lambda v: json.dumps(v, ensure_ascii=False)])
def test_what_python_or_json_spells_is_read_as_it_was(spell: Callable[[object], str]):
    rng = random.Random(11)
    for _ in range(1500):
        values = {f"k{i}": _drawn(rng) for i in range(rng.randrange(4))}
        text = ", ".join(f"{name}={spell(value)}" for name, value in values.items())
        size = rng.choice([1, 2, 5, 1000])
        told, rest = _read([f"{text})]"[i : i + size] for i in range(0, len(text) + 2, size)])
        assert (json.loads(told), rest) == (values, "]")


@pytest.mark.parametrize(
    ("reader", "text"),
    [
        ("lfm2", f"{OPEN}[f(), g(x=1)]{CLOSE}"),
        ("olmo3", f"{O_OPEN}f()\ng(x=1){O_CLOSE}"),
        ("granite", f'{G_OPEN}[{{"name": "f"}}, {{"name": "g"}}]'),
    ],
)
def test_reasoning_content_and_calls_are_told_in_their_order(reader, text):
    given = AnswerFormat(Thinking.MAY_BEGIN, READERS[reader])
    for pieces in cuts_of(f"<think>Hm {OPEN}?</think>So{text}then", random.Random(4)):
        assert order_of(given, pieces) == [f"Hm {OPEN}?So", 0, 1, "then"]


@pytest.mark.parametrize(
    ("reader", "text"),
    [
        ("lfm2", f"{OPEN}[f(), g(x=1)]{CLOSE}"),
        ("lfm2", f"{OPEN}[f()]{CLOSE}and"),
        ("lfm2", f"{OPEN}[f()] and"),
        ("olmo3", f"{O_OPEN}f()\ng(x=1){O_CLOSE}"),
        ("granite", f'{G_OPEN}[{{"name": "f"}}, {{"name": "g"}}]'),
    ],
)
def test_behind_the_calls_that_are_wanted_nothing_is_read(reader, text):
    given = AnswerFormat(Thinking.IS_OVER, READERS[reader])
    for pieces in cuts_of(text, random.Random(5)):
        assert read(given, pieces, max_calls=1) == ("", "", [F])


def test_arguments_are_told_as_they_come():
    parser = AnswerFormat(Thinking.IS_OVER, Lfm2Reader).parser()
    assert parser.push(f"So {OPEN[:5]}") == Parts("So")
    assert parser.push(f"{OPEN[5:]}[f") == Parts()
    assert parser.push("(x") == Parts(calls=(CallPiece(0, "f", "{"),))
    assert parser.push("='a b") == Parts(calls=(CallPiece(0, None, '"x": "a b'),))
    assert parser.push("'") == Parts()
    assert not parser.is_calling
    assert parser.push(")") == Parts(calls=(CallPiece(0, None, '"}'),))
    assert parser.is_calling
    assert parser.push(f"]{CLOSE}") == Parts()
    assert parser.finish() == Parts()


def _read(pieces, names=()) -> tuple[str, str]:
    """Return what is told, and what stands behind the end."""
    told: list[str] = []
    arguments = KeywordArguments(told.append, names)
    rest = ""
    for piece in pieces:
        rest += piece[arguments.push(piece) :]
    assert arguments.is_over
    return "".join(told), rest


def _drawn(rng: random.Random, depth: int = 0) -> object:
    kind = rng.random()
    if kind < 0.4 or depth > 3:
        return "".join(rng.choice("ab'\"\\\n ,)]}:=é😀{[(\x00<|/") for _ in range(rng.randrange(8)))
    if kind < 0.65:
        return rng.choice([True, False, None, 0, -5, 10**20, 1.5, -2e-7, 1e22])
    if kind < 0.8:
        return [_drawn(rng, depth + 1) for _ in range(rng.randrange(4))]
    keys = ["".join(rng.choice("ab'\": ,") for _ in range(rng.randrange(5))) for _ in range(3)]
    return {key: _drawn(rng, depth + 1) for key in keys[: rng.randrange(4)]}
