"""The texts that a JSON Schema allows, without quotes, in Lark's notation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from control_plane.core.structured_outputs import MAX_REGEX_CHARACTERS, MAX_SCHEMA_CHARACTERS
from control_plane.structured.lark import lark_regex, lark_text
from control_plane.text.answers.parameter_kinds import pointed_to

ANY_TEXT: Final = lark_regex("(?s:.*)")

_MOST_SCHEMAS: Final = 4096
_MOST_DEEP: Final = 32

_NOT_KEPT: Final = ("not", "if", "then", "else", "$dynamicRef", "$recursiveRef")

_DATE: Final = (
    "[0-9]{4}-(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-9])|(?:0[13-9]|1[0-2])-30"
    "|(?:0[13578]|1[02])-3[01])"
)
_TIME: Final = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?"
    "(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_LABEL: Final = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,30}[a-zA-Z0-9])?"
_ATOM: Final = "[a-zA-Z0-9_+-]+"
_BYTE: Final = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_FORMATS: Final[Mapping[str, str]] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "email": rf"{_ATOM}(?:\.{_ATOM})*@{_LABEL}(?:\.{_LABEL})+",
    "hostname": rf"{_LABEL}(?:\.{_LABEL})*",
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "uuid": "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
}
"""What they are written as, most of what may be."""


class TextValues:
    """Writes the texts that schemas of one document allow. `root`: the document."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._num_left = _MOST_SCHEMAS
        self._room = 4 * MAX_SCHEMA_CHARACTERS
        self._room_of_patterns = MAX_REGEX_CHARACTERS

    def of(self, schema: object) -> str:
        """Return an expression for the texts of a schema. Raises ValueError where it cannot be."""
        found = self._texts(schema, 0)
        if found is None:
            raise ValueError("no text keeps to it")
        return found

    def _texts(self, schema: object, depth: int) -> str | None:
        """Return the expression of a schema; None: it allows no text."""
        self._num_left -= 1
        if depth > _MOST_DEEP or self._num_left < 0:
            raise ValueError("it is too large, or its alternatives multiply")
        if schema is False:
            return None
        if not isinstance(schema, Mapping):
            return ANY_TEXT
        for key in _NOT_KEPT:
            if key in schema:
                raise ValueError(f'answers cannot keep to "{key}"')
        types = schema.get("type", "string")
        if "string" not in (types if isinstance(types, list) else [types]):
            return None
        parts = [*self._values(schema), *self._bounds(schema)]
        parts += [
            self._ways(key, schema[key], depth)
            for key in ("anyOf", "oneOf")
            if isinstance(schema.get(key), list)
        ]
        parts += [self._texts(one, depth + 1) for one in self._all_of(schema)]
        return self._joined(parts, " & ")

    def _joined(self, parts: list[str | None], by: str) -> str | None:
        wanted = [part for part in parts if part is not None]
        if len(wanted) < len(parts):
            return None
        wanted = list(dict.fromkeys(part for part in wanted if part != ANY_TEXT))
        if len(wanted) < 2:
            return wanted[0] if wanted else ANY_TEXT
        found = by.join(f"({part})" for part in wanted)
        self._room -= len(found)
        if self._room < 0:
            raise ValueError("it is too large, or its alternatives multiply")
        return found

    def _values(self, schema: Mapping[str, object]) -> list[str | None]:
        """Return what `enum` and `const` allow."""
        found: list[str | None] = []
        enum = schema.get("enum")
        lists = [enum] if isinstance(enum, list) else []
        if "const" in schema:
            lists.append([schema["const"]])
        for values in lists:
            texts = [lark_text(value) for value in values if isinstance(value, str)]
            self._room -= sum(map(len, texts))
            found.append(" | ".join(texts) if texts else None)
        return found

    def _bounds(self, schema: Mapping[str, object]) -> list[str | None]:
        """Return what `minLength`, `maxLength`, `pattern` and `format` allow."""
        found: list[str | None] = []
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        if least or most is not None:
            for bound in (least, most or 0):
                if not isinstance(bound, int) or isinstance(bound, bool) or bound < 0:
                    raise ValueError(f"minLength and maxLength must be integers, got {bound!r:.40}")
            found.append(lark_regex(f"(?s:.{{{least},{'' if most is None else most}}})"))
        pattern = schema.get("pattern")
        if isinstance(pattern, str):
            self._room_of_patterns -= len(pattern)
            if self._room_of_patterns < 0:
                raise ValueError(
                    f"its patterns must have at most {MAX_REGEX_CHARACTERS} characters, where they "
                    "are referred to too"
                )
            found.append(lark_regex(_searching(pattern)))
        form = schema.get("format")
        if form is not None:
            if not isinstance(form, str) or form not in _FORMATS:
                raise ValueError(f"answers cannot keep to the format {form!r:.40} of a text")
            found.append(lark_regex(_FORMATS[form]))
        return found

    def _ways(self, key: str, ways: list[object], depth: int) -> str | None:
        found = [self._texts(way, depth + 1) for way in ways]
        texts = [way for way in found if way is not None]
        if not texts:
            return None
        if key == "oneOf" and len(texts) > 1:
            raise ValueError("oneOf is supported only if at most one alternative is a string")
        if ANY_TEXT in texts:
            return ANY_TEXT
        return self._joined([*texts], " | ")

    def _all_of(self, schema: Mapping[str, object]) -> list[object]:
        found: list[object] = []
        if "$ref" in schema:
            target = pointed_to(self._root, schema["$ref"])
            if target is None:
                raise ValueError(f"it refers to {schema['$ref']!r:.60}, which does not exist in it")
            found.append(target)
        parts = schema.get("allOf")
        return found + parts if isinstance(parts, list) else found


def _searching(pattern: str) -> str:
    """Return what matches a whole text in which the pattern is found.

    Only what it begins and ends with may be bound to the ends of the text: with alternatives behind
    that it is what each of them is bound to.
    """
    end = re.search(r"(\\*)\$\Z", pattern)
    is_bound = end is not None and len(end.group(1)) % 2 == 0
    before = "" if pattern.startswith("^") else "(?s:.*)"
    inner = pattern.removeprefix("^")
    return f"{before}(?:{inner[:-1] if is_bound else inner}){'' if is_bound else '(?s:.*)'}"
