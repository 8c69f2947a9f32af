"""The formats in which Qwen3-Coder and Seed-OSS write tool calls, which quote nothing."""

from __future__ import annotations

import re
from typing import Final

from control_plane.text.answers.call_readers import TaggedReader
from control_plane.text.answers.parameter_reader import (
    MAX_PARAMETER_NAME_CHARACTERS,
    ParameterReader,
)
from control_plane.text.answers.parameter_values import ValueMarks
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
    """

    FORMAT = "qwen3_coder"
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
        found, text = self._take_mark((_FUNCTION,), text)
        if found == "":
            return self._no_call(text)
        if found:
            self._step = self._in_function
        return text

    def _in_function(self, text: str) -> str:
        name, text = self._take_name(text, MAX_TOOL_NAME_CHARACTERS)
        self._spare.append(name)
        if not text:
            return ""
        name, self._name = self._name, ""
        if text[0] != ">" or not name:
            return self._no_call(text)
        self._begin_call(name)
        return text[1:]

    def _in_parameter(self, text: str) -> str:
        _, text = self._take_name(text, MAX_PARAMETER_NAME_CHARACTERS)
        if not text:
            return ""
        name, self._name = self._name, ""
        if text[0] != ">" or not name:
            self._no_parameter(self._opening + name)
            return text
        self._begin_value(name, f"{self._opening}{name}>")
        return text[1:]

    def _take_name(self, text: str, most: int) -> tuple[str, str]:
        """Take characters of a name, at most so many together; they, and the rest."""
        found = _NO_NAME.search(text)
        end = len(text) if found is None else found.start()
        taken = text[: min(end, most - len(self._name))]
        self._name += taken
        return taken, text[len(taken) :]


class SeedOssReader(Qwen3CoderReader):
    """The same between marks of its own, `<seed:tool_call>`: Seed-OSS.

    Its values begin on the line of their opening mark.
    """

    FORMAT = "seed_oss"
    MARKERS = ("<seed:tool_call>",)
    CLOSING = "</seed:tool_call>"
    NAMES = (*MARKERS, CLOSING)
    VALUE_MARKS = Qwen3CoderReader.VALUE_MARKS._replace(may_be_quoted=True)
