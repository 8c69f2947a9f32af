"""Calls as Gemma 4 writes them: texts between marks also where they are nested, JSON elsewhere."""

from __future__ import annotations

import itertools
import time

import pytest

from control_plane.text.answers.gemma4_arguments import QUOTE
from control_plane.text.answers.gemma4_reader import Gemma4Reader
from control_plane.text.answers.parser import Thinking
from control_plane.text.answers.tool_choice import ToolChoice
from control_plane.text.answers.written_calls import WRITERS, Call
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

OPEN, CLOSE, _ = Gemma4Reader.NAMES
PLACE = {
    "type": "object",
    "properties": {
        "street": {"type": "string", "maxLength": 9},
        "next": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}], "default": None},
    },
    "required": ["street"],
    "additionalProperties": False,
}
KINDS = {
    "Wet": {"type": "boolean"},
    "city": {"type": "string", "minLength": 2},
    "days": {"type": "integer", "maximum": 7},
    "tags": {"type": "array", "items": {"enum": ["a", None]}, "maxItems": 2},
}


def tool(properties, required: tuple[str, ...] = (), name: str = "f", **more) -> dict[str, object]:
    parameters = {
        "type": "object", "properties": properties, "required": [*required],
        "additionalProperties": False, **more,
    }  # fmt: skip
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def pieces_of(text: str) -> list[str]:
    """Return a text cut beside marks, which may be one token each."""
    pieces = [text]
    for mark in Gemma4Reader.NAMES:
        cut = [piece.split(mark) for piece in pieces]
        pieces = [
            one
            for parts in cut
            for at, part in enumerate(parts)
            for one in ([mark, part] if at else [part])
        ]
    return [piece for piece in pieces if piece]


def may_come(grammars, text: str, tools, choice=None, *, has_tokens=False) -> bool:
    answer = format_of("gemma4", has_tokens=has_tokens, tools=tools)
    tokens = tokens_of(answer, pieces_of(text))
    made = constraint(grammars, answer, choice or ToolChoice("required"), tools)
    return goes(made, tokens) == len(tokens)


def call_of(arguments: str, name: str = "f") -> str:
    return f"{OPEN}call:{name}{arguments}{CLOSE}"


@pytest.mark.parametrize("has_tokens", [False, True])
def test_calls_of_several_tools_may_come_and_are_read(grammars, has_tokens):
    tools = [tool(KINDS, ("city",)), tool(KINDS, name="my g")]
    calls = [
        Call("f", {"city": 'It\'s "Ulm",\n}', "tags": ["a", None], "Wet": True}),
        Call("my g", {}),
        Call("my g", {"days": 3}),
    ]
    text = WRITERS["gemma4"](calls)
    assert may_come(grammars, text, tools, has_tokens=has_tokens)
    answer = format_of("gemma4", tools=tools)
    assert read(answer, text) == ([(call.name, call.arguments) for call in calls], "")
    wanted = ToolChoice("required", ("my g",), is_single=True)
    assert may_come(grammars, call_of("{days:3}", "my g"), tools, wanted, has_tokens=has_tokens)
    twice = call_of("{}", "my g") * 2
    assert not may_come(grammars, twice, tools, wanted, has_tokens=has_tokens)
    assert not may_come(grammars, call_of(f"{{city:{QUOTE}Ulm{QUOTE}}}"), tools, wanted)


VALUES = {"city": f"{QUOTE}Ulm{QUOTE}", "days": "3", "tags": "[]", "Wet": "false"}
"""In the order in which templates write them."""


@pytest.mark.parametrize("required", [(), ("city",), ("Wet", "tags"), ("days",), tuple(KINDS)])
def test_parameters_that_may_miss_may_each_miss_and_commas_are_between_others(grammars, required):
    for given in itertools.product((False, True), repeat=len(KINDS)):
        names = [name for name, is_given in zip(VALUES, given, strict=True) if is_given]
        spelled = ",".join(f"{name}:{VALUES[name]}" for name in names)
        found = may_come(grammars, call_of(f"{{{spelled}}}"), [tool(KINDS, required)])
        assert found == set(required).issubset(names), (required, names)


