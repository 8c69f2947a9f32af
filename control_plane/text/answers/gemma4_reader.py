"""The format in which Gemma 4 writes tool calls, whose texts stand between marks."""

from __future__ import annotations

import re
from typing import Final

from control_plane.text.answers.call_readers import TaggedReader
from control_plane.text.answers.gemma4_arguments import END_OF_CALL, QUOTE, Gemma4Arguments
from control_plane.text.answers.parameter_kinds import NO_TOOLS, ToolParameters
from control_plane.text.answers.parts import Draft
from control_plane.text.answers.until import SPACE, in_front_of
from control_plane.text.conversation import MAX_TOOL_NAME_CHARACTERS

CALL: Final = "call:"

_NO_NAME: Final = re.compile(r"[<>{}\r\n]")
"""What no name of a function has."""


class Gemma4Reader(TaggedReader):
    """`<|tool_call>call:NAME{a:<|"|>x<|"|>,b:1}<tool_call|>`.

    A call is one from its opening brace on.
    """

    FORMAT = "gemma4"
    MARKERS = ("<|tool_call>",)
    CLOSING = END_OF_CALL
    NAMES = (*MARKERS, CLOSING, QUOTE)

    def __init__(
        self, draft: Draft, *, is_start: bool, parameters: ToolParameters = NO_TOOLS
    ) -> None:
        super().__init__(draft, is_start=is_start, parameters=parameters)
        self._name = ""  # as much as has come of it
        self._arguments: Gemma4Arguments | None = None

    def finish(self, *, is_cut_off: bool = False) -> None:
        """Take note of the end. A call that nothing closes stays as it is."""
        if self._arguments is not None:
            self._arguments.cut_off()
        super().finish(is_cut_off=is_cut_off)

    def _behind_marker(self, text: str) -> str:
        found, text = self._take_mark((CALL,), text)
        if found is None:
            return text
        if not found:
            return self._no_call(text)
        self._name = ""
        self._step = self._in_name
        return text

    def _in_name(self, text: str) -> str:
        taken, text = in_front_of(_NO_NAME, text, MAX_TOOL_NAME_CHARACTERS - len(self._name))
        self._name += taken
        self._spare.append(taken)
        if not text:
            return ""
        name = self._name.strip(SPACE)
        if not name or text[0] != "{":
            return self._no_call(text)
        self._spare.clear()
        self._draft.begin_call(name)
        self._arguments = Gemma4Arguments(self._draft.add_arguments)
        self._step = self._in_arguments
        return text[1:]

    def _in_arguments(self, text: str) -> str:
        arguments = self._arguments
        assert arguments is not None
        read = arguments.push(text)
        if arguments.is_over:
            self._arguments = None
            self._draft.end_call()
            self._step = self._behind_object
            if arguments.is_closed:
                self._step = self._in_content
                self._end_call()
        return text[read:]
