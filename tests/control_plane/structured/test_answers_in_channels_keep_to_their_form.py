"""What gpt-oss may say where its answer calls tools, or may: channels, and arguments by schema."""

from __future__ import annotations

import json

import pytest

from control_plane.text.answers.harmony_reader import HarmonyReader
from control_plane.text.answers.parser import AnswerFormat, Thinking
from control_plane.text.answers.tool_choice import ToolChoice
from control_plane.text.simple_tokenizer import EOS_TOKEN_ID
from planes.errors import ValidationError
from tests.control_plane.structured.test_answers_are_calls_where_they_must_be import (
    MARKS,
    SCHEMA,
    WEATHER,
    allowed,
    drawn,
    grammars,
    read,
    take,
)
from tests.control_plane.structured.test_answers_are_calls_where_they_must_be import (
    constraint as constraint_of,
)
from tests.control_plane.structured.test_calls_that_may_be_keep_to_their_schema import goes

__all__ = ["grammars"]

IDS = dict(zip(HarmonyReader.NAMES, MARKS, strict=False))
START, CHANNEL, CONSTRAIN, MESSAGE, END, _, _ = IDS.values()
ARGUMENTS = '{"town": "Ulm", "days": 3}'
TO_WEATHER = [CHANNEL, "commentary to=functions.weather ", CONSTRAIN, "json", MESSAGE]
NEXT = [END, START, "assistant"]
THOUGHT = [CHANNEL, "analysis", MESSAGE, "Hm, hm.", *NEXT]
REQUIRED, STRICT = ToolChoice("required"), ToolChoice(strict=("weather",))

TIME = {"type": "function", "function": {"name": "time"}}


def constraint(grammars, form: AnswerFormat, choice: ToolChoice, tools=(WEATHER, TIME)):
    return constraint_of(grammars, form, choice, tools)


def answer(thinking=Thinking.MAY_BEGIN, *, has_tokens=True, is_start=True) -> AnswerFormat:
    spelled = {token: name for name, token in IDS.items()} if has_tokens else {}
    return AnswerFormat(thinking, HarmonyReader, is_start=is_start, spelled=spelled)


def tokens_of(pieces: list[int | str]) -> list[int]:
    return [t for piece in pieces for t in ([piece] if isinstance(piece, int) else piece.encode())]


@pytest.mark.parametrize("thoughts", [0, 1, 2])
@pytest.mark.parametrize("choice", [REQUIRED, STRICT], ids=["required", "strict"])
def test_a_call_is_written_as_the_model_writes_it_behind_any_reasoning(
    grammars, thoughts: int, choice: ToolChoice
) -> None:
    made = constraint(grammars, answer(), choice)
    tokens = tokens_of([*THOUGHT * thoughts, *TO_WEATHER, ARGUMENTS])
    assert goes(made, tokens) == len(tokens)
    assert made.is_complete or allowed(made) == [EOS_TOKEN_ID]


def test_a_call_that_must_be_has_no_text_before_it_but_reasoning(grammars) -> None:
    made = constraint(grammars, answer(), REQUIRED)
    assert goes(made, tokens_of([CHANNEL, "final"])) == 1
    made = constraint(grammars, answer(), REQUIRED)
    assert goes(made, tokens_of([CHANNEL, "commentary", MESSAGE])) == 11
    made = constraint(grammars, answer(Thinking.IS_OVER), REQUIRED)
    assert goes(made, tokens_of([CHANNEL, "a"])) == 1


@pytest.mark.parametrize("choice", [REQUIRED, STRICT], ids=["required", "strict"])
def test_arguments_keep_to_their_schema(grammars, choice: ToolChoice) -> None:
    for right, wrong in (('{"town": "', "Rom"), ('{"town": "Ulm", "days": 1', "5")):
        made = constraint(grammars, answer(), choice)
        tokens = tokens_of([*TO_WEATHER, right])
        assert goes(made, [*tokens, *wrong.encode()]) == len(tokens)


def test_where_calls_may_be_an_answer_may_be_any_text_or_have_some_before_its_call(
    grammars,
) -> None:
    for pieces in (
        [CHANNEL, "final", MESSAGE, "Any {text} <tool_call> at all."],
        [*THOUGHT, CHANNEL, "final", MESSAGE],
        [*THOUGHT, CHANNEL, "commentary", MESSAGE, "I look.", *NEXT, *TO_WEATHER, ARGUMENTS],
    ):
        made = constraint(grammars, answer(), STRICT)
        tokens = tokens_of(pieces)
        assert goes(made, tokens) == len(tokens), pieces
        assert made.is_complete or EOS_TOKEN_ID in allowed(made)


@pytest.mark.parametrize("channel", ["final", "analysis"])
def test_a_text_may_spell_marks_that_are_tokens(grammars, channel: str) -> None:
    made = constraint(grammars, answer(), STRICT)
    tokens = tokens_of([CHANNEL, channel, MESSAGE, "Hm <|end|> <|start|>assistant"])
    assert goes(made, tokens) == len(tokens)


def test_marks_that_are_no_tokens_are_not_spelled_in_a_text(grammars) -> None:
    made = constraint(grammars, answer(has_tokens=False), STRICT)
    tokens = tokens_of(["<|channel|>final<|message|>Hm <|end|>"])
    assert goes(made, tokens) == len(tokens) - 1


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("thinking", [Thinking.MAY_BEGIN, Thinking.IS_OVER])
def test_whatever_is_drawn_is_one_call_that_is_read_as_its_schema_allows(
    grammars, thinking: Thinking, has_tokens: bool
) -> None:
    is_valid = pytest.importorskip("jsonschema_rs").validator_for(SCHEMA).is_valid
    form = answer(thinking, has_tokens=has_tokens)
    for seed in range(6):
        made = constraint(grammars, form, REQUIRED)
        take_opening(made, has_tokens=has_tokens)
        text = "".join(opening_text()) + drawn(made, form, seed)
        ((name, arguments),), content = read(form, text)
        assert (name, content) == ("weather", "")
        assert is_valid(arguments), json.dumps(arguments)


def opening_text() -> list[str]:
    names = {token: name for name, token in IDS.items()}
    return [names[piece] if isinstance(piece, int) else piece for piece in TO_WEATHER]


def take_opening(made, *, has_tokens: bool) -> None:
    pieces = TO_WEATHER if has_tokens else opening_text()
    for token in tokens_of(pieces):
        assert token in allowed(made)
        take(made, token)


def test_a_message_that_is_gone_on_with_may_end_in_a_call(grammars) -> None:
    for choice in (REQUIRED, STRICT):
        made = constraint(grammars, answer(is_start=False), choice)
        tokens = tokens_of(["so on.", *NEXT, *TO_WEATHER, ARGUMENTS])
        assert goes(made, tokens) == len(tokens)


@pytest.mark.parametrize("name", ["the time", "a<b"])
def test_a_name_that_no_header_holds_is_refused(grammars, name: str) -> None:
    tools = [WEATHER, {"type": "function", "function": {"name": name}}]
    with pytest.raises(ValidationError, match="in this format names have no space") as caught:
        constraint(grammars, answer(), REQUIRED, tools)
    assert caught.value.field == "tools[1].function.name"
    made = constraint(grammars, answer(), REQUIRED, [WEATHER])
    before = tokens_of([CHANNEL, "commentary to=functions."])
    assert goes(made, before) == len(before)
    assert allowed(made) == [ord("w")]
