"""The value of one parameter in Qwen3-Coder's format, read out of its text and told as JSON.

A value stands between `<parameter=NAME>` and `</parameter>`, without quotes, a newline on either
side: what it is its tool's schema says. Texts are told as they come, other values once they are
whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final, NoReturn

from control_plane.text.answers.parameter_kinds import NULL, TEXT, Kinds
from control_plane.text.answers.until import SPACE
from control_plane.text.stop_strings import StopMatcher

CLOSING: Final = "</parameter>"

ENDS: Final = (f"\n{CLOSING}", f"{CLOSING}\n</function>", f"{CLOSING}\n<parameter=")
"""What closes a value that begins on a line of its own: a closing mark on a line of its own, or
one that the format goes on behind. One within a line may be a part of the text."""

_ENDS_INLINE: Final = (f"\n{CLOSING}", CLOSING)

_NULLS: Final = ("null", "None")
_WORDS: Final = {"True": "true", "False": "false", "None": "null"}
"""As templates write them, in Python's words."""

_BEGIN_JSON: Final = "{[-0123456789tfn"
"""What JSON may begin with, but for a text."""


class ParameterValue:
    """Reads one value up to what closes it, and gives `write` its JSON.

    `kinds`: what it may be; None: not known: JSON other than a text where it is some, else a text.
    """

    __slots__ = (
        "_held",
        "_is_first",
        "_is_text",
        "_kinds",
        "_matcher",
        "_may_be_text",
        "_write",
        "is_over",
    )

    def __init__(self, kinds: Kinds | None, write: Callable[[str], None]) -> None:
        self._kinds = kinds
        self._write = write
        self._matcher: StopMatcher | None = None
        self._held: list[str] = []  # of a value that is told once it is whole
        self._is_first = True  # nothing has come but the newline in front
        self._may_be_text = kinds is None or TEXT in kinds  # and begin before it is whole
        self._is_text = False  # it is one, and was begun
        self.is_over = False

    def push(self, text: str) -> str:
        """Take the next piece, not empty; what stands behind the value."""
        if self._matcher is None:
            self._matcher = StopMatcher(ENDS if text[0] == "\n" else _ENDS_INLINE)
        known = self._matcher.held + text
        released, end = self._matcher.push(text)
        self._take(released)
        if end is None:
            return ""
        self.is_over = True
        # What else shows that it is one is not a part of the closing mark.
        mark, closing, behind = end.partition(CLOSING)
        self._close(mark + closing)
        return behind + known[len(released) + len(end) :]

    def cut_off(self) -> None:
        """Take note that the text ends in the value: what there is of it is told as it is.

        What may be a closing mark that was begun is left out.
        """
        if self._is_text or not self._held:
            return
        if self._kinds is not None and TEXT in self._kinds:
            self._begin_text()
        else:
            self._write("".join(self._held))

    def _take(self, text: str) -> None:
        if text and self._is_first:
            self._is_first = False
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

    def _close(self, _: str) -> None:
        if not self._is_text:
            value = _json_of("".join(self._held), self._kinds)
            if value is not None:
                self._write(value)
                return
            self._begin_text()
        self._write('"')


class UnreadValue(ParameterValue):
    """Reads a value that is told as it stands, closing mark included."""

    __slots__ = ()

    def __init__(self, write: Callable[[str], None]) -> None:
        super().__init__(None, write)

    def _take(self, text: str) -> None:
        self._write(text)

    def _close(self, mark: str) -> None:
        self._write(mark)


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
        return None
    return None if kinds is None and isinstance(value, str) else word


def _refuse(word: str) -> NoReturn:
    """Python reads NaN and infinities, which JSON does not have."""
    raise ValueError(word)
