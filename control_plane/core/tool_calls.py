"""Calls of tools as the form of an answer: which, with what arguments, written how."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Final, Literal, NamedTuple, TypeAlias

from control_plane.core.structured_outputs import MAX_SCHEMA_CHARACTERS
from planes.errors import ValidationError

TOOL_CHOICE: Final = "tool_choice"

Thought: TypeAlias = Literal["none", "may begin", "has begun"]
"""Whether there may be reasoning before the calls: none, at the answer's beginning, or the answer
begins inside of it."""


class ThoughtMarks(NamedTuple):
    """What stands before and behind the reasoning of an answer.

    `label`: a word behind the first mark, without which that begins none. `recur`: more reasoning
    may stand further on, and the second mark alone says nothing.
    """

    begin: str
    end: str
    label: str = ""
    recur: bool = False

    @property
    def opening(self) -> str:
        """All that stands before the reasoning."""
        return self.begin + self.label

    @property
    def names(self) -> tuple[str, str]:
        """What may be special tokens."""
        return self.begin, self.end


THINK: Final = ThoughtMarks("<think>", "</think>")


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A tool that may be called.

    `schema`: of its arguments, the JSON text of a JSON Schema of at most 65 536 characters.
    `place`: what the caller calls this schema, for errors.
    """

    name: str
    schema: str
    place: str


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """An answer must be calls of tools, in the format that its reader reads.

    `format`: its name. `tools`: at least one. `may_say`: it may be other text, too, before, between
    and behind calls, and have none of them. `is_single`: one call at most. `is_start`: the
    assistant's message begins with the answer. `thought_marks`: of its reasoning. `tokens`: marks
    that are one special token each, names and ids. `name`: what the caller wants all this by.
    """

    format: str
    tools: tuple[CallableTool, ...]
    may_say: bool = False
    is_single: bool = False
    thought: Thought = "none"
    thought_marks: ThoughtMarks = THINK
    is_start: bool = True
    tokens: tuple[tuple[str, int], ...] = ()
    name: str = field(default=TOOL_CHOICE, compare=False)

    kind: ClassVar[str] = "calls"

    def wrong(self, _kind: str, message: str) -> ValidationError:
        """Return the error that all of it is wrong."""
        return ValidationError(f"{self.name} {message}", field=self.name)

    def validate(self) -> None:
        """Raise ValidationError for a schema that is too long."""
        for tool in self.tools:
            size = len(tool.schema)
            if size > MAX_SCHEMA_CHARACTERS:
                raise ValidationError(
                    f"{tool.place} must have at most {MAX_SCHEMA_CHARACTERS} characters for "
                    f"{self.name}, got {size}",
                    field=tool.place,
                )
