"""Texts and regular expressions in Lark's notation, as the grammar library reads it."""

from __future__ import annotations

import json
import re
from typing import Final

_SLASH: Final = re.compile(r"\\.|[/\n]", re.DOTALL)


def lark_text(text: str) -> str:
    """Return a text."""
    spelled = json.dumps(text, ensure_ascii=False)
    return spelled.replace("\x7f", r"\u007f")  # which it does not take as it is


def lark_regex(pattern: str) -> str:
    """Return a regular expression, which must not be empty."""
    return f"/{_SLASH.sub(_escaped, pattern)}/"


def without(marks: str) -> str:
    """Return what to add to a text in which no mark must be; `marks`: a regular expression."""
    return f" & ~{lark_regex(f'(?s:.*)(?:{marks})(?s:.*)')}"


def _escaped(found: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(found.group(), found.group())
