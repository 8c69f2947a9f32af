"""Calls in Qwen3-Coder's format: what nothing quotes keeps to its schema as it is read.

What is drawn is written in other formats, too.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from types import MappingProxyType

import pytest

from control_plane.text.answers.tool_choice import ToolChoice
from control_plane.text.simple_tokenizer import EOS_TOKEN_ID
from planes.errors import ValidationError
from tests.control_plane.structured.test_answers_are_calls_where_they_must_be import (
    allowed,
    asked,
    constraint,
    format_of,
    grammars,
    read,
    take,
)

__all__ = ["grammars"]

NO_MARKS: Mapping[int, str] = MappingProxyType({})

SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "description": "any text"},
        "code": {"type": "string", "minLength": 3, "maxLength": 20},
        "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
        "part": {"type": "string", "pattern": "/b"},
        "day": {"type": "string", "format": "date"},
        "unit": {"type": ["string", "null"], "enum": ["m", "km\n", "</parameter>", None]},
        "mode": {"anyOf": [{"const": "fast"}, {"$ref": "#/$defs/mode"}, {"type": "null"}]},
        "size": {"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 2}]},
        "count": {"type": "integer", "minimum": 1, "maximum": 14},
        "wet": {"type": "boolean"},
        "ratio": {"type": ["number", "null"], "maximum": 99},
        "at": {"$ref": "#/$defs/place"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
        "any": {},
        "more": {"minimum": 3, "type": ["integer", "boolean"]},
        "least": {"minimum": 3, "maximum": 50, "enum": [4, 5]},
    },
    "required": ["title", "code", "count", "at", "any"],
    "$defs": {
        "mode": {"enum": ["slow", "</parameter>\n</function>", 1]},
        "place": {
            "type": "object",
            "properties": {
                "street": {"type": "string", "maxLength": 4},
                "in": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]},
            },
            "required": ["street"],
            "additionalProperties": False,
        },
    },
}
RICH = {"type": "function", "function": {"name": "rich", "parameters": SCHEMA}}

PIECES = [
    *["\n</parameter>\n"] * 12, "</parameter>\n", "\n</parameter", "</parameter>\n</function>",
    "</parameter>\n<parameter=x>", "<parameter=", "</function>", "</tool_call>", "<tool_call>",
    "<function=", '"', "null", "None", "5", "[1]", "20", "/b", "slow", "\n", "}", "]",
]  # fmt: skip

PIECES_OF_GLM = [
    *["</arg_value>"] * 9, "</arg_value>\n", "<arg_key>", "<arg_key>x</arg_key><arg_value>",
    "</tool_call>", "<tool_call>", '"', "null", "5", "[1]", "20", "/b", "slow", "\n", "}", "]",
]  # fmt: skip
PIECES_OF_GEMMA = [
    *['<|"|>'] * 9, '<|"|>,', '<|"|>}', "<tool_call|>", "<|tool_call>", '"', "null", "5", "[1]",
    "20", "/b", "slow", "\n", "}", "]", ",", "street:",
]  # fmt: skip
PIECES_OF = {"glm45": PIECES_OF_GLM, "gemma4": PIECES_OF_GEMMA}


def drawn(made, seed: int, spelled: Mapping[int, str] = NO_MARKS, *, form: str) -> str:
    """A text of what may come, which tries again and again what must not.

    `spelled`: special tokens, and their names.
    """
    draw, said = random.Random(seed), bytearray()
    pieces = PIECES_OF.get(form, PIECES)
    while not made.is_complete:
        tokens = allowed(made)
        assert len(said) < 20_000
        if EOS_TOKEN_ID in tokens and draw.random() < 0.5:
            break
        piece = [draw.choice([token for token in tokens if token != EOS_TOKEN_ID])]
        marks = [token for token in tokens if token in spelled]
        if draw.random() < 0.4:
            piece = marks[:1] or list(draw.choice(pieces).encode())
        for token in piece:
            if token not in allowed(made):
                break
            take(made, token)
            said += spelled[token].encode() if token in spelled else bytes([token])
    return said.decode()


@pytest.mark.spread(1)
@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 200), marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("form", "has_tokens"),
    [(name, False) for name in ("qwen3_coder", "seed_oss", "minimax_m2", "glm45", "lfm2", "olmo3")]
    + [(name, True) for name in ("minimax_m2", "glm45", "lfm2")]
    + [("gemma4", has_tokens) for has_tokens in (False, True)],
)
def test_whatever_is_written_is_read_as_what_the_schema_allows(grammars, form, has_tokens, seeds):
    library = pytest.importorskip("jsonschema_rs")
    is_valid = library.validator_for(SCHEMA, validate_formats=True).is_valid
    answer = format_of(form, has_tokens=has_tokens, tools=[RICH])
    seen: dict[str, set[str]] = {}
    for seed in seeds:
        made = constraint(grammars, answer, ToolChoice("required"), [RICH])
        text = drawn(made, seed, answer.spelled, form=form)
        calls, content = read(answer, text)
        assert (bool(calls), content) == (True, ""), text
        for name, arguments in calls:
            assert (name, is_valid(arguments)) == ("rich", True), text
            for key, value in arguments.items():
                seen.setdefault(key, set()).add(type(value).__name__)
    if form != "qwen3_coder":
        assert len(seen) > 10
        return
    assert seen.keys() == SCHEMA["properties"].keys()
    assert seen["unit"] == {"str", "NoneType"}
    assert seen["size"] == seen["title"] == {"str"}
    assert len(seen["any"]) > 1


def goes(made, text: str) -> bool:
    """Whether all of a text may come."""
    for token in text.encode():
        if token not in allowed(made):
            return False
        take(made, token)
    return True


def tool(parameters, name: str = "f") -> dict:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def may_be(grammars, schema, *values: str, choice=None) -> list[bool]:
    """Which of some values a parameter may have."""
    given = {"type": "object", "properties": {"x": schema}, "$defs": SCHEMA["$defs"]}
    tools, found = [tool(given)], []
    for value in values:
        answer = format_of("qwen3_coder", tools=tools)
        made = constraint(grammars, answer, choice or ToolChoice("required"), tools)
        text = f"<tool_call>\n<function=f>\n<parameter=x>\n{value}\n</parameter>\n</function>\n"
        found.append(goes(made, text))
    return found


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "string"}, ["", "a\n\nb", "<parameter=y>", "a</parameter>b", '"', "é漢😀"],
         ["a\n</parameter>b", "</parameter>", "a</parameter>\n</function>"]),
        ({"type": "string", "maxLength": 2}, ["", "é漢"], ["abc"]),
        ({"type": "string", "minLength": 2}, ["ab", "a\n</parame"], ["", "a"]),
        ({"type": "string", "pattern": "^a|b$"}, ["a", "b"], ["c"]),
        ({"type": "string", "pattern": "a/\nb"}, ["xa/\nbx"], ["a"]),
        ({"type": "string", "pattern": r"\$"}, ["$", "a$b"], ["a"]),
        ({"type": "string", "pattern": r"^\\$"}, ["\\"], ["a", "\\\\"]),
        ({"type": "string", "pattern": "^x", "maxLength": 3}, ["x", "xab"], ["xabc", "ax"]),
        ({"type": "string", "pattern": ""}, ["", "a"], []),
        ({"type": "string", "pattern": "b"}, ["</parameter b", "b</parameter>c", "b\n</parameter"],
         ["</parameter>b", "b\n</parameter> ", "</parameter>"]),
        ({"type": "string", "format": "date"}, ["2024-02-29", "2025-12-31"],
         ["2024-02-30", "2025-11-31", "2025-1-1"]),
        ({"type": "string", "format": "date-time"}, ["2024-02-29T23:59:59Z"], ["2024-02-29"]),
        ({"type": "string", "format": "uuid"}, ["01234567-89ab-cdef-0123-456789ABCDEF"], ["0"]),
        ({"type": "string", "format": "ipv4"}, ["192.168.0.1"], ["256.1.1.1", "1.1.1"]),
        ({"type": "string", "format": "email"}, ["a.b@c.de"], ["a", "a@b"]),
        ({"type": "string", "format": "hostname"}, ["a-b.c"], ["-a", "a_b"]),
        ({"enum": ["a", 'b"\n', 1]}, ["a", 'b"\n'], ["1", "b"]),
        ({"const": "a"}, ["a"], ["b"]),
        ({"enum": ["a", "bc"], "maxLength": 1}, ["a"], ["bc"]),
        ({"type": ["string", "null"]}, ["null", "x"], []),
        ({"enum": ["a", None]}, ["a", "null"], ["None", "b"]),
        ({"anyOf": [{"maxLength": 1, "type": "string"}, {"const": "abc"}]}, ["a", "abc"], ["ab"]),
        ({"allOf": [{"$ref": "#/$defs/mode"}], "description": "d"}, ["slow"], ["1", "fast"]),
        ({}, ["a", "[1]", "null"], []),
        (True, ["a"], []),
        ({"type": "integer"}, ["-7"], ["1.5", "a", "", " 1"]),
        ({"type": "boolean"}, ["true"], ["True", '"true"']),
        ({"type": "null"}, ["null"], ["None"]),
        ({"minimum": 3}, ["3", '{"a": "b"}', "true"], ["2", '"a"', "a"]),
        ({"type": "object"}, ['{"a": "</parameter>"}'], ["a", "[]"]),
        ({"$ref": "#/$defs/place"}, ['{"street": "a", "in": {"street": "b"}}'], ["{}"]),
        ({"type": "array", "items": {"$ref": "#/$defs/place"}}, ['[{"street": "a"}]', "[]"],
         ["[{}]"]),
        ({"$ref": "#", "description": "a call in a call"}, ['{"x": {"x": {}}}'], ["[]"]),
    ],
)  # fmt: skip
def test_a_value_may_be_what_its_schema_allows(grammars, schema, right, wrong):
    assert may_be(grammars, schema, *right) == [True] * len(right)
    assert may_be(grammars, schema, *wrong) == [False] * len(wrong)


def written(*names: str) -> str:
    values = "".join(f"<parameter={name}>\n1\n</parameter>\n" for name in names)
    return f"<tool_call>\n<function=f>\n{values}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("parameters", "right", "wrong"),
    [
        ({"properties": {"a": {}, "b": {}, "c": {}}, "required": ["b"]},
         ["b", "ab", "bc", "abc"], ["", "a", "ba", "bb", "cb", "bd"]),
        ({"properties": {"a": {}}, "additionalProperties": False}, ["", "a"], ["b"]),
        ({"properties": {}}, [""], ["a"]),
        ({"properties": {"a": False, "b": {}}}, ["b"], ["ab"]),
        ({"properties": {"b": {}}, "required": ["a"]}, ["ba", "a"], ["b"]),
        ({"additionalProperties": False}, [""], ["a"]),
        ({"properties": {"a": {}}, "additionalProperties": {"type": "string"}}, ["a", ""], ["b"]),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"properties": {"a": {"$ref": "#/$defs/n"}},
                                               "required": ["a"]}, "n": {"type": "integer"}}},
         ["a"], ["", "b"]),
        ({"type": ["object", "null"]}, ["", "ab", "ba"], []),
        (None, [""], ["a"]),
    ],
)  # fmt: skip
def test_parameters_come_in_order_those_that_must_always(grammars, parameters, right, wrong):
    tools = [tool(parameters) if parameters is not None else {"function": {"name": "f"}}]
    answer = format_of("qwen3_coder", tools=tools)
    for names in (*right, *wrong):
        made = constraint(grammars, answer, ToolChoice("required"), tools)
        assert goes(made, written(*names)) == (names in right), names


UNIT = {"type": "string"}


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (tool({"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}), 'a whole cannot keep to "an'),
        (tool({"allOf": [{"properties": {"a": {}}}]}), 'calls as a whole cannot keep to "allOf"'),
        (tool({"properties": {"a": {}}, "required": ["a"], "minProperties": 1}),
         'cannot keep to "minProperties"'),
        (tool({"patternProperties": {"^x": {}}}), 'cannot keep to "patternProperties"'),
        (tool({"additionalProperties": {"type": "string"}}), 'not support "additionalProperties"'),
        (tool({"properties": {"b": {}}, "required": ["a"], "additionalProperties": UNIT}),
         'not support "additionalProperties"'),
        (tool({"properties": {"a": {}}, "$ref": "#/$defs/x", "$defs": {"x": {}}}),
         'cannot keep to more than "$ref"'),
        (tool({"properties": {"a>": {}}}), "names of parameters have no <, > or line breaks"),
        (tool({"properties": {"a" * 257: {}}}), "at most 256 characters"),
        (tool({"properties": {"a": {"type": "string", "format": "ipv6"}}}),
         "cannot keep to the format 'ipv6' of a text"),
        (tool({"properties": {"a": {"enum": ["</parameter>"]}}, "required": ["a"]}), "no text can"),
        # What answers can keep to in no format is told as there.
        (tool({"properties": {"a": {"not": {}}}}), 'answers cannot keep to "not"'),
        (tool({"properties": {"a": {"$ref": "#/x"}}}), "refers to '/x', which does not exist"),
        (tool({"properties": {"a": {"type": "str"}}}), "there is no type 'str'"),
        (tool({"properties": {"a": {"type": "string", "pattern": "(?=a)"}}}), "look-around"),
        (tool({"properties": {"a": {"type": "string", "pattern": "a" * 4097}}}), "at most 4096"),
        (tool({"properties": {"a": False}, "required": ["a"]}), "no JSON keeps to it"),
    ],
)  # fmt: skip
def test_a_tool_that_cannot_be_called_so_is_named(grammars, function, message):
    other = {"type": "function", "function": {"name": "other"}}
    request = asked(format_of("qwen3_coder"), ToolChoice("required"), [other, function])
    with pytest.raises(ValidationError) as caught:
        grammars.constrain(request).result(timeout=60)
    assert caught.value.field == "tools[1].function.parameters"
    assert message in caught.value.message
    assert "is not supported" in caught.value.message


def test_a_name_that_the_format_cannot_write_is_blamed_on_the_name(grammars):
    request = asked(format_of("qwen3_coder"), ToolChoice("required"), [tool({}, name="a\nb")])
    with pytest.raises(ValidationError, match="names have no <, > or line breaks") as caught:
        grammars.constrain(request).result(timeout=60)
    assert caught.value.field == "tools[0].function.name"


def test_schemas_that_refer_to_too_much_are_refused(grammars):
    defs = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 9} for i in range(9)}
    defs["d9"] = {"enum": ["a"]}
    many = {f"p{i}": {"type": "array", "items": {"$ref": "#/$defs/x"}} for i in range(300)}
    for schema, message in (
        ({"properties": {"x": {"$ref": "#/$defs/d0"}}, "$defs": defs}, "alternatives multiply"),
        ({"properties": many, "$defs": {"x": {"type": "null", "title": "t" * 1000}}}, "too much"),
    ):
        request = asked(format_of("qwen3_coder"), ToolChoice("required"), [tool(schema)])
        with pytest.raises(ValidationError, match=message) as caught:
            grammars.constrain(request).result(timeout=60)
        assert caught.value.field == "tools[0].function.parameters"


def test_many_tools_are_compiled_within_the_time_that_they_have(grammars):
    tools = [
        tool({"properties": {f"p{j}": {"type": kind} for j, kind in enumerate(
            ("string", "integer", "boolean", "array", "object") * 2)}}, name=f"f{i}")
        for i in range(128)
    ]  # fmt: skip
    made = constraint(grammars, format_of("qwen3_coder"), ToolChoice("required"), tools)
    assert goes(made, "<tool_call>\n<function=f127>\n<parameter=p9>\n{}\n</parameter>\n</fun")
