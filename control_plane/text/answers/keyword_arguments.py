"""The arguments of a call as Python writes it, `a='x', b=[1, True])`, told as an object of JSON.

Texts are told as they come, other values once they are whole. What is no literal is a text, as it
stands. JSON is read, too: `true`, `null`, escapes of halves of characters.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Sequence
from typing import Final

from control_plane.text.answers.python_texts import QUOTES, PythonText
from control_plane.text.answers.until import SPACE

_OPENING: Final = "([{"
_CLOSING: Final = ")]}"

_END_OF_WORD: Final = re.compile(r"[,()\[\]{}]")
_END_OF_NAME: Final = re.compile(r"""[,()\[\]{}="']""")
_END_OF_KEY: Final = re.compile(r"[,()\[\]{}:]")

_NUMBER: Final = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_NUMBER_OF_PYTHON: Final = re.compile(r"[+-]?[\d.][\da-fA-FxXoO_.+-]*", re.ASCII)
"""What Python may read as one: characters that make nothing but numbers."""

_MOST_NUMBER: Final = 320
"""Characters of one that JSON does not have: what is longer is a text."""

_WORDS: Final = {
    "True": "true",
    "False": "false",
    "None": "null",
    "true": "true",
    "false": "false",
    "null": "null",
}

_BEHIND: Final = f",{_CLOSING}"
"""What stands behind a value."""

_BEHIND_KEY: Final = f":{_BEHIND}"

_MOST_PARENTHESES: Final = 16
"""That are open, of which one value in each is held back."""

_Step = Callable[[str, int], int]


