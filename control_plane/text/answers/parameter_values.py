"""The value of one parameter, of formats that quote nothing, read out of its text, told as JSON.

A value stands between two marks: what it is its tool's schema says. Texts are told as they come,
other values once they are whole.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from typing import Final, NamedTuple, NoReturn

from control_plane.text.answers.parameter_kinds import ALL_BUT_TEXT, NULL, TEXT, Kinds
from control_plane.text.answers.until import SPACE
from control_plane.text.stop_strings import StopMatcher


class ValueMarks(NamedTuple):
    """What closes a value: `closing`, and what else shows that this is it is not a part of it.

    `inline`: of a value that begins on the line of its opening mark. `on_own_line`: of one that
    begins with a newline, which is no part of it; None: it is.

    `may_be_quoted`: what closes a value may stand in a text of an object or a list, which has no
    newline that would tell it.
    """

    closing: str
    inline: tuple[str, ...]
    on_own_line: tuple[str, ...] | None = None
    may_be_quoted: bool = False


_NULLS: Final = ("null", "None")
_WORDS: Final = {"True": "true", "False": "false", "None": "null"}
"""As templates write them, in Python's words."""

_IN_BRACKETS: Final = frozenset(("array", "object"))
_MOST_PYTHON: Final = 1 << 14
"""Characters."""

_QUOTE: Final = re.compile(r'["\\]')

_BEGIN_JSON: Final = "{[-0123456789tfn"
"""What JSON may begin with, but for a text."""


class ParameterValue:
    """Reads one value up to what closes it, and gives `write` its JSON.

    `kinds`: what it may be; None: not known: JSON other than a text where it is some, else a text.
    `is_unread`: it is told as it stands, closing mark included. `knows_quotes`: a mark in a text of
    an object or a list does not close it, where the value is known to be no text.
    """

    __slots__ = (
        "_held",
        "_is_first",
        "_is_text",
        "_is_unread",
        "_kinds",
        "_marks",
        "_matcher",
        "_may_be_text",
        "_quotes",
        "_write",
        "has_wrong_quotes",
        "is_over",
    )

    def __init__(
        self,
        marks: ValueMarks,
        kinds: Kinds | None,
        write: Callable[[str], None],
        *,
        is_unread: bool = False,
        knows_quotes: bool = False,
    ) -> None:
        self._marks = marks
        self._kinds = None if kinds == ALL_BUT_TEXT else kinds
        self._write = write
        self._is_unread = is_unread
        self._matcher: StopMatcher | None = None
        self._held: list[str] = []  # of a value that is told once it is whole
        self._is_first = True  # nothing has come but the newline in front
        self._may_be_text = (
            self._kinds is None or TEXT in self._kinds
        )  # and begin before it is whole
        self._is_text = False  # it is one, and was begun
        # Of what may be a text a grammar allows any quotes.
        is_other = kinds is not None and TEXT not in kinds
        self._quotes = _Quotes() if knows_quotes and is_other else None
        self.is_over = False
        self.has_wrong_quotes = False

    def push(self, text: str) -> str:
        """Take the next piece, not empty; what stands behind the value."""
        while True:
            if self._matcher is None:
                on_own_line = self._marks.on_own_line if text[0] == "\n" else None
                self._matcher = StopMatcher(on_own_line or self._marks.inline)
            known = self._matcher.held + text
            released, end = self._matcher.push(text)
            self._take(released)
            if self._quotes is not None:
                self._quotes.take(released)
            if end is None:
                return ""
            text = known[len(released) + len(end) :]
            if self._quotes is None or not self._quotes.is_open:
                break
            self._take(end)
            self._quotes.num_marks += 1
            self._matcher = None
            if not text:
                return ""
        if self._quotes is not None and self._quotes.num_marks and not self._is_json():
            return self._close_at_first_mark() + end + text
        self.is_over = True
        before, closing, behind = end.partition(self._marks.closing)
        self._close(before + closing)
        return behind + text

    def cut_off(self) -> str:
        """Take note that the text ends in the value: what there is of it is told as it is.

        What may be a closing mark that was begun is left out. What is returned stood behind the
        value, where it turns out to be over.
        """
        if self._quotes is not None and self._quotes.num_marks:
            held = "" if self._matcher is None else self._matcher.finish()
            return self._close_at_first_mark() + held
        if self._is_unread or self._is_text or not self._held:
            return ""
        if self._kinds is not None and TEXT in self._kinds:
            self._begin_text()
        else:
            self._write("".join(self._held))
        return ""

    def _is_json(self) -> bool:
        return _json_of("".join(self._held), frozenset()) is not None

    def _close_at_first_mark(self) -> str:
        """Let the first mark close the value, which has wrong quotes; what stood behind it."""
        held, _, behind = "".join(self._held).partition(self._marks.closing)
        self._held = [held]
        self.is_over = self.has_wrong_quotes = True
        self._close("")
        return behind

    def _take(self, text: str) -> None:
        if self._is_unread:
            self._write(text)
            return
        if text and self._is_first:
            self._is_first = False
            if self._marks.on_own_line is not None:
                text = text.removeprefix("\n")
        if not text:
            return
        if self._is_text:
            self._write(_escaped(text))
            return
        self._held.append(text)
        if self._must_be_text():
            self._begin_text()

    def _must_be_text(self) -> bool:
        """Whether what is held can be nothing else."""
        if not self._may_be_text:
            return False
        if self._kinds is None:
            begun = self._held[-1].lstrip(SPACE)
            self._may_be_text = not begun or begun[0] not in _BEGIN_JSON
            return bool(begun) and self._may_be_text
        if NULL not in self._kinds:
            return True
        begun = "".join(self._held)  # a few characters: of more it is a text
        return not any(word.startswith(begun) for word in _NULLS)

    def _begin_text(self) -> None:
        held = "".join(self._held)
        self._held.clear()
        self._is_text = True
        self._write(f'"{_escaped(held)}')

    def _close(self, mark: str) -> None:
        if self._is_unread:
            self._write(mark)
            return
        if not self._is_text:
            value = _json_of("".join(self._held), self._kinds)
            if value is not None:
                self._write(value)
                return
            self._begin_text()
        self._write('"')


