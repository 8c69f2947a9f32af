"""The formats in which calls stand in a list of JSON behind a mark."""

from __future__ import annotations

import re
from typing import ClassVar, Final

from control_plane.text.answers.call_readers import CallReader
from control_plane.text.answers.parameter_kinds import NO_TOOLS, ToolParameters
from control_plane.text.answers.parts import Draft
from control_plane.text.answers.until import SPACE
from control_plane.text.conversation import MAX_TOOL_NAME_CHARACTERS


class MistralReader(CallReader):
    """`[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, and `[TOOL_CALLS]name[ARGS]{…}`: Mistral.

    The second may have `[CALL_ID]…` between name and arguments.
    """

    FORMAT = "mistral"
    MARKERS: ClassVar[tuple[str, ...]] = ("[TOOL_CALLS]",)
    NAMES: ClassVar[tuple[str, ...]] = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

    _NAME: Final = re.compile(r"[\w.-]+", re.ASCII)

    def __init__(
        self, draft: Draft, *, is_start: bool, parameters: ToolParameters = NO_TOOLS
    ) -> None:
        super().__init__(draft, is_start=is_start, parameters=parameters)
        self._is_listed = False
        self._name = ""
        self._call_id = ""
        self._tag = ""

    def _behind_marker(self, text: str) -> str:
        text = self._skip_space(text)
        if not text:
            return ""
        self._is_listed = text[0] == "["
        if self._is_listed:
            self._step = self._want_object
            return self._skip(text)
        self._name = self._call_id = self._tag = ""
        self._step = self._in_name
        return text

    def _in_name(self, text: str) -> str:
        taken, text = self._take_name(text, len(self._name))
        self._name += taken
        if text:
            self._step = self._want_arguments if self._name else self._no_call
        return text

    def _want_arguments(self, text: str) -> str:
        """Skip tags and space until the arguments begin."""
        if self._tag or text[0] == "[":
            self._tag += text[0]
            if not any(tag.startswith(self._tag) for tag in ("[ARGS]", "[CALL_ID]")):
                self._step = self._no_call
                return text
            if self._tag == "[CALL_ID]":
                self._step = self._in_call_id
            self._tag = "" if text[0] == "]" else self._tag
            return self._skip(text)
        if text[0] in SPACE:
            return self._skip(text)
        if text[0] == "{":
            return self._begin_object(text, name=self._name)
        self._step = self._no_call
        return text

    def _in_call_id(self, text: str) -> str:
        taken, text = self._take_name(text, len(self._call_id))
        self._call_id += taken
        if text:
            self._step = self._want_arguments
        return text

    def _take_name(self, text: str, num_known: int) -> tuple[str, str]:
        """Return the characters of a name, which has so many already, and the rest."""
        found = self._NAME.match(text)
        count = 0 if found is None else min(found.end(), MAX_TOOL_NAME_CHARACTERS - num_known)
        if count:
            self._spare.append(text[:count])
        return text[:count], text[count:]

    def _behind_object(self, text: str) -> str:
        text = self._skip_space(text)
        if not text:
            return ""
        self._end_call()
        if self._is_listed and text[0] == ",":
            self._step = self._want_object
            return self._skip(text)
        if self._is_listed and text[0] == "]":
            self._spare.clear()
            self._step = self._in_content
            return text[1:]
        return self._back_to_content(text)

    @property
    def _has_closing_mark(self) -> bool:
        return self._is_listed


class GraniteReader(MistralReader):
    """`<|tool_call|>[{"name": …, "arguments": {…}}, …]`: Granite 3, of which some write the other.

    Without the bracket it is no call: later ones have objects alone behind that mark.
    """

    FORMAT = "granite"
    MARKERS = ("<|tool_call|>", "<tool_call>")
    NAMES = MARKERS

    def _behind_marker(self, text: str) -> str:
        text = self._skip_space(text)
        if text and text[0] != "[":
            return self._no_call(text)
        return super()._behind_marker(text)