Q = QUOTE
MAY_BE = [
    ({"type": "string"}, [f"{Q}{Q}", f'{Q}a "b", c}}{Q}', f"{Q}\n{Q}"], ['"a"', "a", "1", "null"]),
    ({"type": "string", "maxLength": 2}, [f"{Q}éé{Q}"], [f"{Q}abc{Q}"]),
    ({"type": "string", "pattern": "^[0-9]+$"}, [f"{Q}12{Q}"], [f"{Q}1a{Q}", f"{Q}{Q}"]),
    ({"enum": ["a", 'b"', 5, None, True, [1]]}, [f'{Q}b"{Q}', "5", "null", "true", "[1]"], ["1"]),
    ({"type": ["string", "null"], "enum": ["a", None]}, [f"{Q}a{Q}", "null"], [f"{Q}null{Q}"]),
    ({"const": "a"}, [f"{Q}a{Q}"], [f"{Q}b{Q}", "a"]),
    ({"const": 1}, ["1"], ["true", f"{Q}1{Q}"]),
    ({"type": "integer", "minimum": 3}, ["3", "12"], ["2", "3.5", f"{Q}3{Q}"]),
    ({"type": ["number", "string"]}, ["-1.5e3", f"{Q}-1{Q}"], ["true"]),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None}, ["4", "null"], ["{}"]),
    ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, ["4", f"{Q}4{Q}"], ["null"]),
    ({"allOf": [{"type": "boolean"}]}, ["true"], ["1"]),
    ({"type": "array", "items": {"type": "string"}}, ["[]", f"[{Q}a{Q},{Q}b{Q}]"], ["[a]", "[1]"]),
    (
        {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
        ["[1,2]", "[1,2,3]"],
        ["[]", "[1]", "[1,2,3,4]"],
    ),
    ({"type": "array", "items": {"const": 0}, "minItems": 3}, ["[0,0,0,0]"], ["[]", "[0,0]"]),
    ({"type": "array", "maxItems": 0}, ["[]"], ["[1]"]),
    ({"type": "array"}, ["[]", f"[1,[{Q}a{Q}],{{a_1:{Q}b{Q}}}]"], [f"[{Q}a{Q},]", "[a]"]),
    ({"type": "object"}, ["{}", f"{{a:{{b:[true,null]}},c:{Q}d{Q}}}"], ["{1:2}", "[]"]),
    (
        {"type": "object", "additionalProperties": {"type": "integer"}},
        ["{}", "{a:1,b:2}"],
        [f"{{a:{Q}b{Q}}}"],
    ),
    (
        {"type": "object", "properties": {"a b": {}, "c:d": {"type": "null"}, "": {}}},
        [f"{{{Q}{Q}:2,a b:1,{Q}c:d{Q}:null}}", "{}"],
        ["{c:d:null}", "{b:1}"],
    ),
    (
        {"$ref": "#/$defs/place"},
        [f"{{next:{{next:null,street:{Q}b{Q}}},street:{Q}a{Q}}}"],
        ["{}", f"{{next:{{}},street:{Q}a{Q}}}"],
    ),
    ({}, ["1", "null", f"{Q}a{Q}", "{}", f"[{{x:{Q}{Q}}}]"], ["a", '"a"']),
    # What cannot be written entry by entry is JSON, and read all the same.
    (
        {"type": "array", "prefixItems": [{"type": "string"}], "items": False},
        ["[]", '["a"]'],
        [f"[{Q}a{Q}]"],
    ),
    (
        {"type": "object", "patternProperties": {"^a": {"type": "string"}}, "maxProperties": 1},
        ['{"ab": "c"}'],
        [f"{{ab:{Q}c{Q}}}"],
    ),
]  # fmt: skip


@pytest.mark.parametrize("has_tokens", [False, True])
@pytest.mark.parametrize(("schema", "values", "others"), MAY_BE)
def test_a_value_is_what_its_schema_allows_and_is_read_as_that(
    grammars, schema, values, others, has_tokens
):
    library = pytest.importorskip("jsonschema_rs")
    tools = [tool({"x": schema}, ("x",), **{"$defs": {"place": PLACE}})]
    whole = {**schema, "$defs": {"place": PLACE}}
    for value in values:
        text = call_of(f"{{x:{value}}}")
        assert may_come(grammars, text, tools, has_tokens=has_tokens), value
        (((_, arguments),), content) = read(format_of("gemma4", tools=tools), text)
        assert library.validator_for(whole).is_valid(arguments["x"]), value
        assert content == ""
    for value in others:
        text = call_of(f"{{x:{value}}}")
        assert not may_come(grammars, text, tools, has_tokens=has_tokens), value


def test_where_any_parameter_may_come_values_may_be_any(grammars):
    tools = [{"function": {"name": "f", "parameters": {"type": "object"}}}]
    for arguments in ("{}", f"{{a:{Q}x{Q}}}", f"{{a_1:{{b:[true,{Q}{Q}]}},c:null,d:-1.5}}"):
        assert may_come(grammars, call_of(arguments), tools), arguments
    assert not may_come(grammars, call_of("{1:2}"), tools)
    nothing = [{"function": {"name": "f"}}]
    assert may_come(grammars, call_of("{}"), nothing)
    assert not may_come(grammars, call_of("{a:1}"), nothing)


