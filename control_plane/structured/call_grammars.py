"""Calls of tools in Lark's notation, each format as its reader reads it.

What the readers of `control_plane.text.answers` skip, white space for one, is written here in one
way, that of the chat templates: a model finds what it has learnt, and a mask leaves it no more than
it needs.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from control_plane.core.tool_calls import ToolCalls
from control_plane.structured.call_rules import (
    behind_marks,
    behind_one_mark,
    further,
    mark_of,
    text_and_calls,
    unspelled,
)
from control_plane.structured.gemma4_grammar import check_gemma4_name, gemma4_rules
from control_plane.structured.harmony_grammar import check_harmony_name, harmony_rules
from control_plane.structured.lark import lark_regex, lark_text
from control_plane.structured.parameter_forms import FORMS, MAYBE_LINE, ParameterForm
from control_plane.structured.parameter_grammars import rules_of_calls
from control_plane.structured.pythonic_forms import PYTHONIC_FORMS
from control_plane.structured.refusals import NameRefusedError
from control_plane.text.answers.formats import CALL_READERS
from control_plane.text.answers.gemma4_reader import Gemma4Reader
from control_plane.text.answers.harmony_reader import HarmonyReader
from control_plane.text.answers.list_readers import GraniteReader
from control_plane.text.answers.section_readers import (
    ARGUMENTS,
    FENCE,
    PLAIN_NAME,
    SEPARATOR,
    DeepSeekV3Reader,
    DeepSeekV31Reader,
    KimiReader,
    SectionReader,
)

_MAYBE_SPACE: Final = "/[ \\n]{1,4}/?"
"""Beside reasoning."""

_PLAIN_NAME: Final = re.compile(r"[\w.-]+", re.ASCII)
"""What may stand between marks of Mistral's."""


PARAMETER_FORMS: Final[Mapping[str, type[ParameterForm]]] = {**FORMS, **PYTHONIC_FORMS}
"""Of formats that write each parameter by itself."""


class CallGrammar(NamedTuple):
    """The grammar of an answer. `schemas`: of what it names with `@`, by these names."""

    lark: str
    schemas: Mapping[str, str]


def grammar_of_answer(calls: ToolCalls) -> CallGrammar:
    """Return the grammar of an answer with calls. Raises ValueError.

    Reasoning comes first where there may be some.
    """
    if calls.format == HarmonyReader.FORMAT:
        return CallGrammar("\n".join((*harmony_rules(calls), "")), _schemas(calls))
    if calls.format in FORMS:
        lines, schemas = _with_parameters(calls)
    elif calls.format in PYTHONIC_FORMS:
        lines, schemas = _pythonic(calls)
    elif calls.format == Gemma4Reader.FORMAT:
        lines, schemas = gemma4_rules(calls)
    else:
        lines = _OBJECTS[calls.format](calls)
        schemas = _schemas(calls)
    start = "calls"
    if calls.thought != "none":
        is_begun = calls.thought == "has begun"
        start = "thought calls" if is_begun else f"({_begin_of_thought(calls)} thought)? calls"
        lines += _thought(calls)
    return CallGrammar("\n".join((f"start: {start}", *lines, "")), schemas)


def check_name(calls: ToolCalls, name: str) -> None:
    """Raise NameRefusedError for a function that no header, of a section or other, can name."""
    reader = CALL_READERS[calls.format]
    if issubclass(reader, HarmonyReader):
        check_harmony_name(name)
    if issubclass(reader, Gemma4Reader):
        check_gemma4_name(name)
    if issubclass(reader, SectionReader) and not PLAIN_NAME.fullmatch(name):
        raise NameRefusedError(
            "in this format names have no <, >, {, ` or line breaks, and no space at their ends"
        )


def _schemas(calls: ToolCalls) -> dict[str, str]:
    return {_schema_name(index): tool.schema for index, tool in enumerate(calls.tools)}


def _schema_name(index: int) -> str:
    return f"tool_{index}"


