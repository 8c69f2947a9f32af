"""Answers of chat models: content, reasoning and tool calls, however their text is cut."""

from __future__ import annotations

import itertools
import random

import pytest

from control_plane.text.answers.call_readers import HermesReader, Llama3JsonReader
from control_plane.text.answers.glm_reader import GlmReader
from control_plane.text.answers.list_readers import MistralReader
from control_plane.text.answers.parser import AnswerFormat, Thinking
from control_plane.text.answers.parts import CallPiece, Parts, Said
from control_plane.text.answers.qwen3_coder_reader import Qwen3CoderReader
from control_plane.text.answers.section_readers import (
    DeepSeekV3Reader,
    DeepSeekV31Reader,
    KimiReader,
)
from control_plane.text.answers.text_form import FirstCall

READERS = {
    "hermes": HermesReader,
    "llama": Llama3JsonReader,
    "mistral": MistralReader,
    "qwen3_coder": Qwen3CoderReader,  # more in test_calls_of_qwen3_coder_come_apart
    "glm": GlmReader,  # more in test_calls_of_glm_come_apart
    "deepseek_v3": DeepSeekV3Reader,  # these three in test_calls_in_sections_come_apart
    "deepseek_v31": DeepSeekV31Reader,
    "kimi": KimiReader,
}
OPEN, CLOSE, BEGIN, END, SEPARATOR = DeepSeekV3Reader.NAMES
K_OPEN, _, K_BEGIN, _, K_ARGUMENTS = KimiReader.NAMES
MAY_BEGIN = Thinking.MAY_BEGIN
LONG_NAME = "n" * 65

F = ("f", "{}")
G = ("g", '{"x": [1, {"y": "}"}], "z": "a\\"}b"}')

