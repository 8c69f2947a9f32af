"""Schemas that are drawn: refused, or what is written by them is read as what they allow."""

from __future__ import annotations

import random

import pytest

from control_plane.text.answers.tool_choice import ToolChoice
from planes.errors import ValidationError
from tests.control_plane.structured.test_answers_are_calls_where_they_must_be import (
    constraint,
    format_of,
    grammars,
    read,
)
from tests.control_plane.structured.test_calls_of_qwen3_coder_keep_to_their_schema import drawn

__all__ = ["grammars"]

TYPES = [
    "string", "integer", "boolean", "null", "array", "object", ["string", "null"],
    ["integer", "string"], ["boolean", "null"], ["integer", "string", "null"],
]  # fmt: skip
VALUES = [
    "a", "null", "None", "True", "5", 5, None, True, "\n", "x\n</parameter>", "</parameter>", [1],
    "</arg_value>", '<|"|>', "",
]  # fmt: skip
OTHERS = "lfm2", "olmo3", "gemma4"
PATTERNS = ["^a", "[0-9]+$", "a|b", "^(a|b)+$", "/", r"\n"]
OBJECTS = {
    "array": {"items": {"type": "string", "maxLength": 2}, "maxItems": 2},
    "object": {"properties": {"q": {"type": "integer"}}, "additionalProperties": False},
}


def schema_of(draw: random.Random, depth: int = 0) -> dict:
    kind = draw.random()
    if depth < 3 and kind < 0.2:
        ways = [schema_of(draw, depth + 1) for _ in range(draw.randrange(1, 3))]
        return {draw.choice(["anyOf", "allOf", "oneOf"]): ways}
    if kind < 0.3:
        return {"$ref": draw.choice(["#/$defs/a", "#/$defs/b", "#/properties/p0"])}
    keys = {
        "type": (0.7, draw.choice(TYPES)),
        "enum": (0.3, draw.sample(VALUES, draw.randrange(1, 6))),
        "maxLength": (0.2, draw.randrange(5)),
        "minLength": (0.2, draw.randrange(3)),
        "pattern": (0.15, draw.choice(PATTERNS)),
        "minimum": (0.1, 3),
    }
    found = {key: value for key, (share, value) in keys.items() if draw.random() < share}
    kind = found.get("type")
    return found | OBJECTS.get(kind, {}) if isinstance(kind, str) else found


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "seeds", [range(60), pytest.param(range(60, 1500), marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", [*("qwen3_coder", "seed_oss", "minimax_m2", "glm45"), *OTHERS])
def test_what_is_written_by_a_schema_is_read_as_what_it_allows(grammars, name, seeds):
    validator_for = pytest.importorskip("jsonschema_rs").validator_for
    num_kept, refusals = 0, []
    for seed in seeds:
        draw = random.Random(seed)
        names = [f"p{i}" for i in range(draw.randrange(1, 4))]
        schema = {
            "type": "object",
            "properties": {name: schema_of(draw) for name in names},
            "$defs": {"a": schema_of(draw), "b": schema_of(draw)},
            "required": [name for name in names if draw.random() < 0.6],
        }
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        answer, choice = format_of(name, tools=tools), ToolChoice("required", ("f",), True)
        try:
            made = constraint(grammars, answer, choice, tools)
        except ValidationError as refusal:
            refusals.append(refusal.field)
            continue
        text = drawn(made, seed, form=name)
        ((_, arguments),), content = read(answer, text)
        assert content == "", (schema, text)
        if "inf" not in repr(arguments):  # as Python reads 1e999
            assert validator_for(schema).is_valid(arguments), (schema, text)
            num_kept += 1
    assert num_kept > 0.8 * len(refusals)
    assert {*refusals} == {"tools[0].function.parameters"}
