"""Structures that are none are refused with the reason, and hostile ones cost little."""

from __future__ import annotations

import contextlib
import itertools
import string

import pytest

from control_plane.core.generation_params import GenerationParams
from control_plane.core.structured_outputs import StructuredOutputs
from control_plane.structured.refusals import reason_of
from planes.errors import ValidationError
from tests.control_plane.structured.test_grammars_constrain_samples import (
    allowed,
    constraints,
    grammars,
    say,
)

__all__ = ["grammars"]

OPTIONS_OF_ONE = {"anyOf": [{"properties": {f"p{j}": {"type": "string"}}} for j in range(8)]}
TO_ITSELF = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
WRONG = {
    "no JSON": (StructuredOutputs(json="{"), "it is no JSON: "),
    "no schema": (StructuredOutputs(json="5"), "a schema must be an object"),
    "an unknown type": (StructuredOutputs(json={"type": "strin"}), "there is no type 'strin'"),
    "what is not supported": (
        StructuredOutputs(json={"if": {}, "not": {}}), 'answers cannot keep to "if", "not"'
    ),
    "alternatives": (
        StructuredOutputs(json={"oneOf": [{"minimum": 1}, {"maximum": 2}]}), "anyOf is for others"
    ),
    "what is never": (
        StructuredOutputs(json={"type": "integer", "minimum": 2, "maximum": 1}),
        r"no JSON keeps to it: minimum \(2\) is greater",
    ),
    "a reference elsewhere": (
        StructuredOutputs(json={"$ref": "http://127.0.0.1/schema"}), "to another document"
    ),
    "a reference to a file": (
        StructuredOutputs(json={"$ref": "file:///etc/passwd"}), "to another document"
    ),
    "a reference to nothing": (
        StructuredOutputs(json={"$ref": "#/$defs/b"}), r"'/\$defs/b', which does not exist"
    ),
    "a reference to itself": (StructuredOutputs(json=TO_ITSELF), "leads back to itself"),
    "what is too large": (
        StructuredOutputs(json={"allOf": [OPTIONS_OF_ONE, *[OPTIONS_OF_ONE] * 7]}), "multiply"
    ),
    "a pattern that is none": (
        StructuredOutputs(json={"type": "string", "pattern": "(?=a)"}), "parse error: look-around"
    ),
    "a regular expression that is none": (
        StructuredOutputs(regex="(a"), "not supported: regex parse error: unclosed group"
    ),
    "one in a grammar": (
        StructuredOutputs(grammar='start: "a" b\nb: /(a/'), r"at 2\(4\): regex parse error"
    ),
    "one that looks ahead": (
        StructuredOutputs(regex="(?=a)b"), "regex parse error: look-around"
    ),
    "a grammar that is none": (
        StructuredOutputs(grammar="no rules"), "the grammar library says: .* Expected token"
    ),
    "a grammar without start": (StructuredOutputs(grammar='other: "x"'), "there is no rule start"),
    "no text at all": (StructuredOutputs(grammar="start: a\na: b\nb: a"), "back to itself"),
    "terminals that double": (
        StructuredOutputs(
            grammar="start: A0\n" + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(30))
            + '\nA30: "x"'
        ),
        "takes too much",
    ),
    "the empty text": (StructuredOutputs(regex="()"), "allows no text"),
}  # fmt: skip


@pytest.mark.parametrize(("structure", "words"), WRONG.values(), ids=WRONG.keys())
def test_what_is_no_structure_is_refused_with_its_field_and_why(grammars, structure, words):
    with pytest.raises(ValidationError, match=words) as caught:
        constraints(grammars, structure)
    assert caught.value.field == f"structured_outputs.{structure.kind}"
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("structure", "why"),
    [
        (StructuredOutputs(regex="(a"), "unclosed group"),
        (StructuredOutputs(json={"type": "string", "pattern": "[z-a]"}), "the start must be <="),
        (StructuredOutputs(grammar="start: /(?=a)b/"), "look-ahead and look-behind"),
        (StructuredOutputs(regex="a" * 2000 + "("), "unclosed group"),
    ],
)
def test_a_regular_expression_is_refused_with_the_reason(grammars, structure, why):
    with pytest.raises(ValidationError) as caught:
        constraints(grammars, structure)
    assert "regex parse error: " in caught.value.message
    assert why in caught.value.message


def test_what_the_library_says_is_never_its_own_where_it_gave_up():
    given_up = "panic: index out of bounds\n<backtrace>somewhere</backtrace>"
    assert reason_of(given_up) == "it is more than can be compiled"
    assert reason_of("a new thing\nfoo") == "the grammar library says: a new thing"
    assert len(reason_of("a" * 9999)) == 300


def chain(length: int, spelled) -> str:
    """A grammar in which each rule names the next, as many as fit."""
    letters = string.ascii_lowercase
    names = [spelled("".join(pair)) for pair in itertools.product(letters, letters, "xyz")]
    rules = [f"{one}:{other}" for one, other in itertools.pairwise(names[:length])]
    return "\n".join([f"start:{names[0]}", *rules, f'{names[length - 1]}:"x"'])


