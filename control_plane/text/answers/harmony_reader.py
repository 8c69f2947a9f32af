"""Answers in channels: harmony, the format of gpt-oss (OpenAI 2025).

An answer is messages, each with a header. The prompt ends where that of the first one begins.

    <|channel|>analysis<|message|>…<|end|>                                       reasoning
    <|start|>assistant<|channel|>commentary<|message|>…<|end|>                   content
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>
    <|start|>assistant to=functions.f<|channel|>commentary json<|message|>{…}<|call|>    two calls
    <|start|>assistant<|channel|>final<|message|>…<|return|>                     content

`<|call|>` and `<|return|>` end answers, so that texts lack them. A text that begins with no header
is content: it has another form. No mark is content, whatever its place: a model that writes one
where it has none is read as far as it can be.

Which marks are special tokens is told where it is known (`note_mark`): what a text merely spells is
text then. Otherwise each that is spelled is a mark.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from control_plane.text.answers.parameter_kinds import NO_TOOLS, ToolParameters
from control_plane.text.answers.parts import Draft
from control_plane.text.answers.parts_reader import PartsReader
from control_plane.text.conversation import MAX_TOOL_NAME_CHARACTERS
from control_plane.text.stop_strings import StopMatcher

START: Final = "<|start|>"
CHANNEL: Final = "<|channel|>"
CONSTRAIN: Final = "<|constrain|>"
MESSAGE: Final = "<|message|>"
END: Final = "<|end|>"
RETURN: Final = "<|return|>"
CALL: Final = "<|call|>"

ANALYSIS: Final = "analysis"
FINAL_OPENING: Final = f"{CHANNEL}final{MESSAGE}"
FUNCTIONS: Final = "functions."

_RECIPIENT_OPENING: Final = " to="
"""What an answer may begin with whose recipient stands before its channel."""
_MOST_HEADER: Final = 1024
"""Characters: what is longer is none."""
_CHANNEL_NAME: Final = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_RECIPIENT: Final = re.compile(r"(?:^|[\s>])to=([^\s<]+)")
_BETWEEN: Final = "\n\n"
"""Between the texts of two messages."""


class HarmonyReader(PartsReader):
    """Reads messages by their channels."""

    FORMAT = "harmony"
    NAMES = (START, CHANNEL, CONSTRAIN, MESSAGE, END, RETURN, CALL)
    READS_REASONING = True

    def __init__(
        self, draft: Draft, *, is_start: bool, parameters: ToolParameters = NO_TOOLS
    ) -> None:
        super().__init__(draft, is_start=is_start, parameters=parameters)
        self._marks = deque[tuple[int, str]]()
        self._matcher = StopMatcher(self.NAMES)  # where no marks are known
        self._at = self._end_of_mark = 0  # in the text, in characters
        self._held = ""  # of a header, its marks spelled
        self._thoughts: list[tuple[int, int]] = []
        self._arguments: list[str] = []
        self._has_said = self._has_thought = False
        self._gap = ""  # before what is next said or thought
        self._is_new = True
        self._step: Callable[[str], None] = self._at_start if is_start else self._say

    @property
    def thoughts(self) -> Sequence[tuple[int, int]]:
        """Where in the text reasoning begins and ends, message by message."""
        return self._thoughts

    def note_mark(self, at: int, name: str) -> None:
        """Take note of a special token, before its text comes. `at`: where that will begin."""
        if name in self.NAMES:
            self._marks.append((at, name))

    def push(self, text: str) -> None:
        """Take the next piece."""
        while text and not self.is_over:
            text = self._push_known(text) if self.knows_marks else self._push_spelled(text)

    def _push_known(self, text: str) -> str:
        """Take text up to the next mark, or its beginning and what there is of it."""
        if self._at < self._end_of_mark:
            rest = text[self._end_of_mark - self._at :]
            self._at += len(text) - len(rest)
            return rest
        at, name = self._marks[0] if self._marks else (self._at + len(text), "")
        if at > self._at:
            piece = text[: at - self._at]
            self._step(piece)
            self._at += len(piece)
            return text[len(piece) :]
        self._marks.popleft()
        self._end_of_mark = at + len(name)
        self._take_mark(name)
        return text

    def _push_spelled(self, text: str) -> str:
        known = self._matcher.held + text
        released, mark = self._matcher.push(text)
        if released:
            self._step(released)
            self._at += len(released)
        if mark is None:
            return ""
        self._matcher = StopMatcher(self.NAMES)
        self._at += len(mark)
        self._take_mark(mark)
        return known[len(released) + len(mark) :]

    def finish(self, *, is_cut_off: bool = False) -> None:
        """Take note of the end. A header that has not ended says nothing."""
        if self.is_over:
            return
        if held := self._matcher.finish():
            self._step(held)
        if self._step == self._at_start and not is_cut_off:
            self._say(self._held)
        elif self._step == self._add_arguments:
            self._end_call(is_cut_off=is_cut_off)

    # --- the steps: each takes text without marks ---

    def _at_start(self, text: str) -> None:
        """Hold what may be the beginning of a header; other text has another form."""
        self._held += text
        begun = self._held[: len(_RECIPIENT_OPENING) + 1]
        is_recipient = _RECIPIENT_OPENING.startswith(begun) or (
            begun.startswith(_RECIPIENT_OPENING) and not begun[-1].isspace()
        )
        if not is_recipient or len(self._held) > _MOST_HEADER or "\n" in self._held:
            self._take_held()

    def _in_header(self, text: str) -> None:
        self._held += text
        if len(self._held) > _MOST_HEADER:
            self._take_held()

    def _take_held(self) -> None:
        """Take what is no header for content."""
        held, self._held = self._held, ""
        self._begin_message(self._say)
        self._say(held)

    def _between(self, text: str) -> None:
        """Skip space until the next message begins; other text is content."""
        if begun := text.lstrip():
            self._begin_message(self._say)
            self._say(begun)

    def _take_mark(self, mark: str) -> None:
        is_header = self._step in (self._at_start, self._in_header)
        if self._step == self._add_arguments:
            self._end_call(is_marked=True)
        if mark == MESSAGE:
            header, self._held = self._held if is_header else "", ""
            self._begin_message(self._writer_of(header))
        elif mark == START:
            self._held, self._step = "", self._in_header
        elif mark == CHANNEL:
            self._held = (self._held if is_header else "") + mark
            self._step = self._in_header
        elif mark == CONSTRAIN:
            if is_header:
                self._held += mark
                self._step = self._in_header
        else:
            self._held, self._step = "", self._between

    def _writer_of(self, header: str) -> Callable[[str], None]:
        """Return what takes the text of a message with a header."""
        recipient = _RECIPIENT.search(header)
        if recipient is not None and self.READS_CALLS:
            name = recipient[1].removeprefix(FUNCTIONS)
            if 0 < len(name) <= MAX_TOOL_NAME_CHARACTERS:
                self._draft.begin_call(name)
                return self._add_arguments
        channel = _CHANNEL_NAME.search(header)
        is_thought = channel is not None and channel[1] == ANALYSIS
        return self._think if is_thought and self.thinks else self._say

    def _begin_message(self, write: Callable[[str], None]) -> None:
        """Begin to read a message's text."""
        self._step = write
        self._arguments.clear()
        follows = self._has_thought if write == self._think else self._has_said
        self._gap = _BETWEEN if follows else ""
        self._is_new = True

    def _end_call(self, *, is_marked: bool = False, is_cut_off: bool = False) -> None:
        """Take note that a call is over, or the answer in it. `is_marked`: a mark says so."""
        arguments = "".join(self._arguments)
        if not arguments.strip() and not is_cut_off:
            self._draft.add_arguments("{}")
        elif not is_marked and not _is_whole(arguments):
            return
        self._draft.end_call()
        self.is_over = self._draft.is_full

    # --- those of the texts of messages ---

    def _say(self, text: str) -> None:
        if text:
            self._draft.say(text, self._gap)
            self._gap, self._has_said = "", True

    def _think(self, text: str) -> None:
        begin, end = self._at, self._at + len(text)
        if not self._is_new:
            begin, _ = self._thoughts.pop()
        self._thoughts.append((begin, end))
        self._draft.think(text, self._gap)
        self._gap, self._has_thought, self._is_new = "", True, False

    def _add_arguments(self, text: str) -> None:
        self._arguments.append(text)
        self._draft.add_arguments(text)


class HarmonyTextReader(HarmonyReader):
    """The same where no functions may be called: what is said to one is content."""

    READS_CALLS = False


def _is_whole(arguments: str) -> bool:
    """Whether arguments that nothing closes are not cut off."""
    try:
        return isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        return False
