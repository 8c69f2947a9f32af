"""The formats in which models write tool calls, each read out of the text around it.

What turns out to be no call is content, as it stands, markers included. From the opening brace of
its arguments on a call is one: what the model writes as arguments is passed on as it comes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from control_plane.text.answers.call_object import CallObject
from control_plane.text.answers.parameter_kinds import NO_TOOLS, ToolParameters
from control_plane.text.answers.parts import Draft
from control_plane.text.answers.parts_reader import PartsReader
from control_plane.text.answers.until import SPACE, Until

_Step = Callable[[str], str]


class CallReader(PartsReader):
    """Reads calls that stand behind marks."""

    def __init__(
        self, draft: Draft, *, is_start: bool, parameters: ToolParameters = NO_TOOLS
    ) -> None:
        super().__init__(draft, is_start=is_start, parameters=parameters)
        self._until = Until(self.MARKERS)
        self._spare: list[str] = []  # content, unless it turns out to be a part of a call
        self._step: _Step = self._in_content
        self._object = CallObject(draft, self._spare)
        self._mark = ""  # as much as has come of one that is due

    def push(self, text: str) -> None:
        """Take the next piece; nothing behind the last call that is wanted, which `is_over`."""
        while text and not self.is_over:
            text = self._step(text)

    @property
    def is_in_call(self) -> bool:
        """Whether what comes next may be a part of a call."""
        return self._step != self._in_content

    def finish(self, *, is_cut_off: bool = False) -> None:  # noqa: ARG002 - all the same here
        """Take note of the end: what was held back is content, but for space behind calls."""
        if self.is_over:
            return
        rest = "".join(self._spare) + self._until.finish()
        self._spare.clear()
        if rest.strip(SPACE) or not self._draft.num_calls:
            self._draft.say(rest)

    # --- the steps: each takes a part of the text, and returns the rest ---

    def _in_content(self, text: str) -> str:
        said, opening, rest = self._until.push(text)
        if said:
            self._draft.say(said)
        if opening:
            self._spare.append(opening)
            self._step = self._behind_marker
        return rest

    @abstractmethod
    def _behind_marker(self, text: str) -> str:
        """Take the first characters behind a marker."""

    def _want_object(self, text: str) -> str:
        """Skip space; go on with an object, or with content where there is none."""
        text = self._skip_space(text)
        return self._begin_object(text) if text else ""

    def _begin_object(self, text: str, *, name: str | None = None, takes_bare: bool = True) -> str:
        self._object = CallObject(self._draft, self._spare, name=name, takes_bare=takes_bare)
        self._step = self._in_object
        return text

    def _in_object(self, text: str) -> str:
        read = self._object.push(text)
        if self._object.is_over:
            self._spare.clear()
        if self._object.is_over or (self._object.is_wrong and self._object.has_begun):
            self._step = self._behind_object
            if not self._has_closing_mark:
                self._end_call()
        elif self._object.is_wrong:
            self._step = self._no_call
        return text[read:]

    @property
    def _has_closing_mark(self) -> bool:
        """Whether something closes the call that is read."""
        return False

    def _end_call(self) -> None:
        """Take note that a call has been read, and what closes it."""
        self.is_over = self._draft.is_full

    @abstractmethod
    def _behind_object(self, text: str) -> str:
        """Take what follows a call. A brace that is missing at its end is not missed."""

    def _no_call(self, text: str) -> str:
        """Let what was held back be content, and what follows too."""
        self._draft.say("".join(self._spare))
        self._spare.clear()
        self._step = self._in_content
        return text

    def _back_to_content(self, text: str) -> str:
        """Read again, as content, what was held back: space in it may stand before a marker."""
        held = "".join(self._spare)
        self._spare.clear()
        self._step = self._in_content
        return held + text

    def _skip_space(self, text: str) -> str:
        rest = text.lstrip(SPACE)
        if len(rest) < len(text):
            self._spare.append(text[: len(text) - len(rest)])
        return rest

    def _take_mark(self, marks: Sequence[str], text: str) -> tuple[str | None, str]:
        """Take what comes of one of some marks, and space before it: which it is, and the rest.

        None: more has to come. Empty: it is none of them.
        """
        if not self._mark:
            text = self._skip_space(text)
        begun, self._mark = self._mark, ""
        known = begun + text
        for mark in marks:
            if known.startswith(mark):
                self._spare.append(mark[len(begun) :])
                return mark, known[len(mark) :]
        if any(mark.startswith(known) for mark in marks):
            self._spare.append(text)
            self._mark = known
            return None, ""
        self._spare[:] = ["".join(self._spare).removesuffix(begun)]
        return "", known  # another mark may begin with it

    def _skip(self, text: str) -> str:
        """Take one character."""
        self._spare.append(text[0])
        return text[1:]


class TaggedReader(CallReader):
    """Calls that stand between `<tool_call>` and `</tool_call>`, with space beside them.

    `CLOSING`: the second of them.
    """

    MARKERS: ClassVar[tuple[str, ...]] = ("<tool_call>",)
    NAMES: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>")

    CLOSING: ClassVar[str] = "</tool_call>"

    def _behind_object(self, text: str) -> str:
        closed, text = self._take_mark((self.CLOSING,), text)
        if closed == "":
            self._end_call()
            return self._back_to_content(text)
        if closed:
            self._spare.clear()
            self._step = self._in_content
            self._end_call()
        return text

    @property
    def _has_closing_mark(self) -> bool:
        return True


class HermesReader(TaggedReader):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen2.5, Qwen3."""

    FORMAT = "hermes"

    def _behind_marker(self, text: str) -> str:
        return self._want_object(text)


class Llama3JsonReader(CallReader):
    """`{"name": …, "parameters": {…}}` and nothing before it but `<|python_tag|>`: Llama 3.

    Several stand behind each other with `;` between them. Without the tag only the beginning of an
    answer may be a call.
    """

    FORMAT = "llama3_json"
    MARKERS = ("<|python_tag|>",)
    NAMES = MARKERS

    def __init__(
        self, draft: Draft, *, is_start: bool, parameters: ToolParameters = NO_TOOLS
    ) -> None:
        super().__init__(draft, is_start=is_start, parameters=parameters)
        if is_start:
            self._step = self._want_bare_object

    def _want_bare_object(self, text: str) -> str:
        text = self._skip_space(text)
        if not text:
            return ""
        if text[0] == "{":
            return self._begin_object(text, takes_bare=False)
        return self._back_to_content(text)

    def _behind_marker(self, text: str) -> str:
        return self._want_object(text)

    def _behind_object(self, text: str) -> str:
        text = self._skip_space(text)
        if not text:
            return ""
        if text[0] != ";":
            return self._back_to_content(text)
        self._step = self._want_bare_object
        return self._skip(text)