DEFS = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(24)}
HOSTILE = {
    "nesting": StructuredOutputs(json='{"type":"array","items":' * 2500 + "{}" + "}" * 2500),
    "a chain of rules": StructuredOutputs(grammar=chain(2000, str.lower)),
    "a chain of terminals": StructuredOutputs(grammar=chain(2000, str.upper)),
    "a chain of references": StructuredOutputs(
        json={
            "$ref": "#/$defs/0",
            "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(1999)} | {"1999": {}},
        }
    ),
    "terminals that double": StructuredOutputs(
        grammar="start: A0\n" + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(30))
        + '\nA30: "x"'
    ),
    "references in a circle": StructuredOutputs(
        json={"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}}
    ),
    "references that double": StructuredOutputs(
        json={"$ref": "#/$defs/a0", "$defs": {**DEFS, "a24": {"type": "object"}}}
    ),
    "alternatives that multiply": StructuredOutputs(
        json={
            "allOf": [
                {"anyOf": [{"properties": {f"p{i}_{j}": {"type": "string"}}} for j in range(8)]}
                for i in range(8)
            ]
        }
    ),
    "repetitions that multiply": StructuredOutputs(regex="((((a{1,50}){1,50}){1,50}){1,50})b"),
    "states that double": StructuredOutputs(regex=".*a.{18}b"),
    "ambiguity": StructuredOutputs(grammar='start: s\ns: s s s | s s | "a" | '),
    "a number of many digits": StructuredOutputs(json={"type": "integer", "multipleOf": 999999937}),
    "a long array": StructuredOutputs(json={"type": "array", "items": {}, "minItems": 10**6}),
}  # fmt: skip


HARMLESS = {
    "a chain of rules", "a chain of terminals", "a chain of references", "references that double",
    "ambiguity", "a long array",
}  # fmt: skip
"""Long ones that are little work: they are not refused for their looks."""


@pytest.mark.spread(4)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_structure_is_refused_or_costs_little(grammars, name):
    """That the process lives, and the test ends, is what is tested of those that do harm."""
    with contextlib.nullcontext() if name in HARMLESS else contextlib.suppress(ValidationError):
        (one,) = constraints(grammars, HOSTILE[name])
        for _ in range(40):
            if one.is_complete or one.error is not None:
                break
            token = next(i for i in range(256) if one.allowed_tokens[i // 8] >> i % 8 & 1)
            one.constrainer.advance([(one, [token])])
        assert one.error is None or name not in HARMLESS


TOO_LARGE = {
    "json": StructuredOutputs(json=" " * 65_537),
    "regex": StructuredOutputs(regex="a" * 4_097),
    "grammar": StructuredOutputs(grammar="a" * 8_193),
    "choice": StructuredOutputs(choice=("a",) * 1_025),
}


@pytest.mark.parametrize("kind", TOO_LARGE)
def test_texts_are_bounded_before_they_are_compiled(kind):
    with pytest.raises(ValidationError, match=r"at most|must have 1 to") as caught:
        GenerationParams(structured_outputs=TOO_LARGE[kind]).validate()
    assert caught.value.field == f"structured_outputs.{kind}"


def test_patterns_of_a_schema_are_bounded_together(grammars):
    long = {"type": "string", "pattern": "a?" * 1100}
    schema = {"properties": {"a": long, "b": long}}
    with pytest.raises(ValidationError, match="at most 4096 characters, they have 4400"):
        constraints(grammars, StructuredOutputs(json=schema))


def test_patterns_in_the_options_of_a_schema_are_bounded_too(grammars):
    schema = {"x-guidance": {"whitespace_flexible": False}, "type": "object"}
    (one,) = constraints(grammars, StructuredOutputs(json=schema))
    say(one, "{")
    assert " " not in allowed(one)
    schema["x-guidance"] = {"whitespace_pattern": "a?" * 2100}
    with pytest.raises(ValidationError, match="at most 4096 characters"):
        constraints(grammars, StructuredOutputs(json=schema))


@pytest.mark.parametrize(
    ("structure", "said"),
    [
        (StructuredOutputs(), "got none"),
        (StructuredOutputs(regex="a", json_object=True), "got json_object and regex"),
        (StructuredOutputs(choice=("a", "")), "none of them empty"),
        (StructuredOutputs(choice=[]), "one text or more"),
        (StructuredOutputs(regex=5), "must be text"),
    ],
)
def test_a_structure_is_one_thing(structure, said):
    with pytest.raises(ValidationError, match=said):
        GenerationParams(structured_outputs=structure).validate()


def test_a_beam_search_has_no_structure():
    params = GenerationParams(structured_outputs=StructuredOutputs(regex="a"), beam_width=2)
    with pytest.raises(ValidationError, match="unset with beam_width") as caught:
        params.validate()
    assert caught.value.field == "structured_outputs"
