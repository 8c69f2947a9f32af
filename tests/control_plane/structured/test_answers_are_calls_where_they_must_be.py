"""What a sample may say where it must call tools, in every format, and that its reader reads it."""

from __future__ import annotations

import itertools
import json
import random

import pytest

from control_plane.core.generation_params import GenerationParams
from control_plane.core.request import Request
from control_plane.core.structured_outputs import StructuredOutputs
from control_plane.structured import grammars as grammars_module
from control_plane.structured.grammars import Grammars
from control_plane.text.answers.formats import CALL_READERS, THOUGHT_MARKS
from control_plane.text.answers.parameter_kinds import parameters_of_tools
from control_plane.text.answers.parser import AnswerFormat, Thinking
from control_plane.text.answers.tool_choice import ToolChoice, with_calls
from control_plane.text.answers.written_calls import WRITERS, Call
from control_plane.text.bounds import MAX_TOOL_CALLS
from control_plane.text.simple_tokenizer import EOS_TOKEN_ID, SimpleTokenizer
from planes.errors import ValidationError

MARKED = [name for name in CALL_READERS if name != "harmony"]
"""Formats whose calls stand behind marks; of the other one: test_answers_in_channels."""
VOCAB_SIZE = 300
MARKS = range(260, 300)
"""Ids that the tokenizer does not have: they stand for special tokens."""

SCHEMA = {
    "type": "object",
    "properties": {"town": {"enum": ["Köln", "Ulm"]}, "days": {"$ref": "#/$defs/days"}},
    "required": ["town", "days"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 14}},
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
NOW = {"type": "function", "function": {"name": 'the "time"'}}
TOOLS = [WEATHER, NOW]


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(SimpleTokenizer(), vocab_size=VOCAB_SIZE, eos_token_ids=(EOS_TOKEN_ID,))


def format_of(
    name: str, thinking=Thinking.IS_OVER, *, is_start=True, has_tokens=False, tools=TOOLS
):
    thought_marks = THOUGHT_MARKS[name if name in ("mistral", "gemma4") else "think"]
    marks = (*thought_marks.names, *CALL_READERS[name].NAMES)
    spelled = dict(zip(MARKS, marks, strict=False)) if has_tokens else {}
    return AnswerFormat(
        thinking,
        CALL_READERS[name],
        is_start=is_start,
        spelled=spelled,
        parameters=parameters_of_tools(tools),
        marks=thought_marks,
    )


def asked(answer: AnswerFormat, choice: ToolChoice, tools=TOOLS, **params) -> Request:
    return Request(
        id=1,
        input_tokens=[1],
        params=with_calls(GenerationParams(**params), choice, tools, answer),
        eos_token_ids=frozenset({EOS_TOKEN_ID}),
        output_tokens=[],
    )


def constraint(grammars, answer, choice, tools=TOOLS):
    (made,) = grammars.constrain(asked(answer, choice, tools)).result(timeout=60)
    return made


