"""The parser of one answer, and what is known of an answer before its first word."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from control_plane.core.tool_calls import THINK, ThoughtMarks
from control_plane.text.answers.parameter_kinds import NO_TOOLS, ToolParameters
from control_plane.text.answers.parts import Draft, Parts
from control_plane.text.answers.parts_reader import MOST_AT_ONCE, PartsReader
from control_plane.text.answers.until import SPACE, Until


class Thinking(enum.Enum):
    """Where the reasoning of an answer is."""

    MAY_BEGIN = enum.auto()
    """The answer may begin with some."""

    HAS_BEGUN = enum.auto()
    """The prompt opened it, so that the answer begins inside."""

    MAY_COME = enum.auto()
    """The answer begins with none, but more may stand further on."""

    IS_OVER = enum.auto()
    """There is none, or what looks like it is text."""


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How the text of an answer is to be read.

    `calls`: makes what reads tool calls; None: they are text. Of a format in which reasoning may
    stand anywhere it reads that, too. `is_start`: the assistant's message begins with the answer.
    `spelled`: special tokens that must be in the text, which leaves such tokens out otherwise:
    their ids and names. `parameters`: of the tools, where calls cannot be read without. `marks`: of
    the reasoning. `form_opening`: what the prompt has besides where the answer has a form of its
    own, and so begins with its content. `num_earlier_calls`: in the conversation.
    """

    thinking: Thinking
    calls: type[PartsReader] | None = None
    is_start: bool = True
    spelled: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}))
    parameters: ToolParameters = field(default_factory=lambda: NO_TOOLS)
    marks: ThoughtMarks = THINK
    form_opening: str = ""
    num_earlier_calls: int = 0

    @property
    def marks_are_tokens(self) -> bool:
        """Whether what a text spells is none of the marks of calls, and what is one can be told."""
        calls = self.calls
        if calls is None or not calls.READS_REASONING:
            return False
        return not set(calls.NAMES).isdisjoint(self.spelled.values())

    def parser(self, *, max_calls: int | None = None, knows_marks: bool = False) -> AnswerParser:
        """Return a new parser. `max_calls`: calls beyond it are left out.

        `knows_marks`: it is told of all special tokens.
        """
        return AnswerParser(self, max_calls=max_calls, knows_marks=knows_marks)


_BETWEEN: Final = "\n\n"
"""Between two runs of reasoning."""


