"""The formats in which Qwen3-Coder, Seed-OSS and MiniMax-M2 write calls, which quote nothing."""

from __future__ import annotations

import re
from typing import ClassVar, Final

from control_plane.text.answers.call_readers import TaggedReader
from control_plane.text.answers.parameter_reader import (
    MAX_PARAMETER_NAME_CHARACTERS,
    ParameterReader,
)
from control_plane.text.answers.parameter_values import ValueMarks
from control_plane.text.answers.until import in_front_of
from control_plane.text.conversation import MAX_TOOL_NAME_CHARACTERS

_FUNCTION: Final = "<function="
_CLOSING: Final = "</parameter>"

_NO_NAME: Final = re.compile(r"[<>\r\n]")
"""What no name has."""


class Qwen3CoderReader(ParameterReader):
    """`<tool_call><function=NAME><parameter=NAME>VALUE</parameter>…</function></tool_call>`.

    Qwen3-Coder's, with a newline between any two of them; `<tool_call>` may be left out. A closing
    mark on a line of its own closes a value, or one that the format goes on behind: one within a
    line may be a part of the text.

    `FUNCTION`: what the name of one stands behind. `NUM_QUOTES`: characters beside a name.
    """

    FORMAT = "qwen3_coder"
    FUNCTION: ClassVar[str] = _FUNCTION
    NUM_QUOTES: ClassVar[int] = 0
    MARKERS = (*TaggedReader.MARKERS, _FUNCTION)
    PARAMETER = "<parameter="
    ENDS_OF_CALL = ("</function>",)
    VALUE_MARKS = ValueMarks(
        _CLOSING,
        inline=(f"\n{_CLOSING}", _CLOSING),
        on_own_line=(
            *(f"\n{_CLOSING}", f"{_CLOSING}\n</function>"),
            f"{_CLOSING}\n<parameter=",
        ),
    )

    def _behind_marker(self, text: str) -> str:
        is_bare = self._spare[-1].endswith(_FUNCTION)
        self._step = self._in_function if is_bare else self._want_function
        return text

    def _want_function(self, text: str) -> str:
        found, text = self._take_mark((self.FUNCTION,), text)
        if found == "":
            return self._no_call(text)
        if found:
            self._step = self._in_function
        return text

    def _in_function(self, text: str) -> str:
        taken, text = self._take_name(text, MAX_TOOL_NAME_CHARACTERS)
        self._spare.append(taken)
        if not text:
            return ""
        name, self._name = self.name_in(self._name), ""
        if text[0] != ">" or not name:
            return self._no_call(text)
        self._begin_call(name)
        return text[1:]

    def _in_parameter(self, text: str) -> str:
        _, text = self._take_name(text, MAX_PARAMETER_NAME_CHARACTERS)
        if not text:
            return ""
        given, self._name = self._name, ""
        name = self.name_in(given)
        if text[0] != ">" or not name:
            self._no_parameter(self._opening + given)
            return text
        self._begin_value(name, f"{self._opening}{given}>")
        return text[1:]

    @staticmethod
    def name_in(given: str) -> str:
        """Return the name that stands in front of `>`; empty if it is none."""
        return given

    def _take_name(self, text: str, most: int) -> tuple[str, str]:
        """Take characters of a name, at most so many together; they, and the rest."""
        taken, rest = in_front_of(_NO_NAME, text, most + self.NUM_QUOTES - len(self._name))
        self._name += taken
        return taken, rest


class SeedOssReader(Qwen3CoderReader):
    """The same between marks of its own, `<seed:tool_call>`: Seed-OSS.

    Its values begin on the line of their opening mark.
    """

    FORMAT = "seed_oss"
    MARKERS = ("<seed:tool_call>",)
    CLOSING = "</seed:tool_call>"
    NAMES = (*MARKERS, CLOSING)
    VALUE_MARKS = Qwen3CoderReader.VALUE_MARKS._replace(may_be_quoted=True)


class MiniMaxReader(Qwen3CoderReader):
    """`<minimax:tool_call>`, calls, `</minimax:tool_call>`: MiniMax-M2.

    A call is `<invoke name="NAME">`, parameters and `</invoke>`, a parameter
    `<parameter name="NAME">VALUE</parameter>`. A value is all that stands between its marks.
    """

    FORMAT = "minimax_m2"
    MARKERS = ("<minimax:tool_call>",)
    CLOSING = "</minimax:tool_call>"
    NAMES = (*MARKERS, CLOSING)
    FUNCTION = "<invoke name="
    NUM_QUOTES = 2
    PARAMETER = "<parameter name="
    ENDS_OF_CALL = ("</invoke>",)
    VALUE_MARKS = ValueMarks(_CLOSING, inline=(_CLOSING,), may_be_quoted=True)

    def _behind_object(self, text: str) -> str:
        """Take the mark that closes the calls, or that of another one."""
        found, text = self._take_mark((self.CLOSING, self.FUNCTION), text)
        if found is None:
            return text
        self._end_call()
        if self.is_over:
            return text
        if found == self.FUNCTION:
            self._step = self._in_function
            return text
        if not found:
            return self._back_to_content(text)
        self._spare.clear()
        self._step = self._in_content
        return text

    @staticmethod
    def name_in(given: str) -> str:
        """Return what stands between quotes."""
        is_quoted = len(given) > 1 and given[0] == given[-1] == '"'
        return given[1:-1] if is_quoted else ""
