"""What a sample may say where it need not call tools, but some are strict, or only some allowed."""

from __future__ import annotations

import itertools
import random

import pytest

from control_plane.core.generation_params import GenerationParams
from control_plane.core.structured_outputs import StructuredOutputs
from control_plane.text.answers.formats import CALL_READERS
from control_plane.text.answers.parser import AnswerFormat, Thinking
from control_plane.text.answers.tool_choice import ToolChoice, with_calls
from control_plane.text.answers.written_calls import WRITERS, Call
from control_plane.text.bounds import MAX_TOOL_CALLS
from control_plane.text.simple_tokenizer import EOS_TOKEN_ID
from planes.errors import ValidationError
from tests.control_plane.structured.test_answers_are_calls_where_they_must_be import (
    EVERY,
    FORMATS,
    MARKED,
    SCHEMA,
    TOOLS,
    allowed,
    constraint,
    format_of,
    grammars,
    read,
    take,
)

__all__ = ["grammars"]

STRICT = ToolChoice(strict=("weather",))
KEYS = {
    "hermes": "arguments",
    "llama3_json": "parameters",
    "mistral": "arguments",
    "granite": "arguments",
}
"""Of formats in which calls are objects; of others: test_calls_of_qwen3_coder_keep_to_their_schema,
test_calls_in_sections_keep_to_their_schema and test_calls_of_python_keep_to_their_schema."""

OPENINGS = {
    "hermes": ["<tool_call>", "\n"],
    "llama3_json": ["<|python_tag|>"],
    "mistral": ["[TOOL_CALLS]", "["],
    "granite": ["<|tool_call|>", "["],
}
CLOSINGS = {"hermes": ["\n", "</tool_call>"], "llama3_json": [], "mistral": ["]"], "granite": ["]"]}
THOUGHT = "Rain? <tool_call>x [TOOL_CALLS]x <|python_tag|>x {"
PLAIN = [
    "It rains.", "", " \n", "{ no", "a {\"name\": \"weather\"}", "</tool_call>", "<tool_cal",
    "<think", "[ARGS]", "```json\n{}\n```", "Köln <b>",
]  # fmt: skip


def tokens_of(answer: AnswerFormat, pieces: list[str]) -> list[int]:
    ids = {name: token for token, name in answer.spelled.items()}
    return [
        token
        for piece in pieces
        for token in ([ids[piece]] if piece in ids else piece.encode())
    ]  # fmt: skip