def allowed(made) -> list[int]:
    mask = made.allowed_tokens
    return [token for token in range(VOCAB_SIZE) if mask[token // 8] >> token % 8 & 1]


def take(made, token: int) -> None:
    made.constrainer.advance([(made, [token])])
    assert made.error is None


def drawn(made, answer: AnswerFormat, seed: int) -> str:
    """A text of random tokens among those that may come; thoughts do not become long."""
    draw, said = random.Random(seed), bytearray()
    begin, end = answer.marks.opening.encode(), answer.marks.end.encode()
    ends_of_thought = [token for token, name in answer.spelled.items() if name.encode() == end]
    is_thinking = answer.thinking is Thinking.HAS_BEGUN
    while not made.is_complete:
        tokens = allowed(made)
        assert tokens
        if EOS_TOKEN_ID in tokens and draw.random() < 0.3:
            break
        is_thinking = is_thinking or said.endswith(begin)
        if is_thinking and draw.random() < 0.1 and end[0] in tokens:
            chosen = ends_of_thought or list(end)
            is_thinking = False
        else:
            chosen = [draw.choice([token for token in tokens if token != EOS_TOKEN_ID])]
            is_thinking = is_thinking and chosen != ends_of_thought
        for token in chosen:
            take(made, token)
            said += answer.spelled[token].encode() if token in answer.spelled else bytes([token])
    return said.decode()


def read(answer: AnswerFormat, text: str) -> tuple[list[tuple[str, dict]], str]:
    """The calls of an answer and its content."""
    parser, calls, content = answer.parser(), {}, ""
    for parts in (parser.push(text), parser.finish()):
        content += parts.content
        for call in parts.calls:
            calls.setdefault(call.number, [call.name, ""])[1] += call.arguments
    return [(name, json.loads(arguments)) for name, arguments in calls.values()], content


EVERY = [
    pytest.param(*one, marks=() if index % 4 == index // 4 % 4 else pytest.mark.slow)
    for index, one in enumerate(itertools.product(MARKED, Thinking, (True, False), (True, False)))
]
"""What is not slow has each format with each way to think, and of the rest each pair with most."""
EVERY.sort(key=lambda case: list(Thinking).index(case.values[1]))  # type: ignore[arg-type]
FORMATS = len(MARKED)
"""The first so many that are not slow are one of each format."""


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", ["hermes", "mistral", "lfm2", "gemma4", "minimax_m2", "kimi_k2"])
def test_an_answer_has_no_more_calls_than_a_message_may_be_handed_back_with(grammars, name):
    tools = [{"type": "function", "function": {"name": "f"}}]
    answer = format_of(name, tools=tools)
    calls = [Call("f", {}, number) for number in range(MAX_TOOL_CALLS + 1)]
    for count, may_come in ((MAX_TOOL_CALLS, True), (MAX_TOOL_CALLS + 1, False)):
        made = constraint(grammars, answer, ToolChoice("required"), tools)
        text = WRITERS[name](calls[:count]).encode()
        taken = 0
        for token in text:
            if token not in allowed(made):
                break
            take(made, token)
            taken += 1
        assert (taken == len(text)) == may_come


@pytest.mark.spread(FORMATS)
@pytest.mark.parametrize(("name", "thinking", "is_start", "has_tokens"), EVERY)
def test_whatever_is_drawn_is_calls_and_nothing_else(
    grammars, name, thinking, is_start, has_tokens
):
    is_valid = pytest.importorskip("jsonschema_rs").validator_for(SCHEMA).is_valid
    answer = format_of(name, thinking, is_start=is_start, has_tokens=has_tokens)
    counts = set()
    for seed in range(12):
        choice = ToolChoice("required", is_single=seed % 3 == 0)
        text = drawn(constraint(grammars, answer, choice), answer, seed)
        calls, content = read(answer, text)
        assert calls, text
        assert content == "", text
        for called, arguments in calls:
            assert (called, is_valid(arguments)) == ("weather", True) or (
                (called, arguments) == ('the "time"', {})
            )
        counts.add(len(calls))
        assert len(calls) == 1 or not choice.is_single
    assert len(counts) > 1  # more than one call where there may be more


def test_calls_are_written_as_models_write_them(grammars):
    """The texts that chat templates show; byte by byte each may come, and then the end."""
    body = '{"town": "Ulm", "days": 3}'
    listed = f'{{"name": "weather", "arguments": {body}}}'
    for name, has_tokens, pieces in (
        ("hermes", False, [f"<tool_call>\n{listed}\n</tool_call>"]),
        ("hermes", False, [f"<tool_call>\n{listed}\n</tool_call>"] * 2),
        ("hermes", True, [262, f"\n{listed}\n", 263]),
        ("llama3_json", False, [f'{{"name": "weather", "parameters": {body}}}']),
        ("llama3_json", True, [262, f'{{"name": "weather", "parameters": {body}}}']),
        ("mistral", False, [f"[TOOL_CALLS] [{listed}, {listed}]"]),
        ("mistral", True, [262, f"[{listed}]"]),
        ("mistral", True, [262, "weather", 263, body, 262, "weather", 263, body]),
        ("mistral", True, [262, "weather", 264, "aB3dEf9hI", 263, body, 262, "weather", 263, body]),
    ):
        made = constraint(grammars, format_of(name, has_tokens=has_tokens), ToolChoice("required"))
        separator = "\n" if len(pieces) > 1 and isinstance(pieces[0], str) else ""
        for index, piece in enumerate(pieces):
            text = separator + piece if index and isinstance(piece, str) else piece
            for token in [text] if isinstance(text, int) else text.encode():
                assert token in allowed(made), (name, pieces, text)
                take(made, token)
        assert made.is_complete or EOS_TOKEN_ID in allowed(made)


def test_an_id_of_mistrals_is_nine_letters_and_digits_behind_its_mark(grammars):
    answer = format_of("mistral", has_tokens=True)
    for said, may_follow in (
        ("", set()),
        ("aB3dEf9h", set(b"azAZ09")),
        ("aB3dEf9hI", {263}),
    ):
        made = constraint(grammars, answer, ToolChoice("required"))
        for token in (262, *b"weather", 264, *said.encode()):
            assert token in allowed(made)
            take(made, token)
        assert may_follow <= set(allowed(made))
        assert set(allowed(made)).isdisjoint({264, 262, ord("-")})
        assert (263 in allowed(made)) == (len(said) == 9)
    calls = read(answer, "[TOOL_CALLS]weather[CALL_ID]aB3dEf9hI[ARGS]{}")
    assert calls == ([("weather", {})], "")


def test_a_mark_that_is_a_token_is_that_token_alone(grammars):
    """Neither another special token nor the letters of its name."""
    made = constraint(grammars, format_of("hermes", has_tokens=True), ToolChoice("required"))
    assert allowed(made) == [262]
    thinking = format_of("hermes", Thinking.HAS_BEGUN, has_tokens=True)
    made = constraint(grammars, thinking, ToolChoice("required"))
    assert [token for token in allowed(made) if token >= EOS_TOKEN_ID] == [261]


def test_nobody_thinks_where_no_reasoning_is_read(grammars):
    made = constraint(grammars, format_of("hermes"), ToolChoice("required"))
    take(made, ord("<"))
    assert allowed(made) == [ord("t")]
    take(made, ord("t"))
    assert allowed(made) == [ord("o")]


def test_a_named_tool_is_called_once_and_no_other(grammars):
    answer = format_of("hermes")
    choice = ToolChoice("required", ('the "time"',), is_single=True)
    text = drawn(constraint(grammars, answer, choice), answer, 1)
    assert read(answer, text) == ([('the "time"', {})], "")


@pytest.mark.parametrize(
    ("parameters", "arguments", "may_be"),
    [
        (None, "{}", True),
        (None, '{"', False),
        ({}, '{"a": [1]}', True),
        ({}, "5", False),
        ({"type": ["null", "object"]}, '{"a": null}', True),
        ({"type": ["null", "object"]}, "n", False),
        ({"anyOf": [{"type": "integer"}, {"required": ["b"]}]}, '{"b": 1}', True),
        ({"anyOf": [{"type": "integer"}, {"required": ["b"]}]}, "5", False),
    ],
)
def test_arguments_are_objects_and_of_tools_without_parameters_empty(
    grammars, parameters, arguments, may_be
):
    function = {"name": "f"} if parameters is None else {"name": "f", "parameters": parameters}
    answer = format_of("hermes")
    made = constraint(grammars, answer, ToolChoice("required"), [{"function": function}])
    said = f'<tool_call>\n{{"name": "f", "arguments": {arguments}'
    *known, last = said.encode()
    for token in known:
        take(made, token)
    assert (last in allowed(made)) is may_be


def tool(**function) -> dict:
    return {"type": "function", "function": {"name": "f", **function}}


PARAMETERS = "tools[1].function.parameters"


@pytest.mark.parametrize(
    ("wrong", "field", "message"),
    [
        (
            tool(parameters={"not": {}}),
            PARAMETERS,
            'is not supported: answers cannot keep to "not"',
        ),
        (
            tool(parameters={"$ref": "#/x"}),
            PARAMETERS,
            "is not supported: it refers to '/x', which does",
        ),
        (tool(parameters={"pattern": "(?=a)", "type": "array"}), PARAMETERS, "must be of objects"),
        (
            tool(parameters={"properties": {"a": {"type": "string", "pattern": "a" * 4097}}}),
            PARAMETERS,
            "its patterns must have at most 4096 characters, they have 4097",
        ),
        (
            tool(parameters={"title": "a" * 65_536}),
            PARAMETERS,
            "at most 65536 characters for tool_choice",
        ),
        (tool(name='"' * 40), "tools[1]", "must have a name of at most 64 characters as JSON"),
    ],
)
def test_a_tool_that_cannot_be_called_is_named(grammars, wrong, field, message):
    def submit() -> None:
        request = asked(format_of("hermes"), ToolChoice("required"), [NOW, wrong, NOW])
        request.params.validate()
        grammars.constrain(request).result(timeout=60)

    with pytest.raises(ValidationError) as caught:
        submit()
    assert caught.value.field == field
    assert message in caught.value.message


def test_tools_that_take_long_to_compile_are_too_much_together(grammars, monkeypatch):
    """Alternatives that multiply, in each as far as the library lets them: 7 s, on some machine."""
    monkeypatch.setattr(grammars_module, "MAX_TOOLS_CPU_S", 0.25)
    ways = [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(6)]} for i in range(3)]
    costly = [tool(name=f"f{i}", parameters={"allOf": ways}) for i in range(128)]
    request = asked(format_of("hermes"), ToolChoice("required"), costly)
    with pytest.raises(ValidationError, match=r"tools must not take more than 0\.25 s to"):
        grammars.constrain(request).result(timeout=60)


def test_tools_of_a_form_asked_for_lately_are_not_checked_again(monkeypatch):
    checked = []
    monkeypatch.setattr(grammars_module, "MAX_CACHED", 2)
    monkeypatch.setattr(
        grammars_module, "_check_tools", lambda calls, _: checked.append(calls.tools[0].name)
    )
    grammars = Grammars(SimpleTokenizer(), vocab_size=VOCAB_SIZE, eos_token_ids=(EOS_TOKEN_ID,))
    for name in "abacab":
        constraint(grammars, format_of("hermes"), ToolChoice("required"), [tool(name=name)])
    assert checked == ["a", "b", "c", "b"]


def test_what_cannot_be_is_refused_by_name():
    answer, required = format_of("hermes"), ToolChoice("required")
    for choice, tools, read_as, params, field, message in (
        (required, [], answer, {}, "tool_choice", "must be auto or none where there are no tools"),
        (ToolChoice("required", ("tides",)), TOOLS, answer, {}, "tool_choice", "names 'tides'"),
        (required, TOOLS, None, {}, "tool_choice", "--tool-call-parser"),
        (required, TOOLS, AnswerFormat(Thinking.MAY_BEGIN), {}, "tool_choice", "is not known"),
        (
            required, TOOLS, answer,
            {"structured_outputs": StructuredOutputs(regex="a", name="response_format")},
            "response_format", "must be unset with a tool_choice",
        ),
        (required, TOOLS, answer, {"beam_width": 2}, "tool_choice", "unset with beam_width"),
    ):  # fmt: skip
        with pytest.raises(ValidationError, match=message) as caught:
            with_calls(GenerationParams(**params), choice, tools, read_as).validate()
        assert caught.value.field == field


def test_a_schema_that_is_nested_too_deep_to_spell_is_refused():
    deep: dict = {}
    for _ in range(5000):
        deep = {"not": deep}
    with pytest.raises(ValidationError, match="is nested too deep") as caught:
        asked(format_of("hermes"), ToolChoice("required"), [NOW, tool(parameters=deep)])
    assert caught.value.field == PARAMETERS


def test_where_the_model_decides_nothing_is_constrained():
    params = GenerationParams()
    for mode in ("auto", "none"):
        assert with_calls(params, ToolChoice(mode), TOOLS, None) is params