def _begin_of_thought(calls: ToolCalls) -> str:
    """Return the mark of reasoning, and space in front of it; all in one, or the rest is text."""
    marks = calls.thought_marks
    if marks.begin in dict(calls.tokens):
        label = f" {lark_text(marks.label)}" if marks.label else ""
        return f"{_MAYBE_SPACE} {mark_of(calls, marks.begin)}{label}"
    return lark_regex(rf"[ \n]{{0,4}}{re.escape(marks.opening)}")


def _thought(calls: ToolCalls) -> list[str]:
    """Return the rules of what follows the mark of reasoning."""
    mark = calls.thought_marks.end
    end = dict(calls.tokens).get(mark)
    if end is None:
        inner = [f'reasoning[suffix="{mark}"]: /(?s:.*)/']
    else:
        inner = [f"reasoning: REASONING? <[{end}]>", f"REASONING: /(?s:.+)/{unspelled(mark)}"]
    return [f"thought: reasoning {_MAYBE_SPACE}", *inner]


def _hermes(calls: ToolCalls) -> list[str]:
    return [
        *behind_marks(calls, "<tool_call>", between=lark_text("\n")),
        f'call: "\\n" object "\\n" {mark_of(calls, "</tool_call>")}',
        *_object(calls, "arguments"),
    ]


def _llama3_json(calls: ToolCalls) -> list[str]:
    """Without the tag only at the beginning of a message; with it where models have it."""
    tag = "<|python_tag|>"
    more = further(calls, '"; " object')
    objects = f"call: object {more}"
    if calls.may_say:
        lines = text_and_calls(
            calls, tag, begins_with_call=calls.is_start, goes_on=r";[ \t\r\n]*\{"
        )
    else:
        has_tag = tag in dict(calls.tokens)
        begin = "" if not has_tag and calls.is_start else mark_of(calls, tag)
        begin += "?" if has_tag and calls.is_start else ""
        lines = [f"calls: {begin} call"]
    return [*lines, objects, *_object(calls, "parameters")]


def _mistral(calls: ToolCalls) -> list[str]:
    """As a list, and, where models have its mark, with the name in front; they know which.

    So they do of the id, which those of one year write behind the name.
    """
    more = further(calls, '", " object')
    has_ids = "[CALL_ID]" in dict(calls.tokens)
    call_id = f"({mark_of(calls, '[CALL_ID]')} /[a-zA-Z0-9]{{9}}/)?" if has_ids else ""
    named = [
        f"{lark_text(tool.name)} {call_id} {mark_of(calls, '[ARGS]')} @{_schema_name(index)}"
        for index, tool in enumerate(calls.tools)
        if _PLAIN_NAME.fullmatch(tool.name)
    ]
    if "[ARGS]" not in dict(calls.tokens):
        named = []
    return [
        *behind_marks(calls, "[TOOL_CALLS]"),
        " | ".join((f'call: " "? "[" object {more} "]"', *named)),
        *_object(calls, "arguments"),
    ]


def _granite(calls: ToolCalls) -> list[str]:
    """With the one mark that newer models have; in text the other begins calls, too."""
    mark, other = GraniteReader.MARKERS
    more = further(calls, '", " object')
    rules = [f'call: "[" object {more} "]"', *_object(calls, "arguments")]
    if calls.may_say:
        return [*text_and_calls(calls, mark, bare=other), "bare_call: call", *rules]
    return [*behind_one_mark(calls, mark), *rules]


def _with_parameters(calls: ToolCalls) -> tuple[list[str], dict[str, str]]:
    """Return the schemas of values, too. Qwen3-Coder's may come in text without the first mark.

    Not every schema that JSON keeps to can be kept to.
    """
    form = FORMS[calls.format](functools.partial(mark_of, calls))
    named, schemas = rules_of_calls(form, calls.tools)
    begin, line = form.BEFORE_NAME, form.BEFORE_CLOSING
    end = f"{lark_text(line)} {mark_of(calls, form.READER.CLOSING)}"
    if form.IS_IN_SECTION:
        more = further(calls, f"{form.BETWEEN} named")
        section = f"call: {lark_text(begin)} named {more} {end}"
        return [
            *behind_one_mark(calls, form.READER.MARKERS[0], before=MAYBE_LINE),
            section,
            *named,
        ], schemas
    lines = [
        *behind_marks(
            calls,
            form.READER.MARKERS[0],
            between=form.BETWEEN,
            before=MAYBE_LINE,
            bare=form.BARE,
        ),
        f"call: {lark_text(begin)} named {end}",
        *named,
    ]
    if calls.may_say and form.BARE is not None:
        lines.append(f"bare_call: named ({end})?")
    return lines, schemas


