"""The texts of grammars as the library reads them, within bounds that its own limits lack."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from control_plane.core.structured_outputs import MAX_REGEX_CHARACTERS, StructuredOutputs
from control_plane.core.tool_calls import CallableTool, ToolCalls
from control_plane.structured.call_grammars import PARAMETER_FORMS, check_name, grammar_of_answer
from control_plane.structured.gemma4_grammar import values_of_gemma4
from control_plane.structured.lark import lark_text
from control_plane.structured.parameter_grammars import values_of_call
from control_plane.structured.value_schemas import OPTIONS
from control_plane.text.answers.gemma4_reader import Gemma4Reader

WHITESPACE: Final = r"[ \n\r\t]{1,16}"
"""Between the parts of JSON: enough to indent, and no end of it for a model that goes astray."""


def grammar_of(wanted: StructuredOutputs | ToolCalls) -> str:
    """Return a grammar as the library reads it. Raises ValueError."""
    from llguidance import LLMatcher

    if isinstance(wanted, ToolCalls):
        return _grammar_of_calls(wanted)
    if wanted.grammar is not None:
        return LLMatcher.grammar_from_lark(wanted.grammar)
    if wanted.regex is not None:
        return LLMatcher.grammar_from_regex(wanted.regex)
    if wanted.choice:
        return LLMatcher.grammar_from_lark(f"start: {' | '.join(map(lark_text, wanted.choice))}")
    schema = wanted.json if isinstance(wanted.json, str) else '{"type": "object"}'
    return grammar_of_schema(schema)


def _grammar_of_calls(calls: ToolCalls) -> str:
    """Return the grammar of calls: a list of grammars, the first of which names the others."""
    lark, schemas = grammar_of_answer(calls)
    grammars: list[dict[str, object]] = [{"lark_grammar": lark}]
    for name, schema in schemas.items():
        (grammar,) = json.loads(grammar_of_schema(schema))["grammars"]
        grammars.append({"name": name, "json_schema": grammar["json_schema"]})
    return json.dumps({"grammars": grammars})


def grammars_of_tool(calls: ToolCalls, tool: CallableTool, known: set[str]) -> Iterator[str]:
    """Return what shows whether a tool can be called, one after the other. Raises ValueError.

    The schema as it is comes first: of what answers cannot keep to the library says what it is.
    `known`: values of tools before, which need not be looked at again.
    """
    from llguidance import LLMatcher

    check_name(calls, tool.name)
    yield grammar_of_schema(tool.schema)
    make_form = PARAMETER_FORMS.get(calls.format)
    texts: Sequence[str]
    schemas: Sequence[str]
    if calls.format == Gemma4Reader.FORMAT:
        texts, schemas = values_of_gemma4(tool)
    elif make_form is None:
        return
    else:
        texts, schemas = values_of_call(make_form(), tool)
    for text in texts:
        if text not in known:
            known.add(text)
            yield LLMatcher.grammar_from_lark(text)
    for schema in schemas:
        if schema not in known:
            known.add(schema)
            yield grammar_of_schema(schema)
    yield _grammar_of_calls(replace(calls, tools=(tool,)))


def grammar_of_schema(schema: str) -> str:
    """Return the grammar of the JSON that a schema allows. Raises ValueError."""
    from llguidance import LLMatcher

    options = _check_patterns(schema)
    if isinstance(options, dict) and options.get("whitespace_flexible") is False:
        return LLMatcher.grammar_from_json_schema(schema)  # a pattern would be used all the same
    return LLMatcher.grammar_from_json_schema(
        schema, defaults={"whitespace_flexible": True, "whitespace_pattern": WHITESPACE}
    )


def _check_patterns(schema: str) -> object:
    """Refuse a schema whose regular expressions together are longer than one may be alone.

    Options of the library count as well, some are patterns: 12 000 characters of white space took
    0.8 s. The time that the library takes for one grows with the square of its length: 0.3 s for
    4000 characters. Returns those options. Raises ValueError for what is no JSON.
    """
    try:
        root = json.loads(schema)
        options = root.get(OPTIONS) if isinstance(root, dict) else None
        size = 0 if options is None else len(json.dumps(options))
    except RecursionError:
        raise ValueError("objects and lists are nested too deep") from None
    except ValueError as error:
        raise ValueError(f"it is no JSON: {error}") from None
    if not isinstance(root, dict):
        raise ValueError("a schema must be an object")  # noqa: TRY004 - it is text, and wrong
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting.extend(value)
        if not isinstance(value, dict):
            continue
        waiting.extend(value.values())
        pattern, properties = value.get("pattern"), value.get("patternProperties")
        size += len(pattern) if isinstance(pattern, str) else 0
        size += sum(map(len, properties)) if isinstance(properties, dict) else 0
    if size > MAX_REGEX_CHARACTERS:
        raise ValueError(
            f"its patterns must have at most {MAX_REGEX_CHARACTERS} characters, they have {size}"
        )
    return options
