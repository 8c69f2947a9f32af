"""Calls as Gemma 4 writes them: texts between marks, names without quotes."""

from __future__ import annotations

import json
import random
import time

import pytest

from control_plane.text.answers.gemma4_arguments import QUOTE, Gemma4Arguments
from control_plane.text.answers.gemma4_reader import Gemma4Reader
from control_plane.text.answers.parser import AnswerFormat, Thinking
from control_plane.text.answers.parts import CallPiece, Parts
from control_plane.text.answers.written_calls import WRITERS, Call
from tests.control_plane.text.test_answers_come_apart import cuts_of, order_of, read

OPEN, CLOSE, _ = Gemma4Reader.NAMES
FORMAT = AnswerFormat(Thinking.IS_OVER, Gemma4Reader)
F = ("f", "{}")
G = ("g", '{"x": 1}')


def quoted(text: str) -> str:
    return f"{QUOTE}{text}{QUOTE}"


CASES = [
    (f"{OPEN}call:f{{}}{CLOSE}", "", [F]),
    (f"{OPEN}call:f{{}}{CLOSE}{OPEN}call:g{{x:1}}{CLOSE}", "", [F, G]),
    (f"So\n{OPEN} call: f {{ }} {CLOSE}\n{OPEN}call:g{{x: 1}}{CLOSE} end", "So end", [F, G]),
    (f"{OPEN}call:a.b-c 2{{x:1}}{CLOSE}", "", [("a.b-c 2", '{"x": 1}')]),
    (f"{OPEN}call:f{{x:{quoted(CLOSE)}}}{CLOSE}", "", [("f", json.dumps({"x": CLOSE}))]),
    # The mark behind a call, and braces in front of it, are not missed.
    (f"{OPEN}call:f{{}}", "", [F]),
    (f"{OPEN}call:f{{}} then", " then", [F]),
    (f"{OPEN}call:f{{}}{OPEN}call:g{{x:1}}", "", [F, G]),
    (f"{OPEN}call:g{{x:1{CLOSE} then", " then", [G]),
    (f"{OPEN}call:f{{x:[1,{{a:{quoted('b')}{CLOSE}.", ".", [("f", '{"x": [1, {"a": "b"}]}')]),
    (f"{OPEN}call:f{{x:{CLOSE}", "", [("f", '{"x": null}')]),
    (f"{OPEN}call:f{{x{CLOSE}", "", [("f", '{"x": null}')]),
    # What is no call is text, and so is what stands around it.
    *(
        (text, text, [])
        for text in (
            f"call:f{{}}, {OPEN[:-1]}, {CLOSE}",
            f"{OPEN}f{{}}{CLOSE}",
            f"{OPEN}call:{{}}{CLOSE}",
            f"{OPEN}call:f{CLOSE}",
            f"{OPEN}call:f",
            f"{OPEN}cal",
            f"{OPEN}call:two\nlines{{}}",
            f"{OPEN}call:{'n' * 65}{{}}",
            f'{OPEN}{{"name": "f", "arguments": {{}}}}',
        )
    ),
    (f"{OPEN}{OPEN}call:f{{}}{CLOSE}", OPEN, [F]),
    (f"{OPEN}call:{OPEN}call:f{{}}{CLOSE}", f"{OPEN}call:", [F]),
    # From its brace on a call is one, as far as it comes.
    (f"{OPEN}call:f{{x:{QUOTE}a", "", [("f", '{"x": "a')]),
    (f"{OPEN}call:f{{x:{QUOTE}a<|", "", [("f", '{"x": "a')]),
    (f"{OPEN}call:f{{x:12", "", [("f", '{"x": 12')]),
    (f"{OPEN}call:f{{x:San Fr", "", [("f", '{"x": "San Fr')]),
    (f"{OPEN}call:f{{x", "", [("f", "{")]),
    (f"{OPEN}call:f{{x:[1, ", "", [("f", '{"x": [1')]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "content", "calls"), CASES)
