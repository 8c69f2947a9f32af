"""What reads an answer's parts out of its text, whatever format it is in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from control_plane.text.answers.parameter_kinds import NO_TOOLS, ToolParameters
from control_plane.text.answers.parts import Draft


class PartsReader(ABC):
    """Reads content and calls out of one text, into a draft. `is_start`: the answer begins with it.

    `FORMAT`: its name. `NAMES`: what may be special tokens in a vocabulary, and must be in the
    text. `READS_PARAMETERS`: what it reads depends on the tools' `parameters`. `READS_REASONING`:
    reasoning, too, may stand anywhere in the text, and `thinks` says whether it is told apart;
    otherwise what is read has none. `is_over`: nothing behind the last call that is wanted is read.
    """

    FORMAT: ClassVar[str]
    NAMES: ClassVar[tuple[str, ...]]
    READS_PARAMETERS: ClassVar[bool] = False
    READS_REASONING: ClassVar[bool] = False

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

    @property
    def thoughts(self) -> Sequence[tuple[int, int]]:
        """Where in the text reasoning begins and ends, as far as is certain, in characters."""
        return ()

    @abstractmethod
    def push(self, text: str) -> None:
        """Take the next piece."""

    @abstractmethod
    def finish(self) -> None:
        """Take note of the end: what was held back is released."""