class _Quotes:
    """Whether a text is open where an object or a list has come to. `num_marks`: seen in some."""

    __slots__ = ("_is_escaped", "_may_have_some", "is_open", "num_marks")

    def __init__(self) -> None:
        self._may_have_some: bool | None = None  # nothing has come but space
        self._is_escaped = False
        self.is_open = False
        self.num_marks = 0

    def take(self, text: str) -> None:
        if self._may_have_some is None:
            text = text.lstrip(SPACE)
            self._may_have_some = text[0] in "{[" if text else None
        if not self._may_have_some:
            return
        at = 0
        while at < len(text):
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            found = _QUOTE.search(text, at)
            if found is None:
                return
            at = found.end()
            if found.group() == '"':
                self.is_open = not self.is_open
            else:
                self._is_escaped = self.is_open


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _json_of(text: str, kinds: Kinds | None) -> str | None:
    """Return the JSON that a value is; None: it is a text."""
    word = text.strip(SPACE)
    if kinds is not None and TEXT in kinds:
        return "null" if NULL in kinds and text in _NULLS else None
    if kinds is not None and word in _WORDS:
        return _WORDS[word]
    try:
        value = json.loads(word, parse_constant=_refuse)
    except (ValueError, RecursionError):  # an integer may be too long, too
        return _json_of_python(word) if kinds and kinds & _IN_BRACKETS else None
    return None if kinds is None and isinstance(value, str) else word


def _json_of_python(word: str) -> str | None:
    """Return the JSON of an object or a list as Python spells it, which some templates write."""
    if word[:1] not in ("[", "{") or len(word) > _MOST_PYTHON:
        return None
    try:
        value = ast.literal_eval(word)
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def _refuse(word: str) -> NoReturn:
    """Python reads NaN and infinities, which JSON does not have."""
    raise ValueError(word)
