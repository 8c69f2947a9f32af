"""What a sample may say in DeepSeek's and Kimi's formats, where it must call and where it may."""

from __future__ import annotations

import itertools

import pytest

from control_plane.text.answers.section_readers import (
    DeepSeekV3Reader,
    KimiReader,
)
from control_plane.text.answers.tool_choice import ToolChoice
from control_plane.text.simple_tokenizer import EOS_TOKEN_ID
from planes.errors import ValidationError
from tests.control_plane.structured.test_answers_are_calls_where_they_must_be import (
    allowed,
    constraint,
    format_of,
    grammars,
    read,
)
from tests.control_plane.structured.test_calls_that_may_be_keep_to_their_schema import (
    goes,
    tokens_of,
)

__all__ = ["grammars"]

BODY = '{"town": "Ulm", "days": 3}'
OPEN, CLOSE, BEGIN, END, SEP = DeepSeekV3Reader.NAMES
K_OPEN, K_CLOSE, K_BEGIN, K_END, K_ARGUMENTS = KimiReader.NAMES
OPENS = {"deepseek_v3": OPEN, "deepseek_v31": OPEN, "kimi_k2": K_OPEN}
CALLS = {
    "deepseek_v3": [BEGIN, "function", SEP, "weather\n```json\n", BODY, "\n```", END],
    "deepseek_v31": [BEGIN, "weather", SEP, BODY, END],
    "kimi_k2": [K_BEGIN, "functions.weather:0", K_ARGUMENTS, BODY, K_END],
}
BETWEEN = {"deepseek_v3": ["\n"], "deepseek_v31": [], "kimi_k2": []}
CLOSES = {"deepseek_v3": CLOSE, "deepseek_v31": CLOSE, "kimi_k2": K_CLOSE}
EVERY = list(itertools.product(CALLS, (False, True)))
CHOICES = [ToolChoice("required"), ToolChoice(strict=("weather",))]


@pytest.mark.parametrize(("name", "has_tokens"), EVERY)
@pytest.mark.parametrize("choice", CHOICES)
def test_calls_are_written_as_templates_write_them(grammars, choice, name, has_tokens):
    answer = format_of(name, has_tokens=has_tokens)
    said = [OPENS[name], *CALLS[name], *BETWEEN[name], *CALLS[name], CLOSES[name]]
    tokens = tokens_of(answer, said)
    made = constraint(grammars, answer, choice)
    assert goes(made, tokens) == len(tokens)
    assert made.is_complete or EOS_TOKEN_ID in allowed(made)
    weather = ("weather", {"town": "Ulm", "days": 3})
    assert read(answer, "".join(said)) == ([weather, weather], "")


@pytest.mark.parametrize(("name", "has_tokens"), EVERY)
@pytest.mark.parametrize("choice", CHOICES)
def test_a_call_has_a_tool_that_there_is_and_arguments_of_its_schema(
    grammars, choice, name, has_tokens
):
    answer = format_of(name, has_tokens=has_tokens)
    for right, wrong in (("weather", "snow"), ("Ulm", "Bonn"), ("3", "15"), ("{", "[")):
        index = next(i for i, piece in enumerate(CALLS[name]) if right in piece)
        before, behind = CALLS[name][index].split(right, 1)
        known = tokens_of(answer, [OPENS[name], *CALLS[name][:index], before])
        for word, may_be in ((right + behind, True), (wrong + behind, False)):
            made = constraint(grammars, answer, choice)
            tokens = [*known, *word.encode()]
            assert (goes(made, tokens) == len(tokens)) is may_be


@pytest.mark.parametrize("name", CALLS)
def test_a_section_has_one_call_where_they_are_not_parallel(grammars, name):
    answer = format_of(name, has_tokens=True)
    for choice in (
        ToolChoice("required", is_single=True),
        ToolChoice(strict=("weather",), is_single=True),
    ):
        tokens = tokens_of(answer, [OPENS[name], *CALLS[name], CLOSES[name]])
        made = constraint(grammars, answer, choice)
        assert goes(made, tokens) == len(tokens)
        assert made.is_complete


@pytest.mark.parametrize(("name", "has_tokens"), EVERY)
def test_what_opens_a_section_is_followed_by_a_call(grammars, name, has_tokens):
    answer = format_of(name, has_tokens=has_tokens)
    opening = tokens_of(answer, ["Well ", OPENS[name]])
    made = constraint(grammars, answer, CHOICES[1])
    assert goes(made, opening) == len(opening)
    (begin,) = allowed(made)
    assert begin == tokens_of(answer, CALLS[name][:1])[0]


def test_kimis_calls_have_any_number(grammars):
    answer = format_of("kimi_k2", has_tokens=True)
    for number, may_be in (("12", True), ("9999", True), ("", False), ("12345", False)):
        said = [K_OPEN, K_BEGIN, f"functions.weather:{number}", K_ARGUMENTS]
        made, tokens = constraint(grammars, answer, CHOICES[0]), tokens_of(answer, said)
        assert (goes(made, tokens) == len(tokens)) is may_be


@pytest.mark.parametrize("name", CALLS)
def test_a_name_that_no_header_can_have_is_refused(grammars, name):
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "a`b")]
    with pytest.raises(ValidationError, match="in this format names have no") as caught:
        constraint(grammars, format_of(name, tools=tools), CHOICES[0], tools)
    assert caught.value.field == "tools[1].function.name"
