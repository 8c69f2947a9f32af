"""What a conversation of `hetero-infer chat` has come to."""

from __future__ import annotations

from typing import Final

from hetero_infer.client import AnswerParts, Message

INTERRUPTED: Final = " [interrupted]"
"""Ends an answer that was cancelled, for the model too: it did not mean to stop there."""


class History:
    """The messages so far: an optional system message, then user and assistant in turns."""

    def __init__(self, system: str | None = None) -> None:
        self.system = system or None
        self._turns: list[Message] = []

    @property
    def messages(self) -> tuple[Message, ...]:
        """What the model is given."""
        first = () if self.system is None else (Message("system", self.system),)
        return (*first, *self._turns)

    def ask(self, text: str) -> None:
        """Add what the user says."""
        self._turns.append(Message("user", text))

    def answer(self, parts: AnswerParts, *, is_interrupted: bool = False) -> None:
        """Add what the assistant said and thought, all of it or until it was interrupted."""
        text = parts.content
        if is_interrupted:
            text = (text.rstrip() + INTERRUPTED).lstrip()
        thought = parts.reasoning_content
        self._turns.append(Message("assistant", text, reasoning_content=thought))

    @property
    def num_turns(self) -> int:
        """Messages but for the system message."""
        return len(self._turns)

    def rewind(self, num_turns: int) -> None:
        """Forget what came after so many turns: a question that could not be answered."""
        del self._turns[num_turns:]

    def reset(self) -> None:
        """Forget everything but the system message."""
        self._turns.clear()