CALLS = [
    # Hermes and Qwen
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', "", [F]),
    ("hermes", f'Well.\n<tool_call>{{"name":"g","arguments":{G[1]}}}</tool_call>', "Well.", [G]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n'
     f'<tool_call>\n{{"arguments": {G[1]}, "name": "g"}}\n</tool_call>\n', "", [F, G]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [F]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, "id": "1"}</tool_call>', "", [F]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n\nDone. ', "\n\nDone.",
     [F]),
    ("hermes", '<tool_call>{"name": "f\\u006f", "arguments": {}}', "", [("fo", "{}")]),
    # A brace that is missing at the end is not missed.
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {}\n</tool_call>\nHi', "\nHi", [F]),
    # What is no call is text, and so is what stands around it.
    ("hermes", "a < b, <tool>, <tool_call", "a < b, <tool>, <tool_call", []),
    ("hermes", "Hi \n<tool_call>\nf()\n</tool_call> !", "Hi \n<tool_call>\nf()\n</tool_call> !",
     []),
    ("hermes", '<tool_call>{"nam": "f"}</tool_call>', '<tool_call>{"nam": "f"}</tool_call>', []),
    ("hermes", '<tool_call>{"name": ""}</tool_call>', '<tool_call>{"name": ""}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}', '<tool_call>{"name": "f", '
     '"arguments": "{}"}', []),
    ("hermes", f'<tool_call>{{"name": "{LONG_NAME}"}}', f'<tool_call>{{"name": "{LONG_NAME}"}}',
     []),
    # Half a character is no name: no answer could spell it.
    ("hermes", '<tool_call>{"name": "\\ud83d"}', '<tool_call>{"name": "\\ud83d"}', []),
    ("hermes", '<tool_call>{"name": "\\ud83d\\ude00"}</tool_call>', "", [("😀", "{}")]),
    ("hermes", '<tool_call><tool_call>{"name": "f", "arguments": {}}</tool_call>', "<tool_call>",
     [F]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_cards>', "</tool_cards>", [F]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}<tool_call>{"name": "f"}</tool_call>', "",
     [F, F]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, "oh": 1}', ', "oh": 1}', [F]),
    ("hermes", '<tool_call>{"name": "f", ', '<tool_call>{"name": "f", ', []),
    ("hermes", f'<tool_call>{{"name": "{LONG_NAME[2:]}\\n"}}',
     f'<tool_call>{{"name": "{LONG_NAME[2:]}\\n"}}', []),
    ("hermes", '<tool_call>{"name": "f", "name": "g"}', '<tool_call>{"name": "f", "name": "g"}',
     []),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "arguments": {}, "name": "f"}',
     '<tool_call>{"arguments": {"a": 1}, "arguments": {}, "name": "f"}', []),
    ("hermes", '<tool_call>{"id": "a\nb", "name": "f"}</tool_call>', "", [F]),
    # From their first brace on arguments are passed on as they are.
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1', "", [("f", '{"x": 1')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {x: }}</tool_call>', "", [("f", "{x: }")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>', "",
     [("f", '{"x": "</tool_call>"}')]),
    # Llama
    ("llama", f' {{"name": "g", "parameters": {G[1]}}}', "", [G]),
    ("llama", '{"type": "function", "name": "f", "parameters": {}}', "", [F]),
    ("llama", '<|python_tag|>{"name": "f", "parameters": {}}', "", [F]),
    ("llama", 'Let me see. <|python_tag|>{"name": "f", "parameters": {}}', "Let me see.", [F]),
    ("llama", f'{{"name": "f", "parameters": {{}}}}; {{"name": "g", "parameters": {G[1]}}}', "",
     [F, G]),
    ("llama", '<|python_tag|>f.call(x="1")', '<|python_tag|>f.call(x="1")', []),
    ("llama", 'Hi {"name": "f", "parameters": {}}', 'Hi {"name": "f", "parameters": {}}', []),
    ("llama", '{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', []),
    ("llama", '{"name": "Ann"}', '{"name": "Ann"}', []),
    ("llama", '{"name": "f", "parameters": {}} ; or', " ; or", [F]),
    ("llama", '{"name": "f", "parameters": {}} and', " and", [F]),
    ("llama", "  ", "  ", []),
    # Mistral
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}]', "", [F]),
    ("mistral", f'Hm [TOOL_CALLS] [{{"name": "f", "arguments": {{}}}}, '
     f'{{"name": "g", "arguments": {G[1]}, "id": "abcdefghi"}}]', "Hm", [F, G]),
    ("mistral", '[TOOL_CALLS][{"arguments": {}, "name": "f"}] ', "", [F]),
    ("mistral", "[TOOL_CALLS]f[ARGS]{}", "", [F]),
    ("mistral", f"[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{{}}[TOOL_CALLS]g [ARGS] {G[1]}", "",
     [F, G]),
    ("mistral", "[TOOL_CALLS]f{}Done", "Done", [F]),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}} ]Done[TOOL_CALLS]', "Done[TOOL_CALLS]",
     [F]),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}][TOOL_CALLS]f{}]', "]", [F, F]),
    ("mistral", "[TOOL_CALLS]", "[TOOL_CALLS]", []),
    ("mistral", "[TOOL_CALLS] []", "[TOOL_CALLS] []", []),
    ("mistral", "[TOOL_CALLS]f[ARG]{}", "[TOOL_CALLS]f[ARG]{}", []),
    ("mistral", "[TOOL_CALLS]f g{}", "[TOOL_CALLS]f g{}", []),
    ("mistral", "[TOOL_CALLS]f[ARGS]", "[TOOL_CALLS]f[ARGS]", []),
    ("mistral", f"[TOOL_CALLS]{LONG_NAME}{{}}", f"[TOOL_CALLS]{LONG_NAME}{{}}", []),
    ("mistral", '[{"name": "f", "arguments": {}}]', '[{"name": "f", "arguments": {}}]', []),
]  # fmt: skip

THOUGHTS = [
    (MAY_BEGIN, "<think>\nhm\n</think>\n\nHi.\n", "hm", "Hi.\n"),
    (MAY_BEGIN, " <think>a</thin> b </think>c", "a</thin> b", "c"),
    (MAY_BEGIN, "<think>\n\n</think>\n\nHi", "", "Hi"),
    (MAY_BEGIN, "<think>hm, ", "hm, ", ""),
    (MAY_BEGIN, "Hi <think>no</think>", "", "Hi <think>no</think>"),
    (MAY_BEGIN, " <thi", "", " <thi"),
    (MAY_BEGIN, "\u3000<think>a", "", "\u3000<think>a"),
    (MAY_BEGIN, " \n", "", " \n"),
    (Thinking.HAS_BEGUN, "\nhm\n</think>\n\nHi </think>", "hm", "Hi </think>"),
    (Thinking.HAS_BEGUN, "<think>hm", "<think>hm", ""),
    (Thinking.IS_OVER, "<think>hm</think>", "", "<think>hm</think>"),
]