class AnswerParser:
    """Takes the text of one answer apart while it comes; used by one task at a time.

    What comes out does not depend on how the text was cut. Nothing is held back but what may yet
    belong to a marker, or to a call before its arguments begin.
    """

    def __init__(
        self,
        answer_format: AnswerFormat,
        *,
        max_calls: int | None = None,
        knows_marks: bool = False,
    ) -> None:
        self.knows_marks = knows_marks
        self._draft = Draft(max_calls)
        make = answer_format.calls
        self._calls: PartsReader | None = None
        if make is not None:
            self._calls = make(
                self._draft,
                is_start=answer_format.is_start,
                parameters=answer_format.parameters,
            )
            self._calls.knows_marks = knows_marks
        thinking = answer_format.thinking
        if self._calls is not None and self._calls.READS_REASONING:
            self._calls.thinks = thinking is not Thinking.IS_OVER
            thinking = Thinking.IS_OVER
        self._step: Callable[[str], str] = {
            Thinking.MAY_BEGIN: self._at_start,
            Thinking.HAS_BEGUN: self._behind_think,
            Thinking.MAY_COME: self._answer,
            Thinking.IS_OVER: self._answer,
        }[thinking]
        # At the start: space, and what may be the beginning of the mark of reasoning.
        self._start_space: list[str] = []
        self._held = ""
        marks = answer_format.marks
        self._begin = marks.opening
        self._end = Until((marks.end,))
        recurs = marks.recur and thinking is not Thinking.IS_OVER
        self._later = Until((marks.opening, marks.end)) if recurs else None
        self._gap: list[str] = []  # in front of the content that comes next
        self._has_thought = False
        self._num_taken = 0  # characters
        self._thoughts: list[tuple[int, int]] = []

    @property
    def is_calling(self) -> bool:
        """Whether the answer calls tools, and says so to the end."""
        return self._draft.is_calling

    @property
    def is_over(self) -> bool:
        """Whether all calls that are wanted have been read: what follows is left out."""
        return self._calls is not None and self._calls.is_over

    @property
    def may_think(self) -> bool:
        """Whether what comes next may be reasoning."""
        if self._calls is not None and self._calls.READS_REASONING:
            return self._calls.thinks
        if self._later is not None:
            return True
        return self._step in (self._at_start, self._behind_think, self._think)

    @property
    def reasoning(self) -> Sequence[tuple[int, int]]:
        """Where in the text reasoning begins and ends, as far as it is certain, in characters."""
        if self._calls is not None and self._calls.READS_REASONING:
            return self._calls.thoughts
        return self._thoughts

    def push(self, text: str) -> Parts:
        """Take the next piece of the text; the parts that are certain now."""
        self.feed(text)
        return self._draft.take()

    def feed(self, text: str) -> None:
        """Take the next piece of the text; its parts come with the next ones that are returned."""
        for at in range(0, len(text), MOST_AT_ONCE):
            rest = text[at : at + MOST_AT_ONCE]
            self._num_taken += len(rest)
            while rest:
                rest = self._step(rest)

    def note_mark(self, at: int, name: str) -> None:
        """Take note of a special token before its text comes. `at`: characters before that."""
        if self._calls is not None:
            self._calls.note_mark(at, name)

    def finish(self, *, is_cut_off: bool = False) -> Parts:
        """Return what was held back, and what was fed: the text is over.

        `is_cut_off`: the model did not end it.
        """
        self._note_thought(self._end.finish())
        self._answer("".join((*self._start_space, self._held)))
        if self._later is not None:
            rest = self._later.finish()
            if rest.strip(SPACE) or not self._gap:
                self._tell("".join((*self._gap, rest)))
        if self._calls is not None:
            self._calls.finish(is_cut_off=is_cut_off)
        return self._draft.take()

    def _at_start(self, text: str) -> str:
        """Take text while it may be the beginning of the mark of reasoning."""
        if not self._held:
            begun = text.lstrip(SPACE)
            self._start_space.append(text[: len(text) - len(begun)])
            text = begun
        begun = self._held + text
        if self._begin.startswith(begun) and begun != self._begin:
            self._held = begun
            return ""
        space = "".join(self._start_space)
        self._start_space, self._held = [], ""
        if not begun.startswith(self._begin):
            self._step = self._answer
            return space + begun
        self._step = self._behind_think
        return begun.removeprefix(self._begin)

    def _behind_think(self, text: str) -> str:
        text = text.lstrip(SPACE)
        if text:
            at = self._num_taken - len(text)
            self._thoughts.append((at, at))
            self._step = self._think
        return text

    def _think(self, text: str) -> str:
        thought, opening, rest = self._end.push(text)
        self._note_thought(thought)
        if opening:
            self._step = self._behind_thinking
        return rest

    def _note_thought(self, text: str) -> None:
        if not text:
            return
        begin, end = self._thoughts[-1]
        self._thoughts[-1] = begin, end + len(text)
        self._draft.think(text, _BETWEEN if begin == end and self._has_thought else "")
        self._has_thought = True

    def _behind_thinking(self, text: str) -> str:
        text = text.lstrip(SPACE)
        if text:
            self._step = self._answer
        return text

    def _answer(self, text: str) -> str:
        """Take what is no reasoning, up to where more of it begins."""
        if self._later is None:
            self._tell(text)
            return ""
        said, opening, rest = self._later.push(text)
        if said:
            self._tell("".join((*self._gap, said)))
            self._gap.clear()
        mark = opening.lstrip(SPACE)
        if mark and self._calls is not None and self._calls.is_in_call:
            self._tell(opening)
        elif mark:
            self._gap.append(opening.removesuffix(mark))
            self._step = self._behind_think if mark == self._begin else self._answer
        return rest

    def _tell(self, text: str) -> None:
        if self._calls is None:
            self._draft.say(text)
            return
        for at in range(0, len(text), MOST_AT_ONCE):
            self._calls.push(text[at : at + MOST_AT_ONCE])
