"""What the text of an answer comes apart into, a piece at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class CallPiece(NamedTuple):
    """What is new of call `number`, the first of which is 0.

    `name`: in its first piece only. `arguments`: what is new of their text. `at`: how much of the
    content that comes with it stands before it, in characters.
    """

    number: int
    name: str | None
    arguments: str
    at: int = 0


class Parts(NamedTuple):
    """What is new of an answer, or all of it. `calls`: each once."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallPiece, ...] = ()

    def in_order(self) -> Iterator[str | CallPiece]:
        """Return content and calls as they were written; reasoning stands before all of them."""
        done = 0
        for call in self.calls:
            if call.at > done:
                yield self.content[done : call.at]
                done = call.at
            yield call
        if done < len(self.content):
            yield self.content[done:]


NOTHING = Parts()


class Draft:
    """Collects what readers of an answer find, until it is taken.

    `max_calls`: those beyond it are left out; None: as many as come. `num_calls`: that began.
    `is_calling`: the last of them that is not left out has all its arguments.
    """

    __slots__ = (
        "_calls",
        "_content",
        "_max_calls",
        "_num_said",
        "_reasoning",
        "is_calling",
        "num_calls",
    )

    def __init__(self, max_calls: int | None = None) -> None:
        self._max_calls = max_calls
        self._content: list[str] = []
        self._num_said = 0
        self._reasoning: list[str] = []
        self._calls: dict[int, tuple[str | None, list[str], int]] = {}
        self.num_calls = 0
        self.is_calling = False

    def say(self, text: str) -> None:
        """Add to the content."""
        if text:
            self._content.append(text)
            self._num_said += len(text)

    def think(self, text: str) -> None:
        """Add to the reasoning."""
        if text:
            self._reasoning.append(text)

    def begin_call(self, name: str) -> None:
        """Begin the next call."""
        self.num_calls += 1
        if self._is_wanted:
            self.is_calling = False
            self._calls[self.num_calls - 1] = (name, [], self._num_said)

    def add_arguments(self, text: str) -> None:
        """Add to the arguments of the call that began last."""
        if self._is_wanted:
            self._calls.setdefault(self.num_calls - 1, (None, [], 0))[1].append(text)

    def end_call(self) -> None:
        """Note that the arguments of the call are whole."""
        self.is_calling = True

    def take(self) -> Parts:
        """Return what came since."""
        if not (self._content or self._reasoning or self._calls):
            return NOTHING
        calls = tuple(
            CallPiece(number, name, "".join(pieces), at)
            for number, (name, pieces, at) in self._calls.items()
        )
        parts = Parts("".join(self._content), "".join(self._reasoning), calls)
        self._content, self._num_said, self._reasoning, self._calls = [], 0, [], {}
        return parts

    @property
    def is_full(self) -> bool:
        """Whether no further call is wanted."""
        return self._max_calls is not None and self.num_calls >= self._max_calls

    @property
    def _is_wanted(self) -> bool:
        return self._max_calls is None or self.num_calls <= self._max_calls
