"""What values the parameters of tools may have, as the JSON Schemas of the tools say.

For formats in which a value is written without quotes, so that its text alone does not say what it
is. Within bounds: a schema is a caller's text, and its references may lead around.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, TypeAlias
from urllib.parse import unquote

Kinds: TypeAlias = frozenset[str]
"""Of JSON's kinds of values: string, number (integers too), boolean, null, object, array."""

Parameters: TypeAlias = Mapping[str, Kinds | None]
"""Names, and the kinds of values they may have; None: any, as far as is known."""

ToolParameters: TypeAlias = Mapping[str, Parameters]

NO_TOOLS: Final[ToolParameters] = MappingProxyType({})

TEXT: Final = "string"
NULL: Final = "null"

_KINDS: Final[Mapping[str, str]] = {
    "string": TEXT,
    "null": NULL,
    "boolean": "boolean",
    "integer": "number",
    "number": "number",
    "object": "object",
    "array": "array",
}
SAYS_NOTHING: Final = frozenset(
    ("title", "description", "default", "example", "examples", "deprecated", "$comment")
)
ALL_BUT_TEXT: Final[Kinds] = frozenset(_KINDS.values()) - {TEXT}
"""Of a value of which a schema says something, but not what it is. Where answers keep to schemas it
is no text; else it may be anything, as one of which nothing is said."""

_MOST_SCHEMAS: Final = 4096
"""That are looked at for one tool; what is beyond says nothing."""

_MOST_DEEP: Final = 32

_INDEX: Final = re.compile(r"0|[1-9]\d{0,5}", re.ASCII)


def parameters_of_tools(tools: Sequence[Mapping[str, object]]) -> ToolParameters:
    """Return the parameters of tools, which are as chat templates get them, by names."""
    found: dict[str, Parameters] = {}
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping):
            found.setdefault(str(function.get("name")), parameters_of(function.get("parameters")))
    return found


def parameters_of(schema: object) -> Parameters:
    """Return the parameters that a schema of arguments names, in its order."""
    return _Reading(schema).parameters()


def kinds_in(root: object) -> Callable[[object], Kinds | None]:
    """Return what says of schemas of one document what kinds of values they allow."""
    reading = _Reading(root)
    return lambda schema: reading.kinds(schema, 0)


def pointed_to(root: object, reference: object) -> object:
    """Return what a reference within a schema refers to; None: nothing, or another document."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    first, *steps = unquote(reference[1:]).split("/")
    found = None if first else root  # `#name` is an anchor
    for step in steps:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = found.get(key)
        elif isinstance(found, list) and _INDEX.fullmatch(key) and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
    return found


class _Reading:
    """Reads one schema, as far as its bounds allow."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._num_left = _MOST_SCHEMAS

    def parameters(self) -> Parameters:
        found: dict[str, Kinds | None] = {}
        for name, schema in self._properties(self._root, 0):
            kinds = self.kinds(schema, 0)
            if kinds is None and isinstance(schema, Mapping) and not {*schema} <= SAYS_NOTHING:
                kinds = ALL_BUT_TEXT
            if name in found:
                known = found[name]
                kinds = None if known is None or kinds is None else known | kinds
            found[name] = kinds
        return found

    def _properties(self, schema: object, depth: int) -> Iterator[tuple[str, object]]:
        if not isinstance(schema, Mapping) or not self._may_read(depth):
            return
        properties = schema.get("properties")
        if isinstance(properties, Mapping):
            yield from properties.items()
        for part in self._parts(schema, "allOf", "anyOf", "oneOf"):
            yield from self._properties(part, depth + 1)

    def kinds(self, schema: object, depth: int) -> Kinds | None:
        if schema is False:
            return frozenset()
        if not isinstance(schema, Mapping) or not self._may_read(depth):
            return None
        found = _said(schema)
        for part in self._parts(schema, "allOf"):
            found = _both(found, self.kinds(part, depth + 1))
        for key in ("anyOf", "oneOf"):
            ways = [self.kinds(way, depth + 1) for way in self._parts(schema, key, refers=False)]
            known = [way for way in ways if way is not None]
            if ways and len(known) == len(ways):
                found = _both(found, frozenset().union(*known))
        return found

    def _parts(self, schema: Mapping[str, object], *keys: str, refers: bool = True) -> list[object]:
        """Return the schemas that a schema is made of; `refers`: what it refers to is one."""
        found: list[object] = []
        if refers and "$ref" in schema:
            found.append(pointed_to(self._root, schema["$ref"]))
        for key in keys:
            parts = schema.get(key)
            if isinstance(parts, list):
                found += parts
        return found

    def _may_read(self, depth: int) -> bool:
        self._num_left -= 1
        return depth <= _MOST_DEEP and self._num_left >= 0


def _said(schema: Mapping[str, object]) -> Kinds | None:
    """Return the kinds that a schema itself allows."""
    found, types = None, schema.get("type")
    if isinstance(types, str | list):
        names = [types] if isinstance(types, str) else types
        known = frozenset(
            _KINDS[name] for name in names if isinstance(name, str) and name in _KINDS
        )
        found = known or None
    values = schema.get("enum")
    if isinstance(values, list):
        found = _both(found, frozenset(map(kind_of, values)))
    if "const" in schema:
        found = _both(found, frozenset((kind_of(schema["const"]),)))
    return found


def kind_of(value: object) -> str:
    """Return the kind of a value."""
    if value is None:
        return NULL
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return TEXT
    return "array" if isinstance(value, list) else "object"


def _both(one: Kinds | None, other: Kinds | None) -> Kinds | None:
    if one is None:
        return other
    return one if other is None else one & other
