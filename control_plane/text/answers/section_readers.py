"""The formats in which calls stand in a section of the answer, each between marks of its own.

DeepSeek's and Kimi's: a section opens, calls follow, and it closes. What stands in front of the
arguments of a call is its header, and names the function.
"""

from __future__ import annotations

import re
from typing import ClassVar, Final

from control_plane.text.answers.call_readers import CallReader
from control_plane.text.answers.parameter_kinds import NO_TOOLS, ToolParameters
from control_plane.text.answers.parts import Draft
from control_plane.text.conversation import MAX_TOOL_NAME_CHARACTERS

SEPARATOR: Final = "<｜tool▁sep｜>"
ARGUMENTS: Final = "<|tool_call_argument_begin|>"
FENCE: Final = "```"

PLAIN_NAME: Final = re.compile(r"[^\s<>{`](?:[^<>{`\r\n]*[^\s<>{`])?")
"""What a header names a function by."""

_NAME: Final = rf"\s*(?P<name>{PLAIN_NAME.pattern})"
_MOST_HEADER: Final = MAX_TOOL_NAME_CHARACTERS + 128
"""Characters: what is longer is none."""


class SectionReader(CallReader):
    """Reads sections. `OPEN`, `CLOSE`: of one; `BEGIN`, `END`: of a call in it.

    `HEADER`: what may stand between `BEGIN` and the arguments. `FENCES`: what may stand behind
    those.
    """

    OPEN: ClassVar[str]
    CLOSE: ClassVar[str]
    BEGIN: ClassVar[str]
    END: ClassVar[str]
    HEADER: ClassVar[re.Pattern[str]]
    FENCES: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, draft: Draft, *, is_start: bool, parameters: ToolParameters = NO_TOOLS
    ) -> None:
        super().__init__(draft, is_start=is_start, parameters=parameters)
        self._header = ""
        self._has_call = False  # the section

    def _behind_marker(self, text: str) -> str:
        self._has_call = False
        self._step = self._want_call
        return text

    def _want_call(self, text: str) -> str:
        found, text = self._take_mark((self.BEGIN, self.CLOSE), text)
        if found is None:
            return text
        if found == self.BEGIN:
            self._step = self._in_header
            return text
        if not self._has_call:
            return self._no_call(text)
        if not found:
            return self._back_to_content(text)
        self._spare.clear()
        self._step = self._in_content
        return text

    def _in_header(self, text: str) -> str:
        """Take what comes up to the arguments, which begin with a brace."""
        end = text.find("{")
        taken = text if end < 0 else text[:end]
        self._header += taken
        self._spare.append(taken)
        if end < 0 and len(self._header) <= _MOST_HEADER:
            return ""
        rest, header, self._header = text[len(taken) :], self._header, ""
        found = self.HEADER.fullmatch(header) if len(header) <= _MOST_HEADER else None
        if found is not None and len(found["name"]) <= MAX_TOOL_NAME_CHARACTERS:
            return self._begin_object(rest, name=found["name"])
        # It is read again: a section may begin in it.
        self._spare[:] = ["".join(self._spare).removesuffix(header)]
        return self._no_call(header + rest)

    def _behind_object(self, text: str) -> str:
        self._has_call = True
        found, text = self._take_mark((*self.FENCES, self.END), text)
        if found is None or found in self.FENCES:
            return text
        if found:
            self._spare.clear()
        self._step = self._want_call
        self._end_call()
        return text

    @property
    def _has_closing_mark(self) -> bool:
        return True


class _DeepSeekReader(SectionReader):
    OPEN = "<｜tool▁calls▁begin｜>"
    CLOSE = "<｜tool▁calls▁end｜>"
    BEGIN = "<｜tool▁call▁begin｜>"
    END = "<｜tool▁call▁end｜>"
    MARKERS = (OPEN,)
    NAMES = (OPEN, CLOSE, BEGIN, END, SEPARATOR)


class DeepSeekV3Reader(_DeepSeekReader):
    """`function<｜tool▁sep｜>NAME`, and the arguments as a block of code: DeepSeek V3 and R1."""

    FORMAT = "deepseek_v3"
    HEADER = re.compile(rf"\s*function{SEPARATOR}{_NAME}\s*{FENCE}json\s*")
    FENCES = (FENCE,)


class DeepSeekV31Reader(_DeepSeekReader):
    """`NAME<｜tool▁sep｜>{…}`: DeepSeek V3.1."""

    FORMAT = "deepseek_v31"
    HEADER = re.compile(rf"{_NAME}\s*{SEPARATOR}\s*")


class KimiReader(SectionReader):
    """`functions.NAME:0<|tool_call_argument_begin|>{…}`, the calls numbered: Kimi K2."""

    FORMAT = "kimi_k2"
    OPEN = "<|tool_calls_section_begin|>"
    CLOSE = "<|tool_calls_section_end|>"
    BEGIN = "<|tool_call_begin|>"
    END = "<|tool_call_end|>"
    MARKERS = (OPEN,)
    NAMES = (OPEN, CLOSE, BEGIN, END, ARGUMENTS)
    HEADER = re.compile(rf"\s*(?:functions\.)?{_NAME}:[0-9]+\s*{re.escape(ARGUMENTS)}\s*")

    @staticmethod
    def call_id(name: str, number: int) -> str:
        """Return what stands in front of the arguments: newer templates write the id there."""
        return f"functions.{name}:{number}"