def test_arguments_that_are_more_than_their_properties_are_json(grammars):
    ways = {"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}
    properties = {"properties": {"a": {"type": "string"}, "b": {"type": "string"}}}
    tools = [{"function": {"name": "f", "parameters": ways | properties}}]
    text = call_of('{"b": "x"}')
    assert may_come(grammars, text, tools)
    assert read(format_of("gemma4", tools=tools), text) == ([("f", {"b": "x"})], "")
    assert not may_come(grammars, call_of("{}"), tools)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/a"},
        {"type": "array", "items": {"$ref": "#/$defs/b"}},
        {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/c"}]},
        {"type": "array", "items": {"type": "string", "minLength": 3, "maxLength": 2}},
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
        {"anyOf": [False]},
        {"$ref": "#/$defs/nothing"},
    ],
)
def test_a_value_that_nothing_can_be_is_refused_and_not_met_in_the_middle_of_a_call(
    grammars, schema
):
    loops = {
        "a": {"$ref": "#/$defs/a"},
        "b": {"type": "array", "items": {"$ref": "#/$defs/b"}, "minItems": 1},
        "c": {"type": "object", "properties": {"x": {"$ref": "#/$defs/c"}}, "required": ["x"]},
    }
    tools = [tool({"p": schema, "q": {}}, **{"$defs": loops})]
    with pytest.raises(ValidationError) as caught:
        constraint(grammars, format_of("gemma4", tools=tools), ToolChoice("required"), tools)
    assert caught.value.field == "tools[0].function.parameters"


@pytest.mark.parametrize("name", [" f", "f ", "f{", "}f", "<f>", "f\ng"])
def test_functions_whose_names_would_be_read_otherwise_are_refused(grammars, name):
    tools = [tool(KINDS, name=name)]
    with pytest.raises(ValidationError, match="in this format names have no") as caught:
        constraint(grammars, format_of("gemma4", tools=tools), ToolChoice("required"), tools)
    assert caught.value.field == "tools[0].function.name"


@pytest.mark.parametrize("has_tokens", [False, True])
def test_text_may_come_around_calls_that_are_strict(grammars, has_tokens):
    tools, choice = [tool(KINDS, ("days",))], ToolChoice(strict=("f",))
    call = call_of("{days:3}")
    text = f"Well: call:f{{}} {call} and{call}."
    assert may_come(grammars, text, tools, choice, has_tokens=has_tokens)
    calls, content = read(format_of("gemma4", tools=tools), text)
    assert (calls, content) == ([("f", {"days": 3})] * 2, "Well: call:f{} and.")
    assert not may_come(grammars, call_of("{days:8}"), tools, choice, has_tokens=has_tokens)


@pytest.mark.parametrize("has_tokens", [False, True])
def test_reasoning_may_come_first_in_its_channel_only(grammars, has_tokens):
    tools = [tool(KINDS)]
    answer = format_of("gemma4", Thinking.MAY_BEGIN, has_tokens=has_tokens, tools=tools)
    said = ["<|channel>", "thought\n", "Hm <b>\n", "<channel|>", OPEN, "call:f{}", CLOSE]
    for required in (ToolChoice("required"), ToolChoice(strict=("f",))):
        made = constraint(grammars, answer, required, tools)
        tokens = tokens_of(answer, said)
        assert goes(made, tokens) == len(tokens)
    made = constraint(grammars, answer, ToolChoice("required"), tools)
    other = tokens_of(answer, ["<|channel>", "final"])
    assert goes(made, other) == len(other) - len("final")
    assert allowed(made) == [ord("t")]


def test_of_many_tools_and_parameters_the_grammar_is_made_in_time(grammars):
    nested = {"type": "array", "items": {"type": "object", "properties": {"a": {}, "b": {}}}}
    properties = {f"p{index}": {"type": "string"} for index in range(100)}
    tools = [tool(properties | {"l": nested}, name=f"f{index}") for index in range(20)]
    begin = time.process_time()
    assert may_come(grammars, call_of(f"{{l:[{{b:1}}],p3:{Q}x{Q}}}", "f19"), tools)
    assert time.process_time() - begin < 5


def test_lists_in_lists_take_no_more_than_their_schema_is_long(grammars):
    schema: dict[str, object] = {"type": "string"}
    for _ in range(25):
        schema = {"type": "array", "items": schema, "minItems": 1}
    text = call_of(f"{{x:{'[' * 25}{Q}a{Q}{']' * 25}}}")
    assert may_come(grammars, text, [tool({"x": schema})])