def test_calls_come_out_of_the_text_and_the_rest_is_content(text, content, calls):
    for pieces in cuts_of(text, random.Random(text)):
        assert read(FORMAT, pieces) == (content, "", calls)


VALUES = {
    quoted("x"): '"x"',
    quoted(""): '""',
    quoted('it\'s "so", {a:[1]}\n\\n <|"|'): json.dumps('it\'s "so", {a:[1]}\n\\n <|"|'),
    f" {quoted('a')} ": '"a"',
    "true": "true",
    "None": "null",  # as the template has it
    "12": "12",
    "-1.5e-07": "-1.5e-07",
    "012": '"012"',
    "": "null",
    "San Francisco": '"San Francisco"',
    "[]": "[]",
    "{}": "{}",
    f"[{quoted('a')},{quoted('b,]')}]": '["a", "b,]"]',
    f"{{a:{quoted('b')},c d:{{e:[null, 1 , ]}},}}": '{"a": "b", "c d": {"e": [null, 1]}}',
    f"{{{quoted('a:b')}:1}}": '{"a:b": 1}',
    f"{{{quoted('')} :1}}": '{"": 1}',
    '{"a:b": "c\\n\\"<|x<tool_call|>", "": ["\\u00e9"]}': (
        '{"a:b": "c\\n\\"<|x<tool_call|>", "": ["\\u00e9"]}'
    ),
    f'"x{QUOTE}y"': json.dumps(f"x{QUOTE}y"),
    '"""x"""': '"x"',
    "[1}": "[1]",  # a brace closes the object with the list in it
    "1]": "1",
    f"{quoted('a')} b {quoted('c, }')}": '"a"',
    f"a{quoted('b')}": json.dumps(f"a{quoted('b')}"),
    f"{{a{quoted('b')}:1}}": json.dumps({f"a{quoted('b')}": 1}),
    f"{{{quoted('a')}{quoted('b')}}}": '{"a": "b"}',
    "{a,b}": '{"a": null, "b": null}',
    "{a:,b:}": '{"a": null, "b": null}',
    "[" * 300 + "]" * 300: "[" * 300 + "]" * 300,
}


@pytest.mark.parametrize("value", VALUES)
def test_a_value_is_told_as_json(value):
    ends = "" if value == "[1}" else ",y:1}"
    for pieces in cuts_of(f"x:{value}{ends}<", random.Random(value)):
        expected = f'{{"x": {VALUES[value]}{", " if ends else ""}'
        assert _read(pieces) == (
            f"{expected}{chr(34) + 'y' + chr(34) + ': 1' if ends else ''}}}",
            "<",
        )


def test_what_templates_write_is_read_as_it_was():
    rng = random.Random(11)
    for _ in range(1500):
        values = {f"k{i}": _drawn(rng) for i in range(rng.randrange(4))}
        text = WRITERS["gemma4"]([Call("f", values)])
        size = rng.choice([1, 2, 5, 1000])
        ((name, arguments),) = read(
            FORMAT, [text[i : i + size] for i in range(0, len(text), size)]
        )[2]
        assert (name, json.loads(arguments)) == ("f", values)


def test_what_json_spells_is_read_as_it_was():
    rng = random.Random(12)
    for _ in range(1500):
        values = {f"k{i}": _drawn(rng) for i in range(rng.randrange(4))}
        text = json.dumps(values, ensure_ascii=rng.random() < 0.5)[1:]
        size = rng.choice([1, 2, 5, 1000])
        told, rest = _read([text[i : i + size] for i in range(0, len(text), size)])
        assert (json.loads(told), rest) == (values, "")


PARTS = [
    *(OPEN, CLOSE, QUOTE, "call:", "f", "{", "}", "[", "]", ":", ",", '"', "\\", " ", "\n", "1"),
    *("<|", '"|>', "true", "<tool_", "é", "'", "-"),
]