def _pythonic(calls: ToolCalls) -> tuple[list[str], dict[str, str]]:
    """Return the schemas of values, too: of a call as a whole they are none."""
    form = PYTHONIC_FORMS[calls.format](functools.partial(mark_of, calls))
    named, schemas = rules_of_calls(form, calls.tools)
    mark, closing = form.READER.MARKERS[0], mark_of(calls, form.READER.CLOSING)
    more = further(calls, f"{form.BETWEEN} named")
    parts = (form.OPENING, "named", more, form.ENDING, closing)
    return [*behind_one_mark(calls, mark), f"call: {' '.join(parts)}", *named], schemas


def _deepseek_v3(calls: ToolCalls) -> list[str]:
    def header(name: str) -> str:
        block = lark_text(f"{name}\n{FENCE}json\n")
        return f'"function" {mark_of(calls, SEPARATOR)} {block}'

    fence = lark_text(f"\n{FENCE}")
    return _section(calls, DeepSeekV3Reader, header, behind=fence, between=lark_text("\n"))


def _deepseek_v31(calls: ToolCalls) -> list[str]:
    def header(name: str) -> str:
        return f"{lark_text(name)} {mark_of(calls, SEPARATOR)}"

    return _section(calls, DeepSeekV31Reader, header)


def _kimi(calls: ToolCalls) -> list[str]:
    """With any number behind a name: templates count the calls of a conversation."""

    def header(name: str) -> str:
        return f"{lark_text(f'functions.{name}:')} /[0-9]{{1,4}}/ {mark_of(calls, ARGUMENTS)}"

    return _section(calls, KimiReader, header)


def _section(
    calls: ToolCalls,
    reader: type[SectionReader],
    header: Callable[[str], str],
    *,
    behind: str = "",
    between: str = "",
) -> list[str]:
    """Return the rules of an answer with calls in sections; one of them where they must be.

    `header`: makes what stands in front of the arguments of a call. `behind`: what stands behind
    them, `between`: between two calls.
    """
    bodies = [
        f"{header(tool.name)} @{_schema_name(index)}" for index, tool in enumerate(calls.tools)
    ]
    begin, end = mark_of(calls, reader.BEGIN), mark_of(calls, reader.END)
    more = further(calls, f"{between} {begin} called")
    section = [
        f"call: {begin} called {more} {mark_of(calls, reader.CLOSE)}",
        f"called: ({' | '.join(bodies)}) {behind} {end}",
    ]
    return [*behind_one_mark(calls, reader.OPEN), *section]


def _object(calls: ToolCalls, key: str) -> list[str]:
    """Return the rules of a call as an object of JSON."""
    bodies = [
        lark_text(f'{json.dumps(tool.name, ensure_ascii=False)}, "{key}": ')
        + f" @{_schema_name(index)}"
        for index, tool in enumerate(calls.tools)
    ]
    begin = lark_text('{"name": ')
    return [f'object: {begin} body "}}"', f"body: {' | '.join(bodies)}"]


_OBJECTS: Final[Mapping[str, Callable[[ToolCalls], list[str]]]] = {
    "hermes": _hermes,
    "llama3_json": _llama3_json,
    "mistral": _mistral,
    GraniteReader.FORMAT: _granite,
    DeepSeekV3Reader.FORMAT: _deepseek_v3,
    DeepSeekV31Reader.FORMAT: _deepseek_v31,
    KimiReader.FORMAT: _kimi,
}
