"""One tool call, read a character at a time: `{"name": …, "arguments": {…}}`.

Arguments are passed on as they are written, from their opening brace on: they are not parsed, so
they are JSON only if the model wrote JSON. Everything before is checked, and held back: what is no
call is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Final

from control_plane.text.answers.parts import Draft
from control_plane.text.answers.until import SPACE
from control_plane.text.conversation import MAX_TOOL_NAME_CHARACTERS

_ARGUMENTS: Final = ("arguments", "parameters")
_OTHERS: Final = ("id", "type")
"""Keys that models write and that say nothing here."""

_IN_TEXT = re.compile(r'["\\]')
_IN_VALUE = re.compile(r'["{}\[\]]')

_HALF = re.compile("[\ud800-\udfff]")
"""Half of a character, which JSON can spell and UTF-8 cannot."""

_Step = Callable[[str, int], int]


class CallObject:
    """Reads one call and tells `draft` of it; `spare` gets what it reads and does not pass on.

    `name`: known already: only the arguments are to come. `takes_bare`: one without arguments is a
    call too. `has_begun`: the draft knows of it, and what was in `spare` before was part of it.
    """

    __slots__ = (
        "_depth",
        "_draft",
        "_early",
        "_is_escaped",
        "_is_in_text",
        "_is_only_arguments",
        "_key",
        "_name",
        "_read",
        "_spare",
        "_step",
        "_takes_bare",
        "_text",
        "has_begun",
        "is_over",
        "is_wrong",
    )

    def __init__(
        self, draft: Draft, spare: list[str], *, name: str | None = None, takes_bare: bool = True
    ) -> None:
        self._draft = draft
        self._spare = spare
        self._name = name
        self._is_only_arguments = name is not None
        self._takes_bare = takes_bare
        self._step: _Step = self._open if name is None else self._arguments
        self._read: Callable[[str], None] = self._take_key
        self._key = ""
        self._text: list[str] = []  # of the key or value that is being read
        self._is_escaped = False
        self._early: list[str] = []  # arguments that came before the name
        self._depth = 0
        self._is_in_text = False
        self.has_begun = False
        self.is_over = False
        self.is_wrong = False

    def push(self, text: str) -> int:
        """Take characters; how many: it stops behind its end, and at what is wrong."""
        at = 0
        while at < len(text) and not (self.is_over or self.is_wrong):
            before, had_begun, step = at, self.has_begun, self._step
            at = step(text, at)
            if self.has_begun and not had_begun:
                self._spare.clear()
            elif not (had_begun and step == self._arguments):
                self._spare.append(text[before:at])
        return at

    # --- the steps: each takes some characters from `at` on, and returns where it stopped ---

    def _open(self, text: str, at: int) -> int:
        if text[at] != "{":
            return self._fail(at)
        self._step = self._want_key
        return at + 1

    def _want_key(self, text: str, at: int) -> int:
        if text[at] in SPACE:
            return at + 1
        if text[at] == "}":
            return self._close(at)
        if text[at] != '"':
            return self._fail(at)
        self._read, self._step = self._take_key, self._string
        return at + 1

    def _string(self, text: str, at: int) -> int:
        """Read to the end of a key or a short value."""
        room = MAX_TOOL_NAME_CHARACTERS - sum(map(len, self._text))
        start = at
        while at < len(text):
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            found = _IN_TEXT.search(text, at)
            end = len(text) if found is None else found.start()
            if end - start > room:
                return self._fail(start + room)
            if found is None:
                at = end
            elif text[end] == "\\":
                self._is_escaped = True
                at = end + 1
            else:
                return self._end_string(text[start:end], end)
        if at - start > room:
            return self._fail(start + room)
        self._text.append(text[start:at])
        return at

    def _end_string(self, last: str, at: int) -> int:
        raw, self._text = "".join((*self._text, last)), []
        try:
            value = json.loads(f'"{raw}"', strict=False)
        except ValueError:
            return self._fail(at)
        self._read(value)
        return at if self.is_wrong else at + 1

    def _take_key(self, key: str) -> None:
        self._key, self._step = key, self._colon
        if key not in ("name", *_ARGUMENTS, *_OTHERS):
            self.is_wrong = True

    def _colon(self, text: str, at: int) -> int:
        if text[at] in SPACE:
            return at + 1
        if text[at] != ":":
            return self._fail(at)
        self._step = self._value
        return at + 1

    def _value(self, text: str, at: int) -> int:
        if text[at] in SPACE:
            return at + 1
        if self._key in _ARGUMENTS:
            if text[at] != "{" or self.has_begun or self._early:
                return self._fail(at)
            self._step = self._arguments
            return at  # they begin with it
        if text[at] != '"':
            return self._fail(at)
        self._read = self._take_name if self._key == "name" else self._take_other
        self._step = self._string
        return at + 1

    def _take_name(self, name: str) -> None:
        self._step = self._want_comma
        if not name or self._name is not None or _HALF.search(name):
            self.is_wrong = True
            return
        self._name = name
        if self._early:
            self._begin()
            self._draft.add_arguments("".join(self._early))
            self._draft.end_call()

    def _take_other(self, _: str) -> None:
        self._step = self._want_comma

    def _arguments(self, text: str, at: int) -> int:
        """Pass on what lies between the first brace and the one that closes it."""
        if self._depth == 0 and text[at] != "{":
            return self._fail(at)
        if self._name is not None and not self.has_begun:
            self._begin()
        end = self._end_of_value(text, at)
        if self.has_begun:
            self._draft.add_arguments(text[at:end])
        else:
            self._early.append(text[at:end])
        if self._depth == 0:
            self._step = self._want_comma
            self.is_over = self._is_only_arguments
            if self.has_begun:
                self._draft.end_call()
        return end

    def _end_of_value(self, text: str, at: int) -> int:
        """Return where an object ends; the end of the text if that is beyond."""
        while at < len(text):
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            found = (_IN_TEXT if self._is_in_text else _IN_VALUE).search(text, at)
            if found is None:
                return len(text)
            at, mark = found.end(), found.group()
            if mark == "\\":
                self._is_escaped = True
            elif mark == '"':
                self._is_in_text = not self._is_in_text
            elif mark in "{[":
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth == 0:
                    return at
        return at

    def _want_comma(self, text: str, at: int) -> int:
        if text[at] in SPACE:
            return at + 1
        if text[at] == "}":
            return self._close(at)
        if text[at] != ",":
            return self._fail(at)
        self._step = self._want_key
        return at + 1

    def _close(self, at: int) -> int:
        if not self.has_begun:
            if self._name is None or not self._takes_bare:
                return self._fail(at)
            self._begin()
            self._draft.add_arguments("{}")
            self._draft.end_call()
        self.is_over = True
        return at + 1

    def _begin(self) -> None:
        self.has_begun = True
        self._draft.begin_call(self._name or "")

    def _fail(self, at: int) -> int:
        self.is_wrong = True
        return at
