"""What reads an answer's parts out of its text, whatever format it is in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Final

from control_plane.text.answers.parameter_kinds import NO_TOOLS, ToolParameters
from control_plane.text.answers.parts import Draft

MOST_AT_ONCE: Final = 1024
"""Characters that a reader is given. Its steps return the rest: of more it would be a long copy."""


class PartsReader(ABC):
    """Reads content and calls out of one text, into a draft. `is_start`: the answer begins with it.

    `FORMAT`: its name. `MARKERS`: what begins calls, if any single one does. `NAMES`: what may be
    special tokens in a vocabulary, and must be in the text. `READS_PARAMETERS`: what it reads
    depends on the tools' `parameters`. `READS_REASONING`: reasoning, too, may stand anywhere in the
    text, and `thinks` says whether it is told apart; otherwise what is read has none.
    `READS_CALLS`: they come out as such. `is_over`: nothing behind the last call that is wanted is
    read. `knows_marks`: of `NAMES` only those are marks that `note_mark` tells of; only formats
    that read reasoning ask for it.
    """

    FORMAT: ClassVar[str]
    MARKERS: ClassVar[tuple[str, ...]] = ()
    NAMES: ClassVar[tuple[str, ...]]
    READS_PARAMETERS: ClassVar[bool] = False
    READS_REASONING: ClassVar[bool] = False
    READS_CALLS: ClassVar[bool] = True

    def __init__(
        self,
        draft: Draft,
        *,
        is_start: bool,  # noqa: ARG002 - of some formats only
        parameters: ToolParameters = NO_TOOLS,  # noqa: ARG002 - of one
    ) -> None:
        self._draft = draft
        self.is_over = False
        self.thinks = True
        self.knows_marks = False

    @staticmethod
    def call_id(name: str, number: int) -> str | None:  # noqa: ARG004 - most want none
        """Return the id that the format's templates want of a call; None: any.

        `number`: of calls before it in the conversation.
        """
        return None

    @property
    def is_in_call(self) -> bool:
        """Whether what comes next may be a part of a call, whatever it looks like."""
        return False

    @property
    def thoughts(self) -> Sequence[tuple[int, int]]:
        """Where in the text reasoning begins and ends, as far as is certain, in characters."""
        return ()

    def note_mark(self, at: int, name: str) -> None:  # noqa: B027 - most ask for none
        """Take note of a special token before its text comes. `at`: characters before that."""

    @abstractmethod
    def push(self, text: str) -> None:
        """Take the next piece."""

    @abstractmethod
    def finish(self, *, is_cut_off: bool = False) -> None:
        """Take note of the end: what was held back is released.

        `is_cut_off`: the model did not end the answer.
        """
