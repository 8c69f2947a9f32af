"""What values a tool's parameters may have is read off its JSON Schema, within bounds."""

from __future__ import annotations

import pytest

from control_plane.text.answers.parameter_kinds import (
    ALL_BUT_TEXT,
    parameters_of,
    parameters_of_tools,
    pointed_to,
)

DEFS = {
    "colour": {"enum": ["red", None]},
    "other": {"$ref": "#/$defs/colour"},
    "round": {"$ref": "#/$defs/round"},
    "a/b c": {"type": "integer"},
}


@pytest.mark.parametrize(
    ("schema", "kinds"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": "integer"}, {"number"}),
        ({"type": ["object", "null"]}, {"object", "null"}),
        ({"type": "str"}, ALL_BUT_TEXT),
        ({"type": ["str", "array"]}, {"array"}),
        ({"type": 3}, ALL_BUT_TEXT),
        ({"enum": ["a", 1, 1.5, True, None, [], {}]},
         {"string", "number", "boolean", "null", "array", "object"}),
        ({"type": "string", "enum": ["a", None]}, {"string"}),
        ({"const": "a"}, {"string"}),
        ({"const": None}, {"null"}),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"string", "null"}),
        ({"oneOf": [{"type": "number"}, {"enum": ["auto"]}]}, {"number", "string"}),
        ({"anyOf": [{"type": "string"}, {}]}, ALL_BUT_TEXT),
        ({"anyOf": [{"type": "string"}, {}], "type": ["number", "string"]}, {"number", "string"}),
        ({"allOf": [{"type": ["string", "null"]}, {"type": "string"}]}, {"string"}),
        ({"allOf": [{"$ref": "#/$defs/colour"}], "default": "red"}, {"string", "null"}),
        ({"$ref": "#/$defs/other"}, {"string", "null"}),
        ({"$ref": "#/$defs/other", "type": "string"}, {"string"}),
        ({"$ref": "#/$defs/round"}, ALL_BUT_TEXT),
        ({"$ref": "#/$defs/nothing"}, ALL_BUT_TEXT),
        ({"$ref": "#/$defs/a~1b%20c"}, {"number"}),
        ({"$ref": "elsewhere#/x"}, ALL_BUT_TEXT),
        ({"$ref": 3}, ALL_BUT_TEXT),
        ({"minLength": 3, "properties": {}}, ALL_BUT_TEXT),
        ({"title": "what", "default": 1}, None),
        ({}, None),
        (True, None),
        (False, set()),
        ("string", None),
    ],
)  # fmt: skip
def test_a_schema_says_what_kinds_of_values_there_are(schema, kinds):
    assert parameters_of({"properties": {"x": schema}, "$defs": DEFS}) == {"x": kinds}


@pytest.mark.parametrize(
    ("schema", "parameters"),
    [
        ({"$ref": "#/$defs/args", "$defs": {"args": {"properties": {"a": {"type": "null"}}}}},
         {"a": {"null"}}),
        ({"allOf": [{"properties": {"a": {"type": "null"}}}, {"properties": {"b": {}}}]},
         {"a": {"null"}, "b": None}),
        ({"anyOf": [{"properties": {"a": {"type": t}}} for t in ("null", "string")]},
         {"a": {"null", "string"}}),
        ({"oneOf": [{"properties": {"a": {"type": "null"}}}, {"properties": {"a": {}}}]},
         {"a": None}),
        ({"$ref": "#"}, {}),
        ({"properties": [1]}, {}),
        ([], {}),
        (None, {}),
    ],
)  # fmt: skip
def test_parameters_are_found_wherever_a_schema_names_them(schema, parameters):
    assert parameters_of(schema) == parameters


def test_a_schema_that_leads_around_says_nothing_and_takes_no_time():
    defs = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 9} for i in range(30)}
    schema = {"properties": {"x": {"$ref": "#/$defs/d0"}, "y": {"type": "null"}}, "$defs": defs}
    assert parameters_of(schema)["x"] == ALL_BUT_TEXT
    around = {"allOf": [{"$ref": "#"}] * 2, "properties": {"x": {"type": "null"}}}
    assert parameters_of(around)["x"] in ({"null"}, None)


def test_a_reference_points_into_its_own_document():
    root = {"a": [{"b": 1}, 2], "": {"c": 3}}
    for reference, found in (
        ("#", root), ("#/a/0/b", 1), ("#/a/1", 2), ("#//c", 3), ("#/a/2", None), ("#/a/01", None),
        ("#/a/x", None), ("#/a/1/b", None), ("#name", None), ("x", None),
    ):  # fmt: skip
        assert pointed_to(root, reference) == found


def test_of_two_tools_of_one_name_the_first_counts_and_what_is_none_has_no_parameters():
    tools = [
        {"function": {"name": "f", "parameters": {"properties": {"a": {"type": "null"}}}}},
        {"function": {"name": "f"}},
        {"function": {"name": "g"}},
        {"function": "h"},
    ]
    assert parameters_of_tools(tools) == {"f": {"a": {"null"}}, "g": {}}
