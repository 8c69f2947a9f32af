"""The formats in which calls are written as Python writes them: `f(a='x', b=1)`.

A call is one from its opening parenthesis on. Its arguments are told as an object of JSON.
"""

from __future__ import annotations

import re
from typing import ClassVar, Final

from control_plane.text.answers.call_readers import CallReader
from control_plane.text.answers.keyword_arguments import KeywordArguments
from control_plane.text.answers.parameter_kinds import NO_TOOLS, ToolParameters
from control_plane.text.answers.parts import Draft
from control_plane.text.answers.until import SPACE, in_front_of
from control_plane.text.conversation import MAX_TOOL_NAME_CHARACTERS

_NO_NAME: Final = re.compile(r"[()\[\]{}<>,=\r\n]")
"""What no name of a function has."""


class PythonicReader(CallReader):
    """Reads such calls. `CLOSING`: what stands behind the last of some."""

    READS_PARAMETERS = True
    CLOSING: ClassVar[str]

    def __init__(
        self, draft: Draft, *, is_start: bool, parameters: ToolParameters = NO_TOOLS
    ) -> None:
        super().__init__(draft, is_start=is_start)
        self._tools = parameters
        self._name = ""  # as much as has come of it
        self._arguments: KeywordArguments | None = None
        self._is_listed = False
        self._has_call = False  # behind the mark

    def finish(self, *, is_cut_off: bool = False) -> None:
        """Take note of the end. A call that nothing closes stays as it is."""
        if self._arguments is not None:
            self._arguments.cut_off()
        super().finish(is_cut_off=is_cut_off)

    def _behind_marker(self, text: str) -> str:
        text = self._skip_space(text)
        if not text:
            return ""
        self._has_call = False
        self._is_listed = text[0] == "["
        self._step = self._want_call
        return self._skip(text) if self._is_listed else text

    def _want_call(self, text: str) -> str:
        """Skip space; go on with a call, or with what closes those that came."""
        text = self._skip_space(text)
        if not text:
            return ""
        if text[0] == "{":
            return self._begin_object(text)
        if self._has_call and text[0] in "]<":
            return self._close(text)
        self._name = ""
        self._step = self._in_name
        return text

    def _in_name(self, text: str) -> str:
        taken, text = in_front_of(_NO_NAME, text, MAX_TOOL_NAME_CHARACTERS - len(self._name))
        self._name += taken
        self._spare.append(taken)
        if not text:
            return ""
        name = self._name.rstrip(SPACE)
        if not name or text[0] != "(":
            return self._no_call(text)
        self._spare.clear()
        self._draft.begin_call(name)
        names = tuple(self._tools.get(name, {}))
        self._arguments = KeywordArguments(self._draft.add_arguments, names)
        self._step = self._in_arguments
        return text[1:]

    def _in_arguments(self, text: str) -> str:
        assert self._arguments is not None
        read = self._arguments.push(text)
        if self._arguments.is_over:
            self._arguments = None
            self._draft.end_call()
            self._step = self._behind_object
        return text[read:]

    def _behind_object(self, text: str) -> str:
        self._has_call = True
        text = self._skip_space(text)
        if not text:
            return ""
        if text[0] in "]<":
            return self._close(text)
        self._end_call()
        self._step = self._want_call
        return self._skip(text) if text[0] == "," else text

    def _close(self, text: str) -> str:
        """Go on behind the calls, of which a list is closed by a bracket."""
        self._step = self._want_closing
        if text[0] != "]":
            return text
        self._spare.clear()
        return text[1:]

    def _want_closing(self, text: str) -> str:
        found, text = self._take_mark((self.CLOSING,), text)
        if found is None:
            return text
        if found:
            self._spare.clear()
            self._step = self._in_content
        self._end_call()
        return text if found else self._back_to_content(text)

    @property
    def _has_closing_mark(self) -> bool:
        return True


class Lfm2Reader(PythonicReader):
    """`<|tool_call_start|>[f(a='x'), g()]<|tool_call_end|>`: LFM2.

    Told to, the models write objects of JSON in the list.
    """

    FORMAT = "lfm2"
    CLOSING = "<|tool_call_end|>"
    MARKERS = ("<|tool_call_start|>",)
    NAMES = (*MARKERS, CLOSING)


class Olmo3Reader(PythonicReader):
    """`<function_calls>` and calls on lines of their own, `</function_calls>`: OLMo 3."""

    FORMAT = "olmo3"
    CLOSING = "</function_calls>"
    MARKERS = ("<function_calls>",)
    NAMES = (*MARKERS, CLOSING)