def joined(pieces) -> tuple[str, str, list[tuple[str, str]]]:
    """What a reader of the pieces puts together; each call has its name first, and once."""
    content, reasoning, calls = "", "", []
    for piece in pieces:
        content, reasoning = content + piece.content, reasoning + piece.reasoning
        for index, name, arguments in piece.calls:
            if name is None:
                assert index == len(calls) - 1
                calls[index] = (calls[index][0], calls[index][1] + arguments)
            else:
                assert index == len(calls)
                calls.append((name, arguments))
    return content, reasoning, calls


def read(given: AnswerFormat, pieces, **options) -> tuple[str, str, list[tuple[str, str]]]:
    parser = given.parser(**options)
    return joined([*[parser.push(piece) for piece in pieces], parser.finish()])


def order_of(given: AnswerFormat, pieces) -> list[str | int]:
    """Content and numbers of calls as they were written, whatever comes of each at a time."""
    parser, found = given.parser(), []
    for parts in [*[parser.push(piece) for piece in pieces], parser.finish()]:
        for one in parts.in_order():
            one = one.number if isinstance(one, CallPiece) else one.text
            if isinstance(one, str) and found and isinstance(found[-1], str):
                found[-1] += one
            elif one not in found[-1:]:
                found.append(one)
    return found


def cuts_of(text: str, random_: random.Random) -> list[list[str]]:
    """All at once, character by character, and cut at drawn places."""
    drawn = []
    for share in (0.1, 0.3, 0.6):
        places = [0, *(i for i in range(1, len(text)) if random_.random() < share), len(text)]
        drawn.append([text[a:b] for a, b in itertools.pairwise(places)])
    return [[text], [*text], *drawn]


@pytest.mark.parametrize(("reader", "text", "content", "calls"), CALLS)
def test_calls_come_out_of_the_text_and_the_rest_is_content(reader, text, content, calls):
    given = AnswerFormat(Thinking.IS_OVER, READERS[reader])
    for pieces in cuts_of(text, random.Random(text)):
        assert read(given, pieces) == (content, "", calls)


@pytest.mark.parametrize(("thinking", "text", "reasoning", "content"), THOUGHTS)
def test_reasoning_is_split_off(thinking, text, reasoning, content):
    for pieces in cuts_of(text, random.Random(text)):
        assert read(AnswerFormat(thinking), pieces) == (content, reasoning, [])


def test_reasoning_has_no_calls_and_calls_may_follow_it():
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    text = f"<think>\n{call}?\n</think>\n\nYes:\n{call}"
    for pieces in cuts_of(text, random.Random(1)):
        given = AnswerFormat(MAY_BEGIN, HermesReader)
        assert read(given, pieces) == ("Yes:", f"{call}?", [F])


PIECES = [
    '{"name": "f", "arguments": {}}', '{"name": "g", "parameters": {"a": [1, "}"]}}', "f[ARGS]{}",
    '{"name": "', '"arguments": {', '{"x": "\\"}"}', "[", "]", "{", "}", '"', "\\", ",", ":", ";",
    " ", "\n\n", "<", "Hi", "é漢😀", "name", "[ARGS]", "[CALL_ID]", "</tool_call>", "</think>",
    "<think>", "<tool_call>", "[TOOL_CALLS]", "<|python_tag|>",
]  # fmt: skip


FAVOURITES = {
    "hermes": ["<tool_call>", '<tool_call>{"name": "f", "arguments": {'] * 3,
    "llama": ["<|python_tag|>", '<|python_tag|>{"name": "f", "parameters": {'] * 3,
    "mistral": ["[TOOL_CALLS]", '[TOOL_CALLS][{"name": "f", "arguments": {', "[TOOL_CALLS]g{"] * 2,
    "qwen3_coder": ["<function=f>", "<function=", "<parameter=x>", "\n</parameter>", "</function>",
                    "<parameter=", "<tool_call>\n<function=g>\n<parameter=y>\n"],
    "glm": [*GlmReader.NAMES, "<tool_call>f<arg_key>k</arg_key>\n<arg_value>", "<tool_call>g\n",
            "</arg_value>\n<arg_key>l"],
    "deepseek_v3": [*(_DEEPSEEK := [OPEN, BEGIN, SEPARATOR, END, CLOSE]), "function", "```json\n{",
                    f"{OPEN}{BEGIN}function{SEPARATOR}f\n```json\n{{", f"}}\n```{END}"] * 2,
    "deepseek_v31": [*_DEEPSEEK, f"{OPEN}{BEGIN}f{SEPARATOR}{{", f"}}{END}{BEGIN}g"] * 2,
    "kimi": [*KimiReader.NAMES, "functions.f:0", ":1", f"{K_OPEN}{K_BEGIN}f:0{K_ARGUMENTS}{{"] * 2,
}  # fmt: skip


