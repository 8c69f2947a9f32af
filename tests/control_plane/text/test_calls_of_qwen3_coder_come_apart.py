"""Calls in Qwen3-Coder's format: values that nothing quotes become JSON, as the tools say."""

from __future__ import annotations

import json
import random

import pytest

from control_plane.text.answers.parameter_kinds import parameters_of_tools
from control_plane.text.answers.parser import AnswerFormat, Thinking
from control_plane.text.answers.parts import CallPiece, Parts
from control_plane.text.answers.qwen3_coder_reader import Qwen3CoderReader
from tests.control_plane.text.test_answers_come_apart import cuts_of, order_of, read

ADDRESS = {"type": "object", "properties": {"street": {"type": "string"}}}
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "days": {"type": "integer"},
        "score": {"type": ["number", "null"]},
        "wet": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "at": {"$ref": "#/$defs/address"},
        "size": {"enum": ["s", "m", 1]},
        "level": {"enum": [1, 2]},
        "any": {},
    },
    "$defs": {"address": ADDRESS},
}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "bare"}},
]
GIVEN = AnswerFormat(
    Thinking.IS_OVER, Qwen3CoderReader, parameters=parameters_of_tools(TOOLS)
)  # fmt: skip


def written(*parameters: tuple[str, str], name: str = "f") -> str:
    """A call as templates write it."""
    values = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters
    )  # fmt: skip
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def every_cut(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls, the same however the text is cut."""
    cuts = cuts_of(text, random.Random(text))
    first, *others = [read(GIVEN, pieces) for pieces in cuts]
    assert others == [first] * len(others)
    order, *orders = [order_of(GIVEN, pieces) for pieces in cuts]
    assert orders == [order] * len(orders)
    return first[0], first[2]


@pytest.mark.parametrize(
    ("parameter", "value", "wanted"),
    [
        # Texts, whatever they look like.
        ("city", "Paris", "Paris"),
        ("city", "3", "3"),
        ("city", "null", "null"),
        ("city", "", ""),
        ("city", 'a "b"\\\t{}\n\n  c\n', 'a "b"\\\t{}\n\n  c\n'),
        ("city", "\n 漢😀", "\n 漢😀"),
        ("city", "</param <parameter=x> </function></tool_call>", None),
        ("city", "<a>\n  <b></parameter>\n  </parameter>\n</a>", None),  # marks within lines
        ("size", "m", "m"),
        ("size", "1", "1"),
        ("maybe", "Nonesuch", "Nonesuch"),
        ("maybe", "nul", "nul"),
        ("maybe", " null", " null"),
        ("maybe", "", ""),
        ("maybe", "null", json.loads("null")),
        ("maybe", "None", json.loads("null")),
        # What is no text.
        ("days", "3", 3),
        ("days", " -12\n", -12),
        ("days", "three", "three"),
        ("days", "03", "03"),
        ("days", "NaN", "NaN"),
        ("days", "", ""),
        ("days", '"3"', "3"),
        ("score", "0.5e1", 5.0),
        ("score", "None", json.loads("null")),
        ("wet", "True", True),
        ("wet", "false", False),
        ("wet", "yes", "yes"),
        ("level", "2", 2),
        ("tags", '["a",\n "b"]', ["a", "b"]),
        ("tags", '["\\n</parameter>"]', ["\n</parameter>"]),
        ("tags", "['a']", ["a"]),  # as Python spells it
        ("tags", "['a'", "['a'"),
        ("at", '{"street": "</parameter>"}', {"street": "</parameter>"}),
        # Nobody says what it is.
        ("any", "7", 7),
        ("any", "true", True),
        ("any", "True", "True"),
        ("any", "null", json.loads("null")),
        ("any", '{"a": [1]}', {"a": [1]}),
        ("any", "[1, x]", "[1, x]"),
        ("any", '"7"', '"7"'),
        ("any", "  well", "  well"),
        ("unknown", "[\n1\n]", [1]),
        ("unknown", "nothing", "nothing"),
        ("unknown", "", ""),
    ],
)
def test_a_value_is_what_the_tool_says(parameter, value, wanted):
    content, calls = every_cut(written((parameter, value)))
    assert content == ""
    ((name, arguments),) = calls
    if parameter == "city" and wanted is None:
        wanted = value
    assert (name, json.loads(arguments)) == ("f", {parameter: wanted})


def test_of_tools_that_nobody_named_values_are_what_they_look_like():
    for name in ("bare", "never_heard_of"):
        text = written(("a", "1"), ("b", "x y"), ("c", "[]"), name=name)
        assert every_cut(text) == ("", [(name, '{"a": 1, "b": "x y", "c": []}')])


CITY = ("f", '{"city": "Ulm"}')
EMPTY = ("f", "{}")
ULM = "<parameter=city>\nUlm\n</parameter>"

TEXTS = [
    (written(), "", [EMPTY]),
    (f"Well.\n{written(('city', 'Ulm'))}\n{written()}\n", "Well.", [CITY, EMPTY]),
    (f"{written()} so", " so", [EMPTY]),
    ("<tool_call><function=f></function></tool_call>", "", [EMPTY]),
    # The first mark is left out; the last one may have come all the same.
    (f"Hm\n<function=f>\n{ULM}\n</function>", "Hm", [CITY]),
    (f"<function=f>\n{ULM}\n</function>\n</tool_call>\n", "", [CITY]),
    ("<function=f></function>\n</tool>", "\n</tool>", [EMPTY]),
    # Values in one line, and marks that are missing or stand elsewhere.
    ("<function=f><parameter=city>Ulm</parameter></function>", "", [CITY]),
    ("<function=f><parameter=city>Ulm\n</parameter></function>", "", [CITY]),
    ("<function=f>\n<parameter=city>\nUlm</parameter>\n</function>", "", [CITY]),
    ("<function=f>\n<parameter=city>\nUlm</parameter>\n<parameter=days>\n3\n</parameter></function>",
     "", [("f", '{"city": "Ulm", "days": 3}')]),
    ("<function=f>\n<parameter=city>\n</parameter>\n</function>", "", [("f", '{"city": ""}')]),
    (f"<tool_call><function=f>{ULM}\n</tool_call> so", " so", [CITY]),
    (f"<tool_call><function=f>{ULM}\n<tool_call>\n<function=f></function>", "", [CITY, EMPTY]),
    (f"<function=f>{ULM}\n<function=f></function>", "", [CITY, EMPTY]),
    # What else stands in a call is content behind it.
    (f"<function=f>\nOf Ulm:\n{ULM} \n and so \n</function> on", "\nOf Ulm: \n and so on", [CITY]),
    (f"<function=f>{ULM}\n<parameter=city>\nBonn\n</parameter>\n</function>",
     "\n<parameter=city>\nBonn\n</parameter>", [CITY]),
    (f"<function=f><parameter=>{ULM}</function>", "<parameter=>", [CITY]),
    (f"<function=f><parameter=a\nb>{ULM}</function>", "<parameter=a\nb>", [CITY]),
    (f"<function=f><parameter={'n' * 257}>{ULM}</function>", f"<parameter={'n' * 257}>", [CITY]),
    (f"<function=f><parameter=a<b>{ULM}</function>", "<parameter=a<b>", [CITY]),
    # A call that nothing closes stays so.
    ("<function=f>", "", [("f", "{")]),
    ("<function=f>\n  ", "", [("f", "{")]),
    ("<function=f> I said.", " I said.", [("f", "{")]),
    (f"<function=f>{ULM}\n</func", "", [("f", '{"city": "Ulm"')]),
    (f"<function=f>{ULM} so <para", " so", [("f", '{"city": "Ulm"')]),
    ("<function=f>\n<parameter=ci", "", [("f", "{")]),
    ("<function=f>\n<parameter=city>", "", [("f", '{"city": ')]),
    ("<function=f>\n<parameter=city>\nU\"\n</para", "", [("f", '{"city": "U\\"')]),
    ("<function=f>\n<parameter=days>\n3\n</", "", [("f", '{"days": 3')]),
    ("<function=f>\n<parameter=maybe>\nnu", "", [("f", '{"maybe": "nu')]),
    ("<function=f>\n<parameter=tags>\n[1, ", "", [("f", '{"tags": [1, ')]),
    ("<function=f><parameter=a>x</parameter><parameter=a>y",
     "<parameter=a>y", [("f", '{"a": "x"')]),
    # What is no call is content as it stands.
    ("<tool_call>\nf()\n</tool_call> !", "<tool_call>\nf()\n</tool_call> !", []),
    ('<tool_call>{"name": "f", "arguments": {}}</tool_call>',
     '<tool_call>{"name": "f", "arguments": {}}</tool_call>', []),
    ("<tool_call> <func f>", "<tool_call> <func f>", []),
    ("<tool_call> <fun <tool_call><function=f></tool_call>", "<tool_call> <fun", [EMPTY]),
    ("<function=>\n</function>", "<function=>\n</function>", []),
    ("a <function=f\n>", "a <function=f\n>", []),
    (f"<function={'n' * 65}>", f"<function={'n' * 65}>", []),
    (f"<function={'n' * 64} <function=f></function>", f"<function={'n' * 64}", [EMPTY]),
    ("<function=<function=f></function>", "<function=", [EMPTY]),
    ("</function> </parameter> <parameter=x>", "</function> </parameter> <parameter=x>", []),
    ("Hi <tool_call>\n<functi", "Hi <tool_call>\n<functi", []),
    ("Hi <function=ab", "Hi <function=ab", []),
]  # fmt: skip


@pytest.mark.parametrize(("text", "content", "calls"), TEXTS)
def test_calls_come_out_of_the_text_and_the_rest_is_content(text, content, calls):
    assert every_cut(text) == (content, calls)


def test_texts_come_as_they_are_written_other_values_once_they_are_whole():
    parser = GIVEN.parser()

    def told(text: str) -> str:
        """What is new of the arguments; no content."""
        content, reasoning, calls, _ = parser.push(text)
        assert (content, reasoning) == ("", "")
        return "".join(call.arguments for call in calls)

    assert parser.push("<tool_call>\n<function=f") == Parts()
    assert parser.push(">") == Parts(calls=(CallPiece(0, "f", "{"),))
    assert told("\n<parameter=city") == ""
    assert told(">") == '"city": '
    assert told("\nPa") == '"Pa'
    assert told('r"') == 'r\\"'
    assert told("\n") == ""
    assert told("</") == ""
    assert told("p>\n</parameter") == "\\n</p>"
    assert told(">") == '"'
    assert told("\n<parameter=days>\n4") == ', "days": '
    assert told("2") == ""
    assert told("\n</parameter>") == "42"
    assert told("\n<parameter=maybe>\nN") == ', "maybe": '
    assert told("o") == ""
    assert told("t") == '"Not'
    assert told("\n</parameter>\n<parameter=any>\n [") == '", "any": '
    assert told("x") == ""
    assert told("\n</parameter>\n<parameter=new>\n ") == '" [x", "new": '
    assert told("y") == '" y'
    assert not parser.is_calling
    assert told("\n</parameter>\n</function>") == '"}'
    assert parser.is_calling
    assert parser.push("\n</tool_call>") == parser.finish() == Parts()


def test_arguments_are_passed_on_while_a_call_goes_on_whatever_stands_between_them():
    text = f"So {written(('city', 'Ulm'))} and {written(('city', 'Ulm'))}"
    for pieces in cuts_of(text, random.Random(3)):
        assert order_of(GIVEN, pieces) == ["So", 0, " and", 1]


@pytest.mark.spread(3)
@pytest.mark.parametrize(
    "text",
    [
        f"<function=f><parameter=city>{'x' * 50_000}</parameter></function>",
        f"<function=f><parameter=any>[{'x' * 50_000}</parameter></function>",
        f"<function=f><parameter=any>{' ' * 50_000}</parameter></function>",
        f"<function=f>{' ' * 50_000}</function>",
        f"<function=f>{'a ' * 25_000}</function>",
        f"<function=f>{'<parameter=a>x</parameter>' * 2_000}",
        f"<function=f><parameter=city>{'</parameter' * 5_000}",
        "<tool_call>" + "\n" * 50_000,
        "<function=f></function>" + "\n" * 50_000,
        "<function=f>" * 4_000,
    ],
)
def test_a_long_call_is_read_in_time_that_grows_with_it(text):
    # A quadratic reader would copy a gigabyte.
    assert read(GIVEN, [*text]) == read(GIVEN, [text])


def test_no_text_is_more_than_can_be_read():
    for value in ("[" * 100_000, "9" * 100_000, '{"a":' * 20_000):
        ((_, arguments),) = read(GIVEN, [written(("tags", value))])[2]
        assert json.loads(arguments) == {"tags": value}
