"""The values of a call as Gemma 4 writes them, in Lark's notation: texts between marks.

Lists and objects are written entry by entry as far as their schemas allow that; others are JSON,
whose texts have quotes: the reader of the format reads them, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from control_plane.core.structured_outputs import MAX_SCHEMA_CHARACTERS
from control_plane.structured.lark import lark_text, without
from control_plane.structured.rule_book import Entry, RuleBook
from control_plane.structured.text_values import ANY_TEXT, TextValues
from control_plane.structured.value_schemas import of_value
from control_plane.text.answers.gemma4_arguments import PLAIN_KEY, QUOTE
from control_plane.text.answers.parameter_kinds import TEXT, kind_of, kinds_in, pointed_to

NAME_RULE: Final = "NAME: /[A-Za-z_][A-Za-z0-9_]{0,63}/"

_NUMBERS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_SCALARS: Final = ("number", "integer", "boolean", "null")
_LISTS: Final = frozenset(("items", "minItems", "maxItems"))
_OBJECTS: Final = frozenset(("properties", "required", "additionalProperties"))
_OTHERS_OF_LISTS: Final = frozenset(
    ("prefixItems", "additionalItems", "contains", "minContains", "maxContains", "uniqueItems")
) | {"unevaluatedItems"}
_OTHERS_OF_OBJECTS: Final = frozenset(
    ("patternProperties", "propertyNames", "minProperties", "maxProperties", "dependencies")
) | {"dependentRequired", "dependentSchemas", "unevaluatedProperties"}
_COMBINED: Final = frozenset(("anyOf", "oneOf", "allOf", "$ref", "not", "if", "then", "else"))
_VALUES: Final = frozenset(("enum", "const"))
_SAYS: Final = (
    frozenset(("type", "minLength", "maxLength", "pattern", "format", *_NUMBERS))
    | (_LISTS | _OBJECTS | _OTHERS_OF_LISTS | _OTHERS_OF_OBJECTS | _COMBINED | _VALUES)
)  # fmt: skip
"""What of a schema says what a value is."""


class Value(NamedTuple):
    """How a value is written. `needs`: rules without which there is none."""

    expression: str
    needs: frozenset[str] = frozenset()


class QuotedValues:
    """Writes the values that schemas of one document allow, with rules in `book`.

    `root`: the document. `quote`: the mark beside texts as an expression. Methods raise ValueError
    for what cannot be written.
    """

    def __init__(self, root: Mapping[str, object], book: RuleBook, quote: str) -> None:
        self._root = root
        self._book = book
        self._quote = quote
        self._form = TextsUpToMark(quote)
        self._texts = TextValues(root)
        self._kinds = kinds_in(root)
        self._room = 4 * MAX_SCHEMA_CHARACTERS
        self._referred: dict[int, str] = {}  # rules of what is referred to
        self._ways: dict[str, list[frozenset[str]]] = {}  # what rules need, one or the other

    def of_arguments(self) -> str:
        """Return the expression of the document's own values."""
        found = self._of(self._root)
        written: set[str] = set()
        while True:
            before = len(written)
            for name, ways in self._ways.items():  # most behind those that they need
                if any(way <= written for way in ways):
                    written.add(name)
            if len(written) == before:
                break
        if len(written) < len(self._ways):
            raise ValueError("a value in it leads back to itself, so that none has an end")
        return found.expression

    def _of(self, schema: object) -> Value:
        if schema is False:
            raise ValueError("no value keeps to it")
        if not isinstance(schema, Mapping) or not _SAYS.intersection(schema):
            return self._any()
        combined = _COMBINED.intersection(schema)
        if not combined:
            return self._simple(schema)
        if combined == _SAYS.intersection(schema):
            found = self._combined(schema, combined)
            if found is not None:
                return found
        if self._kinds(schema) == frozenset((TEXT,)):
            return self._text(schema)
        return self._json(schema)

    # --- what refers to others or is made of them ---

    def _combined(self, schema: Mapping[str, object], keys: frozenset[str]) -> Value | None:
        """Return what one schema is that another refers to, or alternatives; None: neither."""
        (key, *others) = keys
        if others:
            return None
        if key == "$ref":
            return self._referred_to(schema[key])
        ways = schema[key]
        if not isinstance(ways, list) or not ways:
            return None
        if key == "allOf" and len(ways) == 1:
            return self._of(ways[0])
        if key == "anyOf" or (key == "oneOf" and self._exclude_one_another(ways)):
            return self._either([self._of(way) for way in ways if way is not False])
        return None

    def _referred_to(self, reference: object) -> Value:
        target = pointed_to(self._root, reference)
        if target is None:
            raise ValueError(f"it refers to {reference!r:.60}, which does not exist in it")
        name = self._referred.get(id(target))
        if name is None:
            name = self._referred[id(target)] = self._book.new_name()
            found = self._of(target)
            self._write(name, found.expression, [found.needs])
        return Value(name, frozenset((name,)))

    def _exclude_one_another(self, ways: Sequence[object]) -> bool:
        seen = set[str]()
        for way in ways:
            kinds = self._kinds(way)
            if kinds is None or seen & kinds:
                return False
            seen |= kinds
        return True

    def _either(self, ways: Sequence[Value]) -> Value:
        if not ways:
            raise ValueError("no value keeps to it")
        if len(ways) == 1:
            return ways[0]
        return self._rule(" | ".join(way.expression for way in ways), [way.needs for way in ways])

    def _rule(self, expression: str, ways: list[frozenset[str]]) -> Value:
        name = self._book.new_name()
        self._write(name, expression, ways)
        return Value(name, frozenset((name,)))

    def _write(self, name: str, expression: str, ways: list[frozenset[str]]) -> None:
        self._book.lines.append(f"{name}: {expression}")
        self._ways[name] = ways

    # --- values of kinds ---

    def _simple(self, schema: Mapping[str, object]) -> Value:
        """Return what schemas say of kinds and values."""
        types = schema.get("type", ["string", "number", "boolean", "null", "array", "object"])
        types = types if isinstance(types, list) else [types]
        if _VALUES.intersection(schema):
            return self._one_of_values(schema, types)
        ways = []
        if "string" in types:
            ways.append(self._text(schema))
        scalars = [kind for kind in types if kind in _SCALARS]
        if scalars:
            bounds = {key: schema[key] for key in _NUMBERS if key in schema}
            ways.append(self._json({"type": scalars, **bounds}))
        if "array" in types:
            ways.append(self._list(schema))
        if "object" in types:
            ways.append(self._object(schema))
        return self._either(ways)

    def _one_of_values(self, schema: Mapping[str, object], types: Sequence[object]) -> Value:
        """Return the values of `enum` and `const`: texts between marks, others as JSON."""
        enum = schema.get("enum")
        values = enum if isinstance(enum, list) else [schema.get("const")]
        if "const" in schema:
            values = [value for value in values if _is_same(value, schema["const"])]
        kinds = self._kinds(schema)
        values = [value for value in values if kinds is None or kind_of(value) in kinds]
        ways = []
        if any(isinstance(value, str) for value in values):
            ways.append(self._text({**schema, "type": "string"}))
        others = [value for value in values if not isinstance(value, str)]
        if others:
            bounds = {key: schema[key] for key in _SAYS.intersection(schema) - _VALUES - {"type"}}
            other_types = [kind for kind in types if kind != "string"]
            ways.append(self._json({**bounds, "type": other_types, "enum": others}))
        return self._either(ways)

    def _text(self, schema: object) -> Value:
        return self._written_text(self._texts.of(schema))

    def _written_text(self, expression: str) -> Value:
        return Value(f"{self._quote} {self._book.text(self._form, expression)}")

    def _json(self, schema: Mapping[str, object]) -> Value:
        document = of_value(self._root, schema, is_no_text=False)
        self._room -= len(document)
        if self._room < 0:
            raise ValueError("its parameters refer to too much")
        return Value(self._book.json(document))

    def _list(self, schema: Mapping[str, object]) -> Value:
        if _OTHERS_OF_LISTS.intersection(schema) or not _has_bounds(schema):
            kept = {key: schema[key] for key in (_LISTS | _OTHERS_OF_LISTS).intersection(schema)}
            return self._json({**kept, "type": "array"})
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        assert isinstance(least, int)
        if most == 0 or schema.get("items") is False:
            return Value(lark_text("[]"))
        item = self._of(schema.get("items", True))
        further = f'("," {item.expression})'
        more = "" if most is None else int(str(most)) - 1
        times = "*" if least < 2 and most is None else f"{{{max(least - 1, 0)},{more}}}"
        items = f"{item.expression} {further}{times}"
        if least == 0:
            return self._rule(f'"[" ({items})? "]"', [frozenset()])
        return self._rule(f'"[" {items} "]"', [item.needs])

    def _object(self, schema: Mapping[str, object]) -> Value:
        properties, given = schema.get("properties", {}), schema.get("required", [])
        others = schema.get("additionalProperties", True)
        kept = {key: schema[key] for key in (_OBJECTS | _OTHERS_OF_OBJECTS).intersection(schema)}
        if (
            _OTHERS_OF_OBJECTS.intersection(schema)
            or not isinstance(properties, Mapping)
            or not isinstance(given, list)
            or any(QUOTE in name for name in properties)
        ):
            return self._json({**kept, "type": "object"})
        required = list(map(str, given))
        if "properties" not in schema and not required and others is not False:
            return self._any_object(others)
        unknown = [name for name in dict.fromkeys(required) if name not in properties]
        if unknown and others is False:
            raise ValueError(f"no object has {unknown[0]!r:.60}, which is required")
        entries, needs = [], frozenset[str]()
        # In the order in which templates write them.
        named = {**properties, **dict.fromkeys(unknown, others)}
        for name, value in sorted(named.items(), key=lambda item: item[0].lower()):
            if value is False and name not in required:
                continue
            written = self._of(value)
            is_required = name in required
            entries.append(Entry(f"{self._key(name)} {written.expression}", is_required))
            needs |= written.needs if is_required else frozenset()
        parts = ('"{"', *self._book.joined(entries, '","'), '"}"')
        return self._rule(" ".join(parts), [needs])

    def _any_object(self, schema: object) -> Value:
        """Return an object with any names of values that keep to a schema."""
        if schema is True:
            self._any()
            return Value("any_object")
        self._book.need(NAME_RULE)
        entry = f'NAME ":" {self._of(schema).expression}'
        return self._rule(f'"{{" ({entry} ("," {entry})*)? "}}"', [frozenset()])

    def _any(self) -> Value:
        """Return a value of which nothing is said."""
        text = self._written_text(ANY_TEXT).expression
        scalar = self._book.json(json.dumps({"type": ["number", "boolean", "null"]}))
        for line in (
            NAME_RULE,
            f"any_value: {text} | {scalar} | any_list | any_object",
            'any_list: "[" (any_value ("," any_value)*)? "]"',
            'any_object: "{" (NAME ":" any_value ("," NAME ":" any_value)*)? "}"',
        ):
            self._book.need(line)
        return Value("any_value")

    def _key(self, name: str) -> str:
        """Return a name and the colon; between marks where it would be read otherwise."""
        if PLAIN_KEY.fullmatch(name):
            return lark_text(f"{name}:")
        return f'{self._quote} {lark_text(name) if name else ""} {self._quote} ":"'


class TextsUpToMark:
    """Writes texts and the mark behind them, which is in none of them. `mark`: an expression."""

    def __init__(self, mark: str) -> None:
        self._mark = mark

    def text_rule(self, rule: str, expression: str) -> list[str]:
        """Return the rule of a text, and of what closes it."""
        text = f"(({expression}){without(re.escape(QUOTE))})"
        if self._mark == lark_text(QUOTE):
            return [f"{rule}[lazy]: {rule.upper()}", f"{rule.upper()}: {text} {self._mark}"]
        return [f"{rule}: {rule.upper()} {self._mark}", f"{rule.upper()}: {text}"]


def _has_bounds(schema: Mapping[str, object]) -> bool:
    """Whether a list's bounds are numbers that it can have."""
    least, most = schema.get("minItems", 0), schema.get("maxItems")
    bounds = [least] if most is None else [least, most]
    if any(not isinstance(bound, int) or isinstance(bound, bool) for bound in bounds):
        return False
    return int(str(least)) >= 0 and (most is None or int(str(least)) <= int(str(most)))


def _is_same(one: object, other: object) -> bool:
    """Whether two values are the same in JSON, where `true` is not 1."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
