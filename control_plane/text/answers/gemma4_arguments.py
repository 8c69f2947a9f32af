"""The arguments of a call as Gemma 4 writes them, `{a:<|"|>x<|"|>,b:[1,true]}`, told as JSON.

Texts stand between marks and have no escapes; names have no quotes. Texts between marks are told as
they come, other values once they are whole. JSON is read, too, and what is no literal is a text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Final

from control_plane.text.answers.keyword_arguments import json_of_word
from control_plane.text.answers.python_texts import PythonText
from control_plane.text.answers.until import SPACE
from control_plane.text.stop_strings import StopMatcher

QUOTE: Final = '<|"|>'
END_OF_CALL: Final = "<tool_call|>"
PLAIN_KEY: Final = re.compile(r"""[^\s:,{}\[\]<"](?:[^:,{}\[\]<\r\n]*[^\s:,{}\[\]<])?""")
"""A name that is read as it stands, without marks around it."""

_JSON_QUOTE: Final = '"'
_OPENING: Final = "{["
_CLOSING: Final = "}]"
_END_OF_KEY: Final = re.compile(r"[:,}\]]")
_END_OF_WORD: Final = re.compile(r"[,}\]]")

_Step = Callable[[str, int], int]


class Gemma4Arguments:
    """Reads what stands behind the opening brace of arguments, and gives `write` its JSON.

    `is_over`: their end has come. `is_closed`: with the mark that ends a call, where braces miss.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._step: _Step = self._want_entry
        self._open = [_Bracket(is_list=False)]
        self._matcher = StopMatcher((QUOTE, END_OF_CALL))
        self._quoted: Callable[[str], None] | None = None  # takes what stands between two marks
        self._word: list[str] = []  # as much as has come of it, or of a name between marks
        self._key: list[str] = []  # a text as JSON
        self._text = PythonText(_JSON_QUOTE, write, ends="")
        self.is_over = False
        self.is_closed = False
        write("{")

    def push(self, text: str) -> int:
        """Take characters; how many: it stops behind its end."""
        at = 0
        while at < len(text) and not self.is_over:
            num_held = len(self._matcher.held)
            released, mark = self._matcher.push(text[at:])
            taken = self._take(released)
            if self.is_over:
                return at + taken - num_held
            if mark is None:
                return len(text)
            at += len(released) + len(mark) - num_held
            self._take_mark(mark)
            is_open = self._quoted is not None
            self._matcher = StopMatcher((QUOTE,) if is_open else (QUOTE, END_OF_CALL))
        return at

    def cut_off(self) -> None:
        """Take note that the text ends in the arguments: what was held of a value is told."""
        if self._step == self._in_word:
            value = json_of_word("".join(self._word).strip(SPACE))
            self._write(value[:-1] if value.startswith('"') else value)

    def _take(self, text: str) -> int:
        """Take text without marks; how much."""
        if self._quoted is not None and text:
            self._quoted(text)
            return len(text)
        at = 0
        while at < len(text) and not self.is_over:
            at = self._step(text, at)
        return at

    # --- marks ---

    def _take_mark(self, mark: str) -> None:
        if self._quoted is not None:
            self._end_quoted()
        elif self._step in (self._in_json_key, self._in_json_text):
            self._take(mark)  # it is a part of that
        elif mark == QUOTE and self._is_in_word:
            self._word.append(mark)
        elif mark == QUOTE:
            self._begin_quoted()
        else:
            self._close_all()

    @property
    def _is_in_word(self) -> bool:
        return self._step in (self._in_word, self._in_key) and bool("".join(self._word).strip())

    def _begin_quoted(self) -> None:
        if self._step == self._want_entry and self._open[-1].is_list:
            self._begin_entry()
        if self._step in (self._want_entry, self._in_key):
            self._word.clear()
            self._quoted, self._step = self._word.append, self._behind_key
        elif self._step == self._behind_value:
            self._quoted = _leave_out
        else:
            if self._step == self._behind_key:
                self._end_key()
            self._write('"')
            self._quoted, self._step = self._tell_quoted, self._behind_value

    def _tell_quoted(self, text: str) -> None:
        self._write(json.dumps(text, ensure_ascii=False)[1:-1])

    def _end_quoted(self) -> None:
        if self._quoted == self._tell_quoted:
            self._write('"')
        elif self._step == self._behind_key:
            self._key = [json.dumps("".join(self._word), ensure_ascii=False)]
            self._word.clear()
        self._quoted = None

    def _close_all(self) -> None:
        """Take the end of the call: braces and values that miss are not missed."""
        if self._step == self._in_word:
            self._end_word()
        elif self._step in (self._in_key, self._behind_key, self._want_value):
            self._end_without_value()
        for bracket in reversed(self._open):
            self._write("]" if bracket.is_list else "}")
        self.is_over = self.is_closed = True

    # --- entries of objects and lists ---

    def _want_entry(self, text: str, at: int) -> int:
        """Take space and commas, up to an entry or the end of what is open."""
        mark = text[at]
        if mark in SPACE or mark == ",":
            return at + 1
        if mark in _CLOSING:
            return self._close(mark, at)
        if self._open[-1].is_list:
            self._begin_entry()
        elif mark == _JSON_QUOTE:
            self._key = []
            self._text = PythonText(_JSON_QUOTE, self._key.append, ends=":")
            self._step = self._in_json_key
            return at + 1
        else:
            self._word.clear()
            self._step = self._in_key
        return at

    def _begin_entry(self) -> None:
        """Begin a value of a list."""
        self._separate()
        self._step = self._want_value

    def _separate(self) -> None:
        bracket = self._open[-1]
        if bracket.num_entries:
            self._write(", ")
        bracket.num_entries += 1

    def _in_json_key(self, text: str, at: int) -> int:
        at = self._text.take(text, at)
        if self._text.is_over:
            self._step = self._behind_key
        return at

    def _in_key(self, text: str, at: int) -> int:
        found = _END_OF_KEY.search(text, at)
        end = len(text) if found is None else found.start()
        self._word.append(text[at:end])
        if found is not None:
            self._take_key()
            self._step = self._behind_key
        return end

    def _take_key(self) -> None:
        name = "".join(self._word).strip(SPACE)
        self._word.clear()
        self._key = [json.dumps(name, ensure_ascii=False)]

    def _behind_key(self, text: str, at: int) -> int:
        """Take the colon, and what stands in front of it."""
        if text[at] == ":":
            self._end_key()
            return at + 1
        if text[at] == "," or text[at] in _CLOSING:
            self._end_without_value()
            return at
        return at + 1

    def _end_key(self) -> None:
        self._separate()
        self._write(f"{''.join(self._key)}: ")
        self._step = self._want_value

    def _end_without_value(self) -> None:
        if self._step == self._in_key:
            self._take_key()
        if self._step != self._want_value:
            self._end_key()
        self._write("null")
        self._step = self._behind_value

    # --- values ---

    def _want_value(self, text: str, at: int) -> int:
        mark = text[at]
        if mark in SPACE:
            return at + 1
        if mark in _OPENING:
            self._open.append(_Bracket(is_list=mark == "["))
            self._write(mark)
            self._step = self._want_entry
            return at + 1
        if mark == "," or mark in _CLOSING:
            self._end_without_value()
            return at
        if mark == _JSON_QUOTE:
            self._text = PythonText(_JSON_QUOTE, self._write, ends=f",{_CLOSING}")
            self._step = self._in_json_text
            return at + 1
        self._step = self._in_word
        return at

    def _in_word(self, text: str, at: int) -> int:
        """Take what is no text, list or object, up to what ends it."""
        found = _END_OF_WORD.search(text, at)
        end = len(text) if found is None else found.start()
        self._word.append(text[at:end])
        if found is not None:
            self._end_word()
        return end

    def _end_word(self) -> None:
        self._write(json_of_word("".join(self._word).strip(SPACE)))
        self._word.clear()
        self._step = self._behind_value

    def _in_json_text(self, text: str, at: int) -> int:
        at = self._text.take(text, at)
        if self._text.is_over:
            self._step = self._behind_value
        return at

    def _behind_value(self, text: str, at: int) -> int:
        """Take what ends a value; what else stands there is left out."""
        mark = text[at]
        if mark == ",":
            self._step = self._want_entry
        if mark in _CLOSING:
            return self._close(mark, at)
        return at + 1

    def _close(self, mark: str, at: int) -> int:
        """Close what a bracket closes: a brace lists in its object too, whose own bracket misses.

        One that closes nothing is left out.
        """
        self._step = self._behind_value
        if mark == "]" and not self._open[-1].is_list:
            return at + 1
        while self._open[-1].is_list and mark == "}":
            self._open.pop()
            self._write("]")
        self._open.pop()
        self._write(mark)
        self.is_over = not self._open
        return at + 1


class _Bracket:
    """A list or an object that is open, and how many entries it has so far."""

    __slots__ = ("is_list", "num_entries")

    def __init__(self, *, is_list: bool) -> None:
        self.is_list = is_list
        self.num_entries = 0


def _leave_out(_text: str) -> None:
    """Take what no call has: a text behind a value."""
