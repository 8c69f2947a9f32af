"""The format in which GLM-4.5 and its successors write tool calls, which quotes nothing."""

from __future__ import annotations

import re
from typing import Final

from control_plane.text.answers.call_readers import TaggedReader
from control_plane.text.answers.parameter_reader import (
    MAX_PARAMETER_NAME_CHARACTERS,
    ParameterReader,
)
from control_plane.text.answers.parameter_values import ValueMarks
from control_plane.text.answers.until import SPACE, in_front_of
from control_plane.text.conversation import MAX_TOOL_NAME_CHARACTERS

KEY: Final = "<arg_key>"
END_OF_KEY: Final = "</arg_key>"
VALUE: Final = "<arg_value>"
END_OF_VALUE: Final = "</arg_value>"

_NO_FUNCTION: Final = re.compile(r"[<>{}\r\n]")
"""What no name of a function has; other formats have an object behind the mark."""

_NO_KEY: Final = re.compile(r"[<>\r\n]")


class GlmReader(ParameterReader):
    """`<tool_call>NAME<arg_key>NAME</arg_key><arg_value>VALUE</arg_value>…</tool_call>`.

    With a newline behind the name and between marks, or without (GLM-4.7). A call is one from its
    first `<arg_key>` on, or where it closes without any. A value that is an object or a list may
    have a text in it that looks like the mark.
    """

    FORMAT = "glm45"
    NAMES = (*TaggedReader.NAMES, KEY, END_OF_KEY, VALUE, END_OF_VALUE)
    PARAMETER = KEY
    VALUE_MARKS = ValueMarks(END_OF_VALUE, inline=(END_OF_VALUE,), may_be_quoted=True)

    def finish(self, *, is_cut_off: bool = False) -> None:
        """Take note of the end; what stands of a parameter without a value is left out."""
        if self._step in (self._in_parameter, self._behind_key, self._want_value):
            self._spare.clear()
        super().finish(is_cut_off=is_cut_off)

    def _behind_marker(self, text: str) -> str:
        text = self._skip_space(text)
        if text:
            self._step = self._in_function
        return text

    def _in_function(self, text: str) -> str:
        taken, text = in_front_of(_NO_FUNCTION, text, MAX_TOOL_NAME_CHARACTERS - len(self._name))
        self._name += taken
        self._spare.append(taken)
        if not text:
            return ""
        if not self._name.rstrip(SPACE) or not _NO_FUNCTION.match(text):
            self._name = ""
            return self._no_call(text)
        self._step = self._want_parameter
        return text

    def _want_parameter(self, text: str) -> str:
        found, text = self._take_mark((KEY, self.CLOSING), text)
        if found is None:
            return ""
        name, self._name = self._name.rstrip(SPACE), ""
        if not found:
            return self._no_call(text)
        self._begin_call(name)
        return found + text

    def _in_parameter(self, text: str) -> str:
        found = _NO_KEY.search(text)
        end = len(text) if found is None else found.start()
        taken = text[: min(end, MAX_PARAMETER_NAME_CHARACTERS - len(self._name))]
        self._name += taken
        if len(taken) < len(text):
            self._step = self._behind_key
        return text[len(taken) :]

    def _behind_key(self, text: str) -> str:
        return self._want(END_OF_KEY, text)

    def _want_value(self, text: str) -> str:
        return self._want(VALUE, text)

    def _want(self, mark: str, text: str) -> str:
        """Take one of the two marks between a parameter's name and its value."""
        found, text = self._take_mark((mark,), text)
        if found is None:
            return ""
        if found == END_OF_KEY and self._name.strip(SPACE):
            self._step = self._want_value
            return text
        name, self._name = self._name, ""
        read = f"{self._opening}{name}{''.join(self._spare)}"
        self._spare.clear()
        if found == VALUE:
            self._begin_value(name.strip(SPACE), read)
        else:
            self._no_parameter(read)
        return text
