"""Calls as LFM2 and OLMo 3 write them, in Python: parameters in their order, values as JSON."""

from __future__ import annotations

import itertools

import pytest

from control_plane.text.answers.formats import CALL_READERS
from control_plane.text.answers.tool_choice import ToolChoice
from planes.errors import ValidationError
from tests.control_plane.structured.test_answers_are_calls_where_they_must_be import (
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

NAMES = ("lfm2", "olmo3")
BESIDE = {"lfm2": ("[", ", ", "]"), "olmo3": ("", "\n", "\n")}
KINDS = {
    "city": {"type": "string", "minLength": 2},
    "wet": {"type": "boolean"},
    "days": {"type": "integer", "maximum": 7},
    "tags": {"type": "array", "items": {"enum": ["a", None]}},
}


def tool(required: tuple[str, ...] = (), properties=KINDS, name: str = "f") -> dict[str, object]:
    parameters = {"properties": properties, "required": [*required], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def how_far(
    grammars, name, calls, tools, choice="required", *, has_tokens=False
) -> tuple[int, int]:
    """How many tokens of calls may come, and of how many."""
    answer = format_of(name, has_tokens=has_tokens, tools=tools)
    opening, between, ending = BESIDE[name]
    mark, closing = CALL_READERS[name].NAMES
    said = [mark, opening, between.join(calls), ending, closing]
    tokens = tokens_of(answer, [piece for piece in said if piece])
    made = constraint(grammars, answer, ToolChoice(choice), tools)
    return goes(made, tokens), len(tokens)


@pytest.mark.parametrize("has_tokens", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_calls_of_several_tools_may_come_and_are_read(grammars, name, has_tokens):
    tools = [tool(("city",)), tool(name="my g")]
    wet = "True" if name == "lfm2" else "true"
    calls = [f'f(city="It\'s \\"Ulm\\"", wet={wet}, tags=["a", null])', "my g()", "my g(days=3)"]
    taken, of = how_far(grammars, name, calls, tools, has_tokens=has_tokens)
    assert taken == of
    opening, between, ending = BESIDE[name]
    mark, closing = CALL_READERS[name].NAMES
    said = f"{mark}{opening}{between.join(calls)}{ending}{closing}"
    first = {"city": 'It\'s "Ulm"', "wet": True, "tags": ["a", None]}
    answer = format_of(name, tools=tools)
    assert read(answer, said) == ([("f", first), ("my g", {}), ("my g", {"days": 3})], "")


VALUES = {"city": '"Ulm"', "wet": "False", "days": "3", "tags": "[]"}


@pytest.mark.parametrize("required", [(), ("city",), ("wet", "tags"), ("days",), tuple(KINDS)])
def test_parameters_that_may_miss_may_each_miss_and_commas_are_between_others(grammars, required):
    for given in itertools.product((False, True), repeat=len(KINDS)):
        names = [name for name, is_given in zip(KINDS, given, strict=True) if is_given]
        spelled = ", ".join(f"{name}={VALUES[name]}" for name in names)
        taken, of = how_far(grammars, "lfm2", [f"f({spelled})"], [tool(required)])
        assert (taken == of) == set(required).issubset(names), (required, names)


@pytest.mark.parametrize(
    ("call", "as_far_as"),
    [
        ('f(city="U")', 'f(city="U'),  # too short
        ("f(city='Ulm')", "f(city="),  # JSON, as the mask has it
        ("f(wet=1)", "f(wet="),
        ("f(wet=null)", "f(wet="),
        ("f(days=8)", "f(days="),
        ('f(tags=["b"])', 'f(tags=["'),
        ('f(days=3, city="Ulm")', "f(days=3, "),  # the order is that of the schema
        ("f(days=3,)", "f(days=3,"),
        ("f(more=1)", "f("),
        ("h()", ""),
    ],
)
def test_what_the_schema_does_not_allow_cannot_come(grammars, call, as_far_as):
    taken, _ = how_far(grammars, "lfm2", [call], [tool()])
    assert taken == len("<|tool_call_start|>[") + len(as_far_as)


def test_where_any_parameter_may_come_values_may_be_any(grammars):
    tools = [{"function": {"name": "f", "parameters": {"type": "object"}}}]
    for call in ("f()", 'f(a="x")', 'f(a_1={"b": [true]}, c=null, d=-1.5)'):
        taken, of = how_far(grammars, "lfm2", [call], tools)
        assert taken == of, call
    taken, of = how_far(grammars, "lfm2", ["f(1)"], tools)
    assert taken < of


def test_references_of_values_lead_into_the_whole_schema(grammars):
    schema = {
        "properties": {"at": {"$ref": "#/$defs/place"}, "any": True},
        "required": ["at"],
        "$defs": {
            "place": {"type": "object", "properties": {"x": {"const": 4}}, "required": ["x"]}
        },
    }
    tools = [{"function": {"name": "f", "parameters": schema}}]
    taken, of = how_far(grammars, "olmo3", ['f(at={"x": 4}, any=["y"])'], tools)
    assert taken == of
    taken, of = how_far(grammars, "olmo3", ['f(at={"x": 5})'], tools)
    assert taken < of


def test_a_value_that_nothing_can_be_is_refused_and_not_met_in_the_middle_of_a_call(grammars):
    schema = {
        "properties": {"p": {"$ref": "#/$defs/b"}, "q": {"type": "integer"}},
        "$defs": {"b": {"$ref": "#/$defs/b"}},
    }
    tools = [{"function": {"name": "f", "parameters": schema}}]
    with pytest.raises(ValidationError) as caught:
        constraint(grammars, format_of("lfm2", tools=tools), ToolChoice("required"), tools)
    assert caught.value.field == "tools[0].function.parameters"


@pytest.mark.parametrize("name", ["a b", "a=b", "a,b", 'a"b', "a(b", "a]b", ""])
def test_parameters_whose_names_would_be_read_otherwise_are_refused(grammars, name):
    tools = [tool(properties={name: {}})]
    with pytest.raises(ValidationError, match="names of parameters have no") as caught:
        constraint(grammars, format_of("lfm2", tools=tools), ToolChoice("required"), tools)
    assert caught.value.field == "tools[0].function.parameters"


@pytest.mark.parametrize("name", [" f", "f ", "f(", "f,g", "f=", "<f>", "f\ng", "[f]"])
def test_functions_whose_names_would_be_read_otherwise_are_refused(grammars, name):
    tools = [tool(name=name)]
    with pytest.raises(ValidationError, match="in this format names have no") as caught:
        constraint(grammars, format_of("lfm2", tools=tools), ToolChoice("required"), tools)
    assert caught.value.field == "tools[0].function.name"
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize("has_tokens", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_text_may_come_around_calls_that_are_strict(grammars, name, has_tokens):
    tools = [tool(("days",))]
    answer = format_of(name, has_tokens=has_tokens, tools=tools)
    opening, _, ending = BESIDE[name]
    mark, closing = CALL_READERS[name].NAMES
    call = [mark, opening, "f(days=3)", ending, closing]
    said = ["Well: [f()] ", *call, " and", *call, "."]
    tokens = tokens_of(answer, [piece for piece in said if piece])
    choice = ToolChoice(strict=("f",))
    assert goes(constraint(grammars, answer, choice, tools), tokens) == len(tokens)
    calls, content = read(answer, "".join(said))
    assert calls == [("f", {"days": 3})] * 2
    assert content == "Well: [f()] and."
    wrong = tokens_of(answer, [piece for piece in [mark, opening, "f(days=8)"] if piece])
    assert goes(constraint(grammars, answer, choice, tools), wrong) == len(wrong) - 2


def test_of_many_tools_and_parameters_the_grammar_is_made_in_time(grammars):
    properties = {f"p{index}": {"type": "string"} for index in range(100)}
    tools = [tool(properties=properties, name=f"f{index}") for index in range(20)]
    call = 'f19(p3="x", p99="")'
    taken, of = how_far(grammars, "lfm2", [call], tools)
    assert taken == of
