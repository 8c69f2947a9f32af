"""Calls of Gemma 4 in Lark's notation, as `Gemma4Reader` reads them and templates write them."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence

from control_plane.core.tool_calls import CallableTool, ToolCalls
from control_plane.structured.call_rules import behind_marks, mark_of
from control_plane.structured.lark import lark_text
from control_plane.structured.quoted_values import QuotedValues, TextsUpToMark
from control_plane.structured.refusals import NameRefusedError
from control_plane.structured.rule_book import RuleBook
from control_plane.text.answers.gemma4_arguments import QUOTE
from control_plane.text.answers.gemma4_reader import CALL, Gemma4Reader

_NAME = re.compile(r"[^\s<>{}](?:[^<>{}\r\n]*[^\s<>{}])?")
"""Of functions, as it is read."""


def gemma4_rules(calls: ToolCalls) -> tuple[list[str], dict[str, str]]:
    """Return the rules of an answer, and the schemas that they name. Raises ValueError."""
    mark, book = functools.partial(mark_of, calls), RuleBook()
    bodies = [
        f"{lark_text(tool.name)} {_arguments(tool, book, mark(QUOTE))}" for tool in calls.tools
    ]
    lines = [
        *behind_marks(calls, Gemma4Reader.MARKERS[0]),
        f"call: {lark_text(CALL)} ({' | '.join(bodies)}) {mark(Gemma4Reader.CLOSING)}",
    ]
    return [*lines, *book.lines], book.schemas


def check_gemma4_name(name: str) -> None:
    """Raise NameRefusedError for a function that no call can name."""
    if not _NAME.fullmatch(name):
        raise NameRefusedError(
            "in this format names have no <, >, {, } or line breaks, and no space at their ends"
        )


def values_of_gemma4(tool: CallableTool) -> tuple[Sequence[str], Sequence[str]]:
    """Return grammars of a call's texts and schemas of its other values. Raises ValueError."""
    book, quote = RuleBook(), lark_text(QUOTE)
    _arguments(tool, book, quote)
    form = TextsUpToMark(quote)
    texts = ["\n".join(form.text_rule("start", text)) for text in book.texts]
    return texts, list(book.schemas.values())


def _arguments(tool: CallableTool, book: RuleBook, quote: str) -> str:
    try:
        return QuotedValues(json.loads(tool.schema), book, quote).of_arguments()
    except RecursionError:
        raise ValueError("objects and lists are nested too deep") from None