class KeywordArguments:
    """Reads what stands behind the opening parenthesis of a call, and gives `write` its JSON.

    `names`: of values that have none, by their places; those behind them are named by their
    numbers. `is_over`: its end has come.
    """

    def __init__(self, write: Callable[[str], None], names: Sequence[str] = ()) -> None:
        self._write = write
        self._names = names
        self._step: _Step = self._want_name
        self._open: list[_Bracket] = []
        self._num_values = 0
        self._num_unnamed = 0
        self._word: list[str] = []  # as much as has come of it
        self._word_depth = 0  # brackets that are open in it
        self._text = PythonText(QUOTES[0], self._tell, ends=_BEHIND)
        self._held_back: list[list[str]] = []  # of each parenthesis that may be no list
        self._is_key = False  # of a dictionary
        self._key: list[str] = []  # a text as JSON, or a word
        self.is_over = False
        write("{")

    def push(self, text: str) -> int:
        """Take characters; how many: it stops behind its end."""
        at = 0
        while at < len(text) and not self.is_over:
            at = self._step(text, at)
        return at

    def cut_off(self) -> None:
        """Take note that the text ends in the arguments: what was held of a value is told."""
        for held in self._held_back:
            self._write("".join(held))
        if self._step == self._in_word and not self._is_key:
            value = json_of_word("".join(self._word).strip(SPACE))
            self._write(value[:-1] if value.startswith('"') else value)

    # --- what stands between the values of the call ---

    def _want_name(self, text: str, at: int) -> int:
        """Take space and commas, up to a name or a value without one."""
        if text[at] in SPACE or text[at] == ",":
            return at + 1
        if text[at] in _CLOSING:
            return self._end(text, at)
        self._step = self._in_name
        return at

    def _in_name(self, text: str, at: int) -> int:
        """Take what is a name if `=` comes behind it."""
        found = _END_OF_NAME.search(text, at)
        end = len(text) if found is None else found.start()
        self._word.append(text[at:end])
        if found is None:
            return end
        word = "".join(self._word)
        if found.group() == "=" and word.strip(SPACE):
            self._word.clear()
            self._begin_value(word.strip(SPACE))
            self._step = self._want_value
            return end + 1
        self._begin_value(self._next_name())
        if not word and found.group() != "=":
            self._step = self._want_value
        else:
            self._step = self._in_word
        return end

    def _next_name(self) -> str:
        number = self._num_unnamed
        self._num_unnamed += 1
        return self._names[number] if number < len(self._names) else str(number)

    def _begin_value(self, name: str) -> None:
        comma = ", " if self._num_values else ""
        self._num_values += 1
        self._write(f"{comma}{json.dumps(name, ensure_ascii=False)}: ")

    # --- values ---

    def _want_value(self, text: str, at: int) -> int:
        mark = text[at]
        if mark in SPACE:
            return at + 1
        if mark in QUOTES:
            self._text = PythonText(mark, self._tell, ends=_BEHIND_KEY if self._is_key else _BEHIND)
            self._step = self._in_text
            return at + 1
        if mark in _OPENING:
            self._open_bracket(mark)
            self._step = self._want_entry
            return at + 1
        if mark in _CLOSING or mark == ",":
            self._tell("null")  # nothing stands there
            self._step = self._behind_value
            return at
        self._step = self._in_word
        return at

    def _in_word(self, text: str, at: int) -> int:
        """Take what is no text, list or dictionary, up to what ends it."""
        ends = _END_OF_KEY if self._is_key and not self._word_depth else _END_OF_WORD
        found = ends.search(text, at)
        end = len(text) if found is None else found.start()
        self._word.append(text[at:end])
        if found is None:
            return end
        mark = found.group()
        if mark in _OPENING or self._word_depth:
            self._word_depth += (mark in _OPENING) - (mark in _CLOSING)
            self._word.append(mark)
            return end + 1
        word = "".join(self._word).strip(SPACE)
        self._word.clear()
        self._tell(word if self._is_key else json_of_word(word))
        self._step = self._behind_value
        return end

    def _tell(self, text: str) -> None:
        if self._is_key:
            self._key.append(text)
        else:
            self._put(text)

    def _put(self, text: str) -> None:
        """Write, but hold back what is the first between parentheses: alone it is no list."""
        if self._held_back:
            self._held_back[-1].append(text)
        else:
            self._write(text)

    def _in_text(self, text: str, at: int) -> int:
        at = self._text.take(text, at)
        if self._text.is_over:
            self._step = self._behind_value
        return at

    # --- lists and dictionaries ---

    def _open_bracket(self, mark: str) -> None:
        may_be_none = mark == "(" and len(self._held_back) < _MOST_PARENTHESES
        self._open.append(_Bracket(is_list=mark != "{", may_be_none=may_be_none))
        if may_be_none:
            self._held_back.append([])
        elif mark != "{":
            self._put("[")

    def _is_a_list(self, bracket: _Bracket) -> None:
        """Let go of what stands between the parentheses: there is a comma."""
        if bracket.may_be_none:
            bracket.may_be_none = False
            held = self._held_back.pop()
            self._put("[")
            self._put("".join(held))

    def _want_entry(self, text: str, at: int) -> int:
        """Take space, up to an entry or the end of what is open."""
        bracket = self._open[-1]
        if text[at] == ",":
            self._is_a_list(bracket)
        if text[at] in SPACE or text[at] == ",":
            return at + 1
        if text[at] in _CLOSING:
            return self._close(at)
        if bracket.is_list:
            if bracket.num_entries:
                self._put(", ")
            bracket.num_entries += 1
        else:
            self._is_key = True
            self._key.clear()
        self._step = self._want_key if self._is_key else self._want_value
        return at

    def _want_key(self, text: str, at: int) -> int:
        """Begin a key: a text or a word; what else there is is one, too."""
        if text[at] in QUOTES:
            return self._want_value(text, at)
        self._step = self._in_word
        return at

    def _behind_value(self, text: str, at: int) -> int:
        """Take what stands behind a value; further parts of an expression are left out."""
        mark = text[at]
        if self._word_depth or mark in _OPENING:
            self._word_depth += (mark in _OPENING) - (mark in _CLOSING)
            return at + 1
        if self._is_key and (mark in _CLOSING or mark in ",:"):
            return self._end_key(mark, at)
        if mark == ",":
            if self._open:
                self._is_a_list(self._open[-1])
            self._step = self._want_entry if self._open else self._want_name
            return at + 1
        if mark in _CLOSING:
            return self._close(at) if self._open else self._end(text, at)
        return at + 1

    def _end_key(self, mark: str, at: int) -> int:
        """Go on with the value of a key; a dictionary without any is a set, which is a list."""
        bracket, key = self._open[-1], "".join(self._key)
        self._is_key = False
        is_text = key.startswith('"')
        if mark != ":" and not bracket.num_entries:
            bracket.is_list, bracket.num_entries = True, 1
            self._put(f"[{key if is_text else json_of_word(key)}")
            self._step = self._behind_value
            return at
        separator = ", " if bracket.num_entries else "{"
        bracket.num_entries += 1
        self._put(f"{separator}{key if is_text else json.dumps(key, ensure_ascii=False)}: ")
        self._step = self._want_value
        return at + (mark == ":")

    def _close(self, at: int) -> int:
        bracket = self._open.pop()
        if bracket.may_be_none:
            held = self._held_back.pop()
            self._put("".join(held) if bracket.num_entries else "[]")
        elif bracket.is_list:
            self._put("]")
        else:
            self._put("}" if bracket.num_entries else "{}")
        self._step = self._behind_value
        return at + 1

    def _end(self, text: str, at: int) -> int:
        """Take the end of the call; where another bracket closes it is missing."""
        self._write("}")
        self.is_over = True
        return at + (text[at] == ")")


class _Bracket:
    """A list or a dictionary that is open, and how many entries it has so far.

    `may_be_none`: a parenthesis around one value, as far as is known.
    """

    __slots__ = ("is_list", "may_be_none", "num_entries")

    def __init__(self, *, is_list: bool, may_be_none: bool = False) -> None:
        self.is_list = is_list
        self.may_be_none = may_be_none
        self.num_entries = 0


def json_of_word(word: str) -> str:
    """Return the JSON of a word or a number; of all else that of a text."""
    if word in _WORDS:
        return _WORDS[word]
    if _NUMBER.fullmatch(word):
        return word
    if len(word) <= _MOST_NUMBER and _NUMBER_OF_PYTHON.fullmatch(word):
        try:
            return json.dumps(ast.literal_eval(word), allow_nan=False)
        except (ValueError, SyntaxError):
            pass
    return json.dumps(word, ensure_ascii=False)
