"""One text as Python spells it, between quotes of one kind, told as JSON piece by piece.

JSON's texts are read, too: what both know means the same, and halves of characters pass through.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Final

from control_plane.text.answers.until import SPACE

QUOTES: Final = "\"'"

_IN_TEXT: Final = {quote: re.compile(rf"[\\{quote}]") for quote in QUOTES}
_ESCAPES: Final = {
    "n": r"\n",
    "t": r"\t",
    "r": r"\r",
    "b": r"\b",
    "f": r"\f",
    "\n": "",
    "a": r"\u0007",
    "v": r"\u000b",
    '"': r"\"",
    "\\": r"\\",
    "'": "'",
    "/": "/",
}
_DIGITS: Final = {"x": 2, "u": 4, "U": 8}
_HEX: Final = frozenset("0123456789abcdefABCDEF")
_OCTAL: Final = frozenset("01234567")
_HALVES: Final = range(0xD800, 0xE000)
"""Numbers of halves of characters, which no text has."""

_THREE: Final = 3
"""Quotes that begin and end a text in which single ones are text."""

_Step = Callable[[str, int], int]


class PythonText:
    """Reads what stands behind a quote, and gives `tell` its JSON, quotes included.

    `ends`: what may follow the text. A quote that none of it follows is a part of the text:
    templates escape none. `is_over`: the text has ended.
    """

    def __init__(self, quote: str, tell: Callable[[str], None], *, ends: str) -> None:
        self._quote = quote
        self._tell = tell
        self._ends = ends
        self._num_quotes = 1  # that begin the text
        self._held: list[str] = []  # what may close it, or stand in it
        self._escape = ""
        self._step: _Step = self._behind_first_quote
        self.is_over = False

    def take(self, text: str, at: int) -> int:
        """Take some characters from `at` on; where it stopped."""
        return self._step(text, at)

    def _behind_first_quote(self, text: str, at: int) -> int:
        """Take further quotes: three of them begin a text, too, and two are an empty one."""
        if text[at] == self._quote and self._num_quotes < _THREE:
            self._num_quotes += 1
            return at + 1
        self._tell('"')
        if self._num_quotes == _THREE - 1:
            self._num_quotes = 1
            self._held.append(self._quote)
            self._step = self._behind_last_quote
        else:
            self._step = self._in_text
        return at

    def _in_text(self, text: str, at: int) -> int:
        found = _IN_TEXT[self._quote].search(text, at)
        end = len(text) if found is None else found.start()
        if end > at:
            self._tell(_escaped(text[at:end]))
        if found is None:
            return end
        if found.group() == "\\":
            self._step = self._in_escape
        else:
            self._held.append(self._quote)
            is_one = self._num_quotes == 1
            self._step = self._behind_last_quote if is_one else self._behind_three_quotes
        return end + 1

    def _behind_last_quote(self, text: str, at: int) -> int:
        """Take space; what was a quote within the text shows there."""
        rest = text[at:].lstrip(SPACE)
        behind = len(text) - len(rest)
        self._held.append(text[at:behind])
        if rest and rest[0] in self._ends:
            self._end()
        elif rest:
            self._go_on()
        return behind

    def _behind_three_quotes(self, text: str, at: int) -> int:
        """Take further quotes: three of them end the text."""
        if text[at] != self._quote:
            self._go_on()
            return at
        self._held.append(self._quote)
        if len(self._held) == _THREE:
            self._end()
        return at + 1

    def _end(self) -> None:
        self._tell('"')
        self.is_over = True

    def _go_on(self) -> None:
        """Go on with the text: what was held back is a part of it."""
        self._tell(_escaped("".join(self._held)))
        self._held.clear()
        self._step = self._in_text

    def _in_escape(self, text: str, at: int) -> int:
        """Take the characters behind a backslash."""
        mark = text[at]
        if not self._escape:
            if mark in _ESCAPES:
                self._tell(_ESCAPES[mark])
                self._step = self._in_text
            elif mark in _DIGITS or mark in _OCTAL:
                self._escape = mark
            else:
                self._tell("\\\\")  # Python keeps what it does not know
                self._step = self._in_text
                return at
            return at + 1
        kind = self._escape[0]
        digits, most = (_HEX, 1 + _DIGITS[kind]) if kind in _DIGITS else (_OCTAL, 3)
        if mark in digits and len(self._escape) < most:
            self._escape += mark
            at += 1
            if len(self._escape) < most:
                return at
        self._tell(_escape_of(self._escape))
        self._escape = ""
        self._step = self._in_text
        return at


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _escape_of(escape: str) -> str:
    """Return the JSON of what follows a backslash: digits, with what says how many behind it."""
    kind, digits = escape[0], escape[1:]
    if kind in _OCTAL:
        return _escaped(chr(int(escape, 8)))
    if len(digits) < _DIGITS[kind]:
        return f"\\\\{escape}"
    number = int(digits, 16)
    if kind == "u" or number in _HALVES:
        return f"\\u{number:04x}"  # as JSON spells it: it may be half of a character
    return _escaped(chr(number)) if number <= 0x10FFFF else f"\\\\{escape}"