@pytest.mark.spread(2)
@pytest.mark.parametrize("reader", [None, *READERS])
@pytest.mark.parametrize("thinking", list(Thinking))
def test_no_cut_changes_what_comes_out(reader, thinking):
    random_ = random.Random(f"{reader}{thinking}")
    given = AnswerFormat(thinking, READERS.get(reader))
    favourites = FAVOURITES.get(reader, [])
    start = "</think>" if thinking is Thinking.HAS_BEGUN else ""
    num_with_calls = 0
    for _ in range(100):
        length = random_.randrange(1, 14)
        text = start + "".join(random_.choices(PIECES + favourites, k=length))
        whole, *others = [read(given, pieces) for pieces in cuts_of(text, random_)]
        assert others == [whole] * len(others), text
        first, *more = [order_of(given, pieces) for pieces in cuts_of(text, random_)]
        assert more == [first] * len(more), text
        num_with_calls += bool(whole[2])
        if not whole[2]:  # nothing is lost but the marks of the reasoning and the space beside them
            left = text
            for mark in ("<think>", "</think>", *" \n"):
                left = left.replace(mark, "")
            told = whole[1] + whole[0]
            for mark in ("<think>", "</think>", *" \n"):
                told = told.replace(mark, "")
            assert told == left
    assert num_with_calls >= 5 or not reader


def test_nothing_is_held_back_longer_than_the_format_needs():
    parser = AnswerFormat(MAY_BEGIN, HermesReader).parser()
    assert parser.push("<thi") == Parts()
    assert parser.push("s ") == Parts("<this")  # space may stand before a marker
    assert parser.push("is <") == Parts(" is")
    assert parser.push("b") == Parts(" <b")
    assert parser.push("<tool_call>\n{") == Parts()
    assert parser.push('"name": "f", "arguments": ') == Parts()
    assert parser.push('{"x') == Parts(calls=(CallPiece(0, "f", '{"x'),))
    assert parser.push('": "<') == Parts(calls=(CallPiece(0, None, '": "<'),))
    assert not parser.is_calling
    assert parser.push('"}') == Parts(calls=(CallPiece(0, None, '"}'),))
    assert parser.is_calling
    assert parser.push("}\n</tool_call>") == Parts()
    assert parser.push("\n") == Parts()
    assert parser.finish() == Parts()


def test_text_and_calls_are_told_in_the_order_in_which_they_were_written():
    call = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    given = AnswerFormat(MAY_BEGIN, HermesReader)
    text = f"<think>hm</think>{call} and {call}{call} so"
    for pieces in cuts_of(text, random.Random(3)):
        assert order_of(given, pieces) == ["hm", 0, " and", 1, 2, " so"]
    parts = given.parser().push(f"Hi {call} you")
    assert [*parts.in_order()] == [Said("Hi"), CallPiece(0, "f", '{"x": 1}'), Said(" you")]


@pytest.mark.parametrize(
    ("reader", "whole", "rest"),
    [
        ("hermes", 'So <tool_call>{"name": "f", "arguments": {}}</tool_call>', " and"),
        ("llama", '{"name": "f", "parameters": {}}', '; {"name": "g", "parameters": {}}'),
        ("llama", '<|python_tag|>{"name": "f", "parameters": {}}', " so"),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}]', "."),
        ("mistral", "[TOOL_CALLS]f[ARGS]{}", "[TOOL_CALLS]g[ARGS]{}"),
        ("qwen3_coder", "So <tool_call>\n<function=f>\n</function>\n</tool_call>", " and"),
        ("qwen3_coder", "<function=f></tool_call>", "<function=g></function>"),
        ("qwen3_coder", "So <function=f></function> a", "nd"),
        # Nothing closes it, but for what cannot be a part of it.
        ("hermes", '<tool_call>{"name": "f", "arguments": {}} a', "nd <tool_call>"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}, "oh"', ": 1}</tool_call>"),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}},', ' {"name": "g"}]'),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}} s', "o"),
    ],
)
def test_what_follows_the_calls_that_are_wanted_is_left_out(reader, whole, rest):
    given = AnswerFormat(Thinking.IS_OVER, READERS[reader])
    for pieces in cuts_of(whole + rest, random.Random(2)):
        said, _, calls = read(given, pieces, max_calls=1)
        assert (said, calls) == ("So" if "So" in whole else "", [F])
        first = FirstCall(given)
        told = [first.push(piece, 0) for piece in pieces]
        assert told == [end >= len(whole) for end in itertools.accumulate(map(len, pieces))]