def goes(made, tokens: list[int]) -> int:
    """How many of the tokens may come."""
    for index, token in enumerate(tokens):
        if token not in allowed(made):
            return index
        take(made, token)
    return len(tokens)


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", ["hermes", "llama3_json", "granite"])
def test_what_follows_many_calls_keeps_to_the_schema_as_what_follows_one(grammars, name):
    parameters = {"type": "object", "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    answer, choice = format_of(name, tools=tools), ToolChoice(strict=("f",))
    calls = [Call("f", {}, number) for number in range(MAX_TOOL_CALLS)]
    for arguments, may_come in (({}, True), ({"x": 1}, False)):
        text = WRITERS[name]([*calls, Call("f", arguments, MAX_TOOL_CALLS)]).encode()
        made = constraint(grammars, answer, choice, tools)
        assert (goes(made, list(text)) == len(text)) == may_come


@pytest.mark.spread(FORMATS)
@pytest.mark.parametrize(("name", "thinking", "is_start", "has_tokens"), EVERY)
def test_whatever_is_drawn_keeps_what_is_strict(grammars, name, thinking, is_start, has_tokens):
    is_valid = pytest.importorskip("jsonschema_rs").validator_for(SCHEMA).is_valid
    answer = format_of(name, thinking, is_start=is_start, has_tokens=has_tokens)
    marks = [tokens_of(answer, [m]) for m in (*answer.marks.names, *CALL_READERS[name].NAMES)]
    num_calls = 0
    for seed in range(24):
        if seed >= 8 and num_calls:
            break
        draw, said, made = random.Random(seed), bytearray(), constraint(grammars, answer, STRICT)
        while not made.is_complete and len(said) < 600:
            tokens = allowed(made)
            if EOS_TOKEN_ID in tokens and draw.random() < 0.02:
                break
            mark = draw.choice(marks)
            if draw.random() < 0.2 and mark[0] in tokens and (len(tokens) > 20 or len(mark) == 1):
                chosen = mark
            else:
                chosen = [draw.choice([t for t in tokens if t != EOS_TOKEN_ID])]
            for token in chosen:
                if token not in allowed(made):
                    break
                take(made, token)
                said += answer.spelled.get(token, "").encode() or bytes([token])
        if not (made.is_complete or EOS_TOKEN_ID in allowed(made)):
            continue  # cut off
        calls, _ = read(answer, said.decode())
        num_calls += len(calls)
        for called, arguments in calls:
            assert called in ("weather", 'the "time"')
            assert called != "weather" or is_valid(arguments)
    assert num_calls or has_tokens is False


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("has_tokens", [False, True])
@pytest.mark.parametrize("before", [[""], ["Well:\n"], [THOUGHT]])
def test_a_call_has_one_of_the_tools_and_its_arguments_or_does_not_come(
    grammars, name, has_tokens, before
):
    thinking = Thinking.MAY_BEGIN if THOUGHT in before else Thinking.IS_OVER
    answer = format_of(name, thinking, has_tokens=has_tokens)
    begin, end = answer.marks.names
    before = [begin, THOUGHT, end, "\n\n"] if THOUGHT in before else before
    said = [*before, *OPENINGS[name]]
    call = f'{{"name": "weather", "{KEYS[name]}": {{"town": "Ulm", "days": 3}}}}'
    made = constraint(grammars, answer, STRICT)
    opening = tokens_of(answer, said)
    assert goes(made, opening + list(call.encode())) == len(opening) + len(call)
    for wrong, at in (
        ('{"name": "snow"', '{"name": "'),
        (call.replace("Ulm", "Bonn"), f'{{"name": "weather", "{KEYS[name]}": {{"town": "'),
        ("Well", ""),
    ):
        made = constraint(grammars, answer, STRICT)
        assert goes(made, opening + list(wrong.encode())) == len(opening) + len(at)
    free = f'{{"name": "the \\"time\\"", "{KEYS[name]}": {{"zone": [1]}}}}'
    made = constraint(grammars, answer, STRICT)
    assert goes(made, opening + list(free.encode())) == len(opening) + len(free)


@pytest.mark.parametrize(("name", "has_tokens"), list(itertools.product(MARKED, (False, True))))
def test_text_without_calls_may_be_any(grammars, name, has_tokens):
    answer = format_of(name, Thinking.MAY_BEGIN, has_tokens=has_tokens)
    for text in PLAIN:
        if name == "llama3_json" and text.startswith("{"):
            continue  # there it is a call
        made = constraint(grammars, answer, STRICT)
        assert goes(made, list(text.encode())) == len(text.encode()), text
        assert EOS_TOKEN_ID in allowed(made), text


def test_a_message_of_llamas_that_begins_with_a_brace_is_a_call(grammars):
    made = constraint(grammars, format_of("llama3_json"), STRICT)
    assert goes(made, list(b'{"no')) == 3
    made = constraint(grammars, format_of("llama3_json", is_start=False), STRICT)
    assert goes(made, list(b'{"no')) == 4


@pytest.mark.parametrize(("name", "has_tokens"), list(itertools.product(KEYS, (False, True))))
def test_further_calls_keep_to_it_too(grammars, name, has_tokens):
    answer = format_of(name, has_tokens=has_tokens)
    call = f'{{"name": "weather", "{KEYS[name]}": {{"town": "Ulm", "days": 3}}}}'
    begun = ["Well ", *OPENINGS[name], call, *CLOSINGS[name], "and " * (name != "llama3_json")]
    made = constraint(grammars, answer, STRICT)
    tokens = tokens_of(answer, [*begun, *OPENINGS[name], '{"name": "'])
    assert goes(made, tokens) == len(tokens)
    assert sorted(map(chr, allowed(made))) == ["t", "w"]


@pytest.mark.parametrize("name", KEYS)
def test_at_most_one_call_where_they_are_not_parallel(grammars, name):
    choice = ToolChoice(strict=("weather",), is_single=True)
    answer = format_of(name, has_tokens=True)
    call = f'{{"name": "weather", "{KEYS[name]}": {{"town": "Ulm", "days": 3}}}}'
    tokens = tokens_of(answer, ["Well ", *OPENINGS[name], call, *CLOSINGS[name]])
    made = constraint(grammars, answer, choice)
    assert goes(made, tokens) == len(tokens)
    assert made.is_complete


@pytest.mark.parametrize("name", KEYS)
def test_a_mark_that_is_a_token_is_not_spelled_in_letters_which_would_be_read_as_it(grammars, name):
    answer, mark = format_of(name, has_tokens=True), OPENINGS[name][0]
    call = f'{{"name": "weather", "{KEYS[name]}": {{"town": "Ulm", "days": 3}}}}'
    for before in ([], ["Well "], ["Well ", *OPENINGS[name], call, *CLOSINGS[name], "and "]):
        made = constraint(grammars, answer, STRICT)
        tokens = tokens_of(answer, before)
        assert goes(made, [*tokens, *mark.encode()]) == len(tokens) + len(mark) - 1
        assert EOS_TOKEN_ID in allowed(made)


@pytest.mark.parametrize("choice", [STRICT, ToolChoice("required")])
def test_marks_of_reasoning_are_not_spelled_in_letters_either(grammars, choice):
    begun = format_of("hermes", Thinking.HAS_BEGUN, has_tokens=True)
    made = constraint(grammars, begun, choice)
    said = b"Rain? <think> </think>"
    assert goes(made, list(said)) == len(said) - 1
    may_begin = format_of("hermes", Thinking.MAY_BEGIN, has_tokens=True)
    made = constraint(grammars, may_begin, STRICT)
    assert goes(made, list(b" <think>")) == len(b" <think")


@pytest.mark.parametrize("has_tokens", [False, True])
def test_what_goes_on_behind_a_call_of_llamas_is_a_call_that_keeps_to_it(grammars, has_tokens):
    answer = format_of("llama3_json", has_tokens=has_tokens)
    call = '{"name": "weather", "parameters": {"town": "Ulm", "days": 3}}'
    for before in (["Well ", "<|python_tag|>"], ["<|python_tag|>"], []):
        known = tokens_of(answer, [*before, call, "; ", '{"name": "'])
        made = constraint(grammars, answer, STRICT)
        assert goes(made, [*known, *b"snow"]) == len(known)
        made = constraint(grammars, answer, STRICT)
        assert goes(made, [*known, *b"weather"]) == len(known) + len("weather")
    known = tokens_of(answer, ["Well ", "<|python_tag|>", call])
    for space, at in ((";{", 1), (" ; \n{", 4)):  # as its reader reads them, and no template writes
        made = constraint(grammars, answer, STRICT)
        assert goes(made, [*known, *space.encode()]) == len(known) + at
    made = constraint(grammars, answer, STRICT)
    assert goes(made, [*known, *b"; so {"]) == len(known) + 6


def test_of_tools_that_are_not_allowed_none_is_called(grammars):
    made = constraint(grammars, format_of("hermes"), ToolChoice("auto", ("weather",)))
    said = b'<tool_call>\n{"name": "'
    assert goes(made, list(said)) == len(said)
    assert allowed(made) == [ord("w")]


def test_an_answer_of_another_form_stays_it_and_who_cannot_be_read_is_refused():
    params = GenerationParams(structured_outputs=StructuredOutputs(regex="a"))
    assert with_calls(params, STRICT, TOOLS, format_of("hermes")) is params
    with pytest.raises(ValidationError, match=r"strict must be false .* --tool-call-parser") as e:
        with_calls(GenerationParams(), STRICT, TOOLS, None)
    assert e.value.field == "strict"
    with pytest.raises(ValidationError, match="strict must be unset with beam_width"):
        with_calls(GenerationParams(beam_width=2), STRICT, TOOLS, format_of("hermes")).validate()


@pytest.mark.parametrize("name", ["hermes", "glm45"])
@pytest.mark.parametrize("has_tokens", [False, True])
@pytest.mark.parametrize("choice", [STRICT, ToolChoice("required")])
def test_space_may_stand_before_reasoning_and_what_follows_is_as_ever(
    grammars, name, has_tokens, choice
):
    answer = format_of(name, Thinking.MAY_BEGIN, has_tokens=has_tokens)
    begin, end = answer.marks.names
    tokens = tokens_of(answer, ["\n", begin, "Rain?", end, "\n", "<tool_call>"])
    made = constraint(grammars, answer, choice)
    assert goes(made, tokens) == len(tokens)
    assert EOS_TOKEN_ID not in allowed(made)
