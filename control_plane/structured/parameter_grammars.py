"""Calls that are written parameter by parameter, in Lark's notation.

Where nothing is quoted a text may be what its schema allows and its reader reads whole; other
values are JSON, each of its own schema. Parameters come in the order in which the schema has them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from control_plane.core.structured_outputs import MAX_SCHEMA_CHARACTERS
from control_plane.core.tool_calls import CallableTool
from control_plane.structured.parameter_forms import MarkedForm, ParameterForm
from control_plane.structured.refusals import NameRefusedError
from control_plane.structured.rule_book import Entry, RuleBook
from control_plane.structured.text_values import ANY_TEXT, TextValues
from control_plane.structured.value_schemas import OPTIONS, of_value
from control_plane.text.answers.parameter_kinds import (
    ALL_BUT_TEXT,
    NULL,
    SAYS_NOTHING,
    TEXT,
    Kinds,
    parameters_of,
    pointed_to,
)
from control_plane.text.answers.parameter_reader import MAX_PARAMETER_NAME_CHARACTERS

_NOT_AT_THE_ROOT: Final = (
    *("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "enum", "const"),
    *("patternProperties", "propertyNames", "minProperties", "maxProperties"),
    *("dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties"),
)


class ParameterGrammars:
    """Writes the calls of several tools, with rules in `book`.

    Methods raise ValueError for a tool whose calls cannot be written so.
    """

    def __init__(self, form: ParameterForm) -> None:
        self._form = form
        self._marked = form if isinstance(form, MarkedForm) else None
        self.book = RuleBook()

    def call_of(self, tool: CallableTool) -> str:
        """Return the expression of a call, from the name of its function on."""
        if not self._form.NAME.fullmatch(tool.name):
            raise NameRefusedError(f"in this format names have {self._form.NOT_IN_NAMES}")
        try:
            parts = self._parameters(json.loads(tool.schema))
        except RecursionError:
            raise ValueError("objects and lists are nested too deep") from None
        return self._form.call(tool.name, parts)

    def _parameters(self, root: Mapping[str, object]) -> list[str]:
        schema = _of_arguments(root)
        properties = schema.get("properties")
        given = schema.get("required")
        required = list(map(str, given)) if isinstance(given, list) else []
        if not isinstance(properties, Mapping):
            properties = {}
        unknown = [name for name in required if name not in properties]
        others = schema.get("additionalProperties", True)
        if isinstance(others, Mapping) and (unknown or not properties):
            raise ValueError('this tool-call format does not support "additionalProperties"')
        if "properties" not in schema and not unknown and others is not False:
            self.book.need(self._form.name_rule())
            one = self._form.any_name(self._any_value())
            return self._any_number_of(one)
        if unknown and others is False:
            raise ValueError(f"no call has {unknown[0]!r:.60}, which is required")
        kinds, texts, room = parameters_of(root), TextValues(root), 4 * MAX_SCHEMA_CHARACTERS
        found = []
        for name, value in (*properties.items(), *((name, True) for name in unknown)):
            if not self._form.PARAMETER_NAME.fullmatch(name):
                raise ValueError(
                    f"in this format names of parameters have {self._form.NOT_IN_PARAMETERS}, and "
                    f"at most {MAX_PARAMETER_NAME_CHARACTERS} characters, got {name!r:.60}"
                )
            if value is False and name not in required:
                continue
            kind = kinds.get(name)
            if self._marked is not None and (kind is None or TEXT in kind):
                expression = texts.of(value)
                if kind is not None and NULL in kind and expression != ANY_TEXT:
                    expression = f'({expression}) | "null"'
                written = self._marked.text(name, self.book.text(self._marked, expression))
            elif (word := self._word_for(value)) is not None:
                written = self._form.json(name, word)
            else:
                schema_of_it = self._schema_of_value(root, value, kind)
                room -= len(schema_of_it)
                if room < 0:
                    raise ValueError("its parameters refer to too much")
                written = self._form.json(name, self.book.json(schema_of_it))
            found.append(Entry(written, name in required))
        return self.book.joined(found, self._form.SEPARATOR)

    def _any_value(self) -> str:
        if self._marked is not None:
            return self.book.text(self._marked, ANY_TEXT)
        return self.book.json("{}")

    def _word_for(self, schema: object) -> str | None:
        """Return what a value is that the format has words for; None: it is JSON."""
        if not isinstance(schema, Mapping) or {*schema} - SAYS_NOTHING != {"type"}:
            return None
        kind = schema["type"]
        return self._form.WORDS.get(kind) if isinstance(kind, str) else None

    def _schema_of_value(
        self, root: Mapping[str, object], schema: object, kinds: Kinds | None
    ) -> str:
        """Return the schema of a value that is JSON, as a document of its own."""
        if schema is True or (schema == {} and OPTIONS not in root):
            return "{}"
        is_other = self._marked is not None and kinds == ALL_BUT_TEXT
        return of_value(root, schema, is_other)

    def _any_number_of(self, parameter: str) -> list[str]:
        separator = self._form.SEPARATOR
        if not separator:
            return [f"({parameter})*"]
        return [f"({parameter} ({separator} {parameter})*)?"]


def _of_arguments(root: Mapping[str, object]) -> Mapping[str, object]:
    """Return the schema that names the parameters: the root, or what it refers to."""
    found: Mapping[str, object] = root
    for _ in range(8):
        for key in _NOT_AT_THE_ROOT:
            if key in found:
                raise ValueError(f'in this format calls as a whole cannot keep to "{key}"')
        if "$ref" not in found:
            return found
        if "properties" in found or "required" in found or "additionalProperties" in found:
            raise ValueError('in this format calls as a whole cannot keep to more than "$ref"')
        target = pointed_to(root, found["$ref"])
        if not isinstance(target, Mapping):
            break
        found = target
    raise ValueError(f"it refers to {root['$ref']!r:.60}, which is no object in it")


class ValuesOfCall(NamedTuple):
    """What values a call has: grammars of its kinds of texts, and schemas of others."""

    texts: list[str]
    schemas: list[str]


def values_of_call(form: ParameterForm, tool: CallableTool) -> ValuesOfCall:
    """Return what a call's values are, each to be looked at by itself. Raises ValueError.

    To the library a grammar of which only a part leads nowhere is not wrong.
    """
    grammars = ParameterGrammars(form)
    grammars.call_of(tool)
    texts: list[str] = []
    if isinstance(form, MarkedForm):
        rules = (form.text_rule("start", expression) for expression in grammars.book.texts)
        texts = ["\n".join(lines) for lines in rules]
    return ValuesOfCall(texts, list(grammars.book.schemas.values()))


def rules_of_calls(
    form: ParameterForm, tools: Sequence[CallableTool]
) -> tuple[list[str], dict[str, str]]:
    """Return the rules of `named`, a call from the name of its function on, and their schemas."""
    grammars = ParameterGrammars(form)
    calls = [grammars.call_of(tool) for tool in tools]
    return [f"named: {' | '.join(calls)}", *grammars.book.lines], grammars.book.schemas