def test_a_call_that_is_left_out_does_not_change_that_the_first_is_whole():
    given = AnswerFormat(Thinking.IS_OVER, HermesReader)
    begun = '<tool_call>{"name": "f", "arguments": {'
    for max_calls, is_calling in ((1, True), (2, False), (None, False)):
        parser = given.parser(max_calls=max_calls)
        parser.push(f"{begun}}}}}</tool_call>{begun}")
        parser.finish()
        assert parser.is_calling is is_calling


def test_what_is_fed_comes_with_the_next_that_is_pushed_or_at_the_end():
    parser = AnswerFormat(MAY_BEGIN, HermesReader).parser()
    parser.feed("<think>hm</think>We")
    assert parser.push("ll") == Parts("Well", "hm")
    parser.feed('<tool_call>{"name": "f", "argu')
    parser.feed('ments": {}}</tool_call>')
    assert parser.finish() == Parts(calls=(CallPiece(0, "f", "{}"),))


def test_an_answer_that_goes_on_with_a_message_does_not_begin_with_a_call():
    text = '{"name": "f", "parameters": {}}'
    given = AnswerFormat(Thinking.IS_OVER, Llama3JsonReader, is_start=False)
    assert read(given, [text]) == (text, "", [])
    assert read(given, ["<|python_tag|>" + text]) == ("", "", [F])


def test_a_long_answer_is_read_in_time_that_grows_with_it():
    # A quadratic reader would copy a gigabyte.
    given = AnswerFormat(MAY_BEGIN, HermesReader)
    argument = "x" * 50_000
    text = f'<tool_call>{{"arguments": {{"a": "{argument}"}}, "name": "f"}}</tool_call>'
    assert read(given, [*text])[2] == [("f", f'{{"a": "{argument}"}}')]


@pytest.mark.spread(3)
@pytest.mark.parametrize("thinking", list(Thinking))
@pytest.mark.parametrize("start", ["", "x", "<think>", '<tool_call>{"name": "f", "arguments": {}}'])
def test_space_without_end_is_read_in_time_that_grows_with_it(thinking, start):
    # A quadratic reader would look at some gigabytes: models that are lost write such answers.
    text = start + "\n" * 100_000
    content, reasoning, calls = read(AnswerFormat(thinking, HermesReader), [*text])
    assert calls or content.count("\n") + reasoning.count("\n") in (0, 100_000)


HOSTILE = {
    "hermes": ["<tool_call>", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'],
    "llama": ["<|python_tag|>", '{"name": "f", "parameters": {}};'],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS]f[ARGS]{}", "[TOOL_CALLS]f[CALL_ID]"],
    "qwen3_coder": ["<tool_call>", "<function=", "<function=f>", "<parameter=x></parameter>",
                    "<function=f><parameter=x>[</parameter>"],
}  # fmt: skip


@pytest.mark.spread(4)
@pytest.mark.parametrize(
    ("reader", "piece"), [(reader, piece) for reader in HOSTILE for piece in HOSTILE[reader]]
)
def test_a_reader_is_never_given_more_than_a_little_at_once(reader, piece):
    """What is taken from the front of a long text is taken by copying the rest."""
    longest = 0

    class Counting(READERS[reader]):
        def push(self, text):
            nonlocal longest
            longest = max(longest, len(text))
            super().push(text)

    text = piece * 1_000
    found = read(AnswerFormat(Thinking.IS_OVER, Counting), [text])
    assert longest <= 1024
    assert found == read(AnswerFormat(Thinking.IS_OVER, READERS[reader]), [*text])
