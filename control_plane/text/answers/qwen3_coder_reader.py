"""The format in which Qwen3-Coder writes tool calls, which quotes nothing."""

from __future__ import annotations

import json
import re
from typing import Final

from control_plane.text.answers.call_readers import TaggedReader
from control_plane.text.answers.parameter_kinds import NO_TOOLS, ToolParameters
from control_plane.text.answers.parameter_values import ParameterValue, UnreadValue
from control_plane.text.answers.parts import Draft
from control_plane.text.answers.until import SPACE, Until
from control_plane.text.conversation import MAX_TOOL_NAME_CHARACTERS

_FUNCTION: Final = "<function="
_END_OF_FUNCTION: Final = "</function>"
_PARAMETER: Final = "<parameter="

MAX_PARAMETER_NAME_CHARACTERS: Final = 256

_NO_NAME: Final = re.compile(r"[<>\r\n]")
"""What no name has."""


class Qwen3CoderReader(TaggedReader):
    """`<tool_call><function=NAME><parameter=NAME>VALUE</parameter>…</function></tool_call>`.

    Qwen3-Coder's, with a newline between any two of them; `<tool_call>` may be left out. A call is
    one from the name of its function on. Its arguments are told as an object of JSON; what their
    values are the tools' schemas say. What else stands in a call is content behind it, a parameter
    that it has already included.
    """

    FORMAT = "qwen3_coder"
    MARKERS = (*TaggedReader.MARKERS, _FUNCTION)
    READS_PARAMETERS = True

    def __init__(
        self, draft: Draft, *, is_start: bool, parameters: ToolParameters = NO_TOOLS
    ) -> None:
        super().__init__(draft, is_start=is_start)
        self._tools = parameters
        self._name = ""  # as much as has come of it
        self._function = ""
        self._given: set[str] = set()  # parameters of the call
        self._inside = Until((_PARAMETER, _END_OF_FUNCTION, self._CLOSING, *self.MARKERS))
        self._opening = ""  # of the parameter
        self._value = ParameterValue(None, draft.add_arguments)
        self._between: list[str] = []  # content that stands in the call

    def finish(self, *, is_cut_off: bool = False) -> None:
        """Take note of the end. A call that nothing closes stays as it is.

        What may be a mark that was begun in it is left out.
        """
        if self._step == self._in_value:
            self._value.cut_off()
        self._tell_between()
        super().finish(is_cut_off=is_cut_off)

    # --- up to the name of the function ---

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
        if text[0] != ">" or not self._name:
            self._name = ""
            return self._no_call(text)
        self._spare.clear()
        self._function, self._name = self._name, ""
        self._given.clear()
        self._draft.begin_call(self._function)
        self._draft.add_arguments("{")
        self._step = self._in_call
        return text[1:]

    def _take_name(self, text: str, most: int) -> tuple[str, str]:
        """Take characters of a name, at most so many together; they, and the rest."""
        found = _NO_NAME.search(text)
        end = len(text) if found is None else found.start()
        taken = text[: min(end, most - len(self._name))]
        self._name += taken
        return taken, text[len(taken) :]

    # --- in the call ---

    def _in_call(self, text: str) -> str:
        said, opening, rest = self._inside.push(text)
        if said:
            self._between.append(said)
        if not opening:
            return rest
        mark = opening.lstrip(SPACE)
        if mark == _PARAMETER:
            self._opening, self._step = opening, self._in_parameter
            return rest
        self._draft.add_arguments("}")
        self._draft.end_call()
        self._tell_between()
        if mark == _END_OF_FUNCTION:
            self._step = self._behind_object
            return rest
        if mark == self._CLOSING:
            self._step = self._in_content
        else:  # the next one begins
            self._spare.append(opening)
            self._step = self._behind_marker
        self._end_call()
        return rest

    def _in_parameter(self, text: str) -> str:
        _, text = self._take_name(text, MAX_PARAMETER_NAME_CHARACTERS)
        if not text:
            return ""
        name, self._name = self._name, ""
        if text[0] != ">" or not name:
            self._between += (self._opening, name)
            self._step = self._in_call
            return text
        if name in self._given:
            self._between += (self._opening, name, ">")
            self._value = UnreadValue(self._between.append)
        else:
            separator = ", " if self._given else ""
            self._given.add(name)
            spelled = json.dumps(name, ensure_ascii=False)
            self._draft.add_arguments(f"{separator}{spelled}: ")
            kinds = self._tools.get(self._function, {}).get(name)
            self._value = ParameterValue(kinds, self._draft.add_arguments)
        self._step = self._in_value
        return text[1:]

    def _in_value(self, text: str) -> str:
        rest = self._value.push(text)
        if self._value.is_over:
            self._step = self._in_call
        return rest

    def _tell_between(self) -> None:
        self._draft.say("".join(self._between))
        self._between.clear()