@pytest.mark.parametrize(
    "seeds", [range(400), pytest.param(range(400, 20_000), marks=[pytest.mark.slow])]
)
def test_any_text_is_read_the_same_however_it_is_cut_and_nothing_of_it_is_wrong(seeds):
    for seed in seeds:
        rng = random.Random(seed)
        begin = rng.choice(["", f"{OPEN}call:f{{"])
        text = begin + "".join(rng.choices(PARTS, k=rng.randrange(30)))
        expected = read(FORMAT, [text])
        for pieces in cuts_of(text, rng):
            assert read(FORMAT, pieces) == expected
        if not begin:
            continue
        (_, arguments), *_more = expected[2]
        if text.startswith(f"{OPEN}call:f{{") and not _is_cut(text):
            json.loads(arguments)


def _is_cut(text: str) -> bool:
    """Whether the arguments of the first call do not end."""
    arguments = Gemma4Arguments(lambda _: None)
    arguments.push(text.removeprefix(f"{OPEN}call:f{{"))
    return not arguments.is_over


@pytest.mark.spread(10)
@pytest.mark.parametrize(
    "unit",
    [
        *(
            "[",
            "{a:",
            "{a:[",
            "a",
            ",",
            " ",
            '"',
            "\\",
            "<",
            "<|",
            QUOTE,
            f"{QUOTE}a",
            "a:",
            "]",
            "1,",
        ),
        *(f"{OPEN}call:f{{", f"{OPEN}call:", OPEN, f"{OPEN}call:f{{}}{CLOSE}"),
    ],
)
def test_long_texts_take_time_as_they_are_long(unit):
    def takes(length: int) -> float:
        text = f"{OPEN}call:f{{x:" + unit * (length // len(unit))
        parser = FORMAT.parser()
        begin = time.process_time()
        for at in range(0, len(text), 7):
            parser.push(text[at : at + 7])
        parser.finish()
        return time.process_time() - begin

    takes(1000)
    assert takes(40_000) < 12 * takes(10_000) + 0.2


def test_reasoning_content_and_calls_are_told_in_their_order():
    given = AnswerFormat(Thinking.MAY_BEGIN, Gemma4Reader)
    text = f"{OPEN}call:f{{}}{CLOSE}{OPEN}call:g{{x:1}}{CLOSE}"
    for pieces in cuts_of(f"<think>Hm {OPEN}?</think>So{text}then", random.Random(4)):
        assert order_of(given, pieces) == [f"Hm {OPEN}?So", 0, 1, "then"]


@pytest.mark.parametrize("behind", ["", " and", f"{OPEN}call:g{{x:1}}{CLOSE}"])
@pytest.mark.parametrize("call", [f"{OPEN}call:f{{}}{CLOSE}", f"{OPEN}call:f{{{CLOSE}"])
def test_behind_the_calls_that_are_wanted_nothing_is_read(call, behind):
    for pieces in cuts_of(call + behind, random.Random(5)):
        assert read(FORMAT, pieces, max_calls=1) == ("", "", [F])


def test_arguments_are_told_as_they_come():
    parser = FORMAT.parser()
    assert parser.push(f"So {OPEN[:5]}") == Parts("So")
    assert parser.push(f"{OPEN[5:]}call:f") == Parts()
    assert parser.push("{x") == Parts(calls=(CallPiece(0, "f", "{"),))
    assert parser.push(f":{QUOTE}a b") == Parts(calls=(CallPiece(0, None, '"x": "a b'),))
    assert parser.push(QUOTE[:3]) == Parts()
    assert parser.push(QUOTE[3:]) == Parts(calls=(CallPiece(0, None, '"'),))
    assert not parser.is_calling
    assert parser.push("}") == Parts(calls=(CallPiece(0, None, "}"),))
    assert parser.is_calling
    assert parser.push(CLOSE) == Parts()
    assert parser.finish() == Parts()


def _read(pieces) -> tuple[str, str]:
    """Return what is told, and what stands behind the end."""
    told: list[str] = []
    arguments = Gemma4Arguments(told.append)
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
    keys = ["".join(rng.choice("ab'\": ,[}\n<") for _ in range(rng.randrange(5))) for _ in range(3)]
    return {key: _drawn(rng, depth + 1) for key in keys[: rng.randrange(4)]}
