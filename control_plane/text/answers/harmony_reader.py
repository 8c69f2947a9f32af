"""Answers in channels: harmony, the format of gpt-oss (OpenAI 2025).

An answer is messages, each with a header. The prompt ends where that of the first one begins.

    <|channel|>analysis<|message|>…<|end|>                                       reasoning
    <|start|>assistant<|channel|>commentary<|message|>…<|end|>                   content
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>
    <|start|>assistant to=functions.f<|channel|>commentary json<|message|>{…}<|call|>    two calls
    <|start|>assistant<|channel|>final<|message|>…<|return|>                     content

`<|call|>` and `<|return|>` end answers, so that texts lack them. A text that begins with no header
is content: it has another form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import ClassVar, Final

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

_HEADERS: Final = (CHANNEL, " to=", START)
"""What an answer in channels may begin with."""
_ENDS: Final = (END, RETURN, CALL, START)
"""What ends the text of a message."""
_MOST_HEADER: Final = 1024
"""Characters: what is longer is none."""
_CHANNEL_NAME: Final = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_RECIPIENT: Final = re.compile(r"(?:^|[\s>])to=([^\s<]+)")
_BETWEEN: Final = "\n\n"
"""Between the texts of two messages."""


class HarmonyReader(PartsReader):
    """Reads messages by their channels. `READS_CALLS`: those to functions are calls of them."""

    FORMAT = "harmony"
    NAMES = (START, CHANNEL, CONSTRAIN, MESSAGE, END, RETURN, CALL)
    READS_REASONING = True
    READS_CALLS: ClassVar[bool] = True

    def __init__(
        self, draft: Draft, *, is_start: bool, parameters: ToolParameters = NO_TOOLS
    ) -> None:
        super().__init__(draft, is_start=is_start, parameters=parameters)
        self._held = ""  # of a header
        self._num_taken = 0
        self._thoughts: list[tuple[int, int]] = []
        self._arguments: list[str] = []
        self._has_said = self._has_thought = False
        self._gap = ""  # before what is next said or thought
        self._write: Callable[[str], None] = self._say
        self._matcher = StopMatcher(_ENDS)
        self._step: Callable[[str], str] = self._at_start if is_start else self._in_message

    @property
    def thoughts(self) -> Sequence[tuple[int, int]]:
        """Where in the text reasoning begins and ends, message by message."""
        return self._thoughts

    def push(self, text: str) -> None:
        """Take the next piece."""
        self._num_taken += len(text)
        while text and not self.is_over:
            text = self._step(text)

    def finish(self) -> None:
        """Take note of the end. A header that has not ended says nothing."""
        if self.is_over:
            return
        if self._step == self._at_start:
            self._say(self._held)
        elif self._step == self._in_message:
            self._write(self._matcher.finish())
            self._end_message(is_marked=False)

    # --- the steps: each takes a part of the text, and returns the rest ---

    def _at_start(self, text: str) -> str:
        self._held += text
        if any(self._held.startswith(header) for header in _HEADERS):
            return self._begin_header()
        if not any(header.startswith(self._held) for header in _HEADERS):
            self._begin_message(self._say)
            rest, self._held = self._held, ""
            return rest
        return ""

    def _begin_header(self) -> str:
        """Read what is held back as the beginning of a header."""
        self._step = self._in_header
        rest, self._held = self._held, ""
        return rest

    def _in_header(self, text: str) -> str:
        self._held += text
        header, mark, rest = self._held.partition(MESSAGE)
        if not mark:
            if len(self._held) > _MOST_HEADER:
                self._begin_message(self._say)
                rest, self._held = self._held, ""
                return rest
            return ""
        self._held = ""
        self._begin_message(self._writer_of(header), len(rest))
        return rest

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

    def _begin_message(self, write: Callable[[str], None], num_left: int = 0) -> None:
        """Begin to read a message's text. `num_left`: characters that have come of it already."""
        self._write, self._step = write, self._in_message
        self._matcher = StopMatcher(_ENDS)
        self._arguments.clear()
        follows = self._has_thought if write == self._think else self._has_said
        self._gap = _BETWEEN if follows else ""
        if write == self._think:
            begin = self._num_taken - num_left
            self._thoughts.append((begin, begin))

    def _in_message(self, text: str) -> str:
        known = self._matcher.held + text
        released, mark = self._matcher.push(text)
        self._write(released)
        if mark is None:
            return ""
        self._end_message(is_marked=True)
        self._step = self._in_header if mark == START else self._between
        return known[len(released) + len(mark) :]

    def _end_message(self, *, is_marked: bool) -> None:
        """Take note that a message is over, or the answer."""
        if self._write != self._add_arguments:
            return
        arguments = "".join(self._arguments)
        if not arguments.strip() and is_marked:
            self._draft.add_arguments("{}")
        elif not is_marked and not _is_whole(arguments):
            return
        self._draft.end_call()
        self.is_over = self._draft.is_full

    def _between(self, text: str) -> str:
        """Skip space until the next message begins; other text is content."""
        self._held += text
        begun = self._held.lstrip()
        if START.startswith(begun):
            if begun == START:
                self._held, self._step = "", self._in_header
            return ""
        self._held = ""
        if begun.startswith(START):
            self._step = self._in_header
            return begun.removeprefix(START)
        self._begin_message(self._say)
        return begun

    # --- what takes the text of messages ---

    def _say(self, text: str) -> None:
        if text:
            self._draft.say(self._gap + text)
            self._gap, self._has_said = "", True

    def _think(self, text: str) -> None:
        if text:
            begin, end = self._thoughts[-1]
            self._thoughts[-1] = begin, end + len(text)
            self._draft.think(self._gap + text)
            self._gap, self._has_thought = "", True

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
