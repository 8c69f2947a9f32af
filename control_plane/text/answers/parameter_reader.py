"""What formats have in common that write each parameter of a call between marks, quoting nothing.

A call is one from the name of its function on. Its arguments are told as an object of JSON; what
their values are the tools' schemas say. What else stands in a call is content behind it, a
parameter that it has already included.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from typing import ClassVar, Final

from control_plane.text.answers.call_readers import TaggedReader
from control_plane.text.answers.parameter_kinds import NO_TOOLS, ToolParameters
from control_plane.text.answers.parameter_values import ParameterValue, ValueMarks
from control_plane.text.answers.parts import Draft
from control_plane.text.answers.parts_reader import MOST_AT_ONCE
from control_plane.text.answers.until import SPACE, Until

MAX_PARAMETER_NAME_CHARACTERS: Final = 256


class ParameterReader(TaggedReader):
    """Reads such calls. `PARAMETER`: begins one. `ENDS_OF_CALL`: besides the mark that closes it.

    `VALUE_MARKS`: what closes a value.
    """

    READS_PARAMETERS = True
    PARAMETER: ClassVar[str]
    ENDS_OF_CALL: ClassVar[tuple[str, ...]] = ()
    VALUE_MARKS: ClassVar[ValueMarks]

    def __init__(
        self, draft: Draft, *, is_start: bool, parameters: ToolParameters = NO_TOOLS
    ) -> None:
        super().__init__(draft, is_start=is_start)
        self._tools = parameters
        self._name = ""  # as much as has come of it
        self._function = ""
        self._given: set[str] = set()  # parameters of the call
        self._inside = Until((self.PARAMETER, *self.ENDS_OF_CALL, self.CLOSING, *self.MARKERS))
        self._opening = ""  # of the parameter
        self._value = ParameterValue(self.VALUE_MARKS, None, draft.add_arguments)
        self._knows_quotes = self.VALUE_MARKS.may_be_quoted
        self._between: list[str] = []  # content that stands in the call

    def finish(self, *, is_cut_off: bool = False) -> None:
        """Take note of the end. A call that nothing closes stays as it is.

        What may be a mark that was begun in it is left out.
        """
        while self._step == self._in_value:
            rest = self._value.cut_off()
            if not self._value.is_over:
                break
            self._end_value()
            self._read_again(rest)
        self._tell_between()
        super().finish(is_cut_off=is_cut_off)

    def _begin_call(self, name: str) -> None:
        self._spare.clear()
        self._function = name
        self._given.clear()
        self._draft.begin_call(name)
        self._draft.add_arguments("{")
        self._step = self._in_call

    def _in_call(self, text: str) -> str:
        said, opening, rest = self._inside.push(text)
        if said:
            self._between.append(said)
        if not opening:
            return rest
        mark = opening.lstrip(SPACE)
        if mark == self.PARAMETER:
            self._opening, self._step = opening, self._in_parameter
            return rest
        self._draft.add_arguments("}")
        self._draft.end_call()
        self._tell_between()
        if mark in self.ENDS_OF_CALL:
            self._step = self._behind_object
            return rest
        if mark == self.CLOSING:
            self._step = self._in_content
        else:  # the next one begins
            self._spare.append(opening)
            self._step = self._behind_marker
        self._end_call()
        return rest

    @abstractmethod
    def _in_parameter(self, text: str) -> str:
        """Take what stands between the mark that begins a parameter and its value."""

    def _begin_value(self, name: str, read: str) -> None:
        """Go on with the value of a parameter. `read`: what stood in front of it."""
        if name in self._given:
            self._between.append(read)
            self._value = ParameterValue(
                self.VALUE_MARKS, None, self._between.append, is_unread=True
            )
        else:
            separator = ", " if self._given else ""
            self._given.add(name)
            spelled = json.dumps(name, ensure_ascii=False)
            self._draft.add_arguments(f"{separator}{spelled}: ")
            kinds = self._tools.get(self._function, {}).get(name)
            self._value = ParameterValue(
                self.VALUE_MARKS,
                kinds,
                self._draft.add_arguments,
                knows_quotes=self._knows_quotes,
            )
        self._step = self._in_value

    def _in_value(self, text: str) -> str:
        rest = self._value.push(text)
        if self._value.is_over:
            self._end_value()
            if self._value.has_wrong_quotes:
                self._read_again(rest)
                return ""
        return rest

    def _read_again(self, text: str) -> None:
        for at in range(0, len(text), MOST_AT_ONCE):
            self.push(text[at : at + MOST_AT_ONCE])

    def _end_value(self) -> None:
        self._step = self._in_call
        if self._value.has_wrong_quotes:
            self._knows_quotes = False  # from here on: once is enough to read all anew

    def _no_parameter(self, read: str) -> None:
        """Let what was taken for a parameter be content."""
        self._between.append(read)
        self._step = self._in_call

    def _tell_between(self) -> None:
        self._draft.say("".join(self._between))
        self._between.clear()
