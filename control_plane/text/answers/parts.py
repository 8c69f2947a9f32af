"""What the text of an answer comes apart into, a piece at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, TypeAlias


class CallPiece(NamedTuple):
    """What is new of call `number`, the first of which is 0.

    `name`: in its first piece only. `arguments`: what is new of their text.
    """

    number: int
    name: str | None
    arguments: str


class Said(NamedTuple):
    """A run of content. `gap`: with which it begins, behind the content before it."""

    text: str
    gap: str = ""


class Thought(NamedTuple):
    """A run of reasoning. `gap`: with which it begins, behind the reasoning before it."""

    text: str
    gap: str = ""


Part: TypeAlias = Said | Thought | CallPiece


class Parts(NamedTuple):
    """What is new of an answer, or all of it. `calls`: each once.

    `runs`: all of it in the order in which it was written, where reasoning, content and calls, each
    in one piece, do not say it.
    """

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallPiece, ...] = ()
    runs: tuple[Part, ...] = ()

    def without_content(self) -> Parts:
        """Return reasoning and calls alone."""
        runs = tuple(run for run in self.runs if not isinstance(run, Said))
        return self._replace(content="", runs=runs)

    def in_order(self) -> Iterator[Part]:
        """Return the parts as they were written."""
        if self.runs:
            yield from self.runs
            return
        if self.reasoning:
            yield Thought(self.reasoning)
        if self.content:
            yield Said(self.content)
        yield from self.calls


NOTHING = Parts()


_REASONING: Final = -2
_CONTENT: Final = -1


class _Run(NamedTuple):
    """What came of one part, in one piece. `kind`: _REASONING, _CONTENT or the number of a call."""

    kind: int
    name: str | None
    texts: list[str]
    gap: str = ""

    def part(self) -> Part:
        text = "".join(self.texts)
        if self.kind == _REASONING:
            return Thought(text, self.gap)
        return (
            Said(text, self.gap) if self.kind == _CONTENT else CallPiece(self.kind, self.name, text)
        )


class Draft:
    """Collects what readers of an answer find, until it is taken.

    `max_calls`: those beyond it are left out; None: as many as come. `num_calls`: that began.
    `is_calling`: the last of them that is not left out has all its arguments.
    """

    __slots__ = ("_max_calls", "_runs", "is_calling", "num_calls")

    def __init__(self, max_calls: int | None = None) -> None:
        self._max_calls = max_calls
        self._runs: list[_Run] = []
        self.num_calls = 0
        self.is_calling = False

    def say(self, text: str, gap: str = "") -> None:
        """Add to the content. `gap`: what is between it and the content before it."""
        if text:
            self._add(_CONTENT, text, gap)

    def think(self, text: str, gap: str = "") -> None:
        """Add to the reasoning. `gap`: what is between it and the reasoning before it."""
        if text:
            self._add(_REASONING, text, gap)

    def begin_call(self, name: str) -> None:
        """Begin the next call."""
        self.num_calls += 1
        if self._is_wanted:
            self.is_calling = False
            self._runs.append(_Run(self.num_calls - 1, name, []))

    def add_arguments(self, text: str) -> None:
        """Add to the arguments of the call that began last."""
        if self._is_wanted:
            self._add(self.num_calls - 1, text)

    def end_call(self) -> None:
        """Note that the arguments of the call are whole."""
        self.is_calling = True

    def take(self) -> Parts:
        """Return what came since."""
        runs = self._runs
        if not runs:
            return NOTHING
        self._runs = []
        parts = tuple(run.part() for run in runs)
        kinds = [run.kind for run in runs]
        is_plain = kinds == sorted(kinds) and not any(run.gap for run in runs)
        return Parts(
            "".join(part.text for part in parts if isinstance(part, Said)),
            "".join(part.text for part in parts if isinstance(part, Thought)),
            tuple(_whole_calls(parts)),
            () if is_plain else parts,
        )

    def _add(self, kind: int, text: str, gap: str = "") -> None:
        """Add to what came last, or begin another run."""
        if not self._runs or self._runs[-1].kind != kind:
            self._runs.append(_Run(kind, None, [], gap))
        self._runs[-1].texts.append(gap + text)

    @property
    def is_full(self) -> bool:
        """Whether no further call is wanted."""
        return self._max_calls is not None and self.num_calls >= self._max_calls

    @property
    def _is_wanted(self) -> bool:
        return self._max_calls is None or self.num_calls <= self._max_calls


def _whole_calls(parts: Sequence[Part]) -> Iterator[CallPiece]:
    """Yield each call once, whatever stands between its pieces."""
    pieces: dict[int, list[CallPiece]] = {}
    for part in parts:
        if isinstance(part, CallPiece):
            pieces.setdefault(part.number, []).append(part)
    for number, (first, *more) in pieces.items():
        arguments = first.arguments + "".join(piece.arguments for piece in more)
        yield CallPiece(number, first.name, arguments)
