"""The items of a response: messages, reasoning and calls, one behind the other, with their events.

An item begins when the first of it is written and is done when the next begins, so that a client
may read the events as one story.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Final, TypeAlias

from control_plane.http.answers import Piece
from control_plane.http.json_text import SpelledList
from control_plane.http.runs import Run, Runs
from control_plane.text.answers.parts import CallPiece, Thought
from control_plane.text.answers.reader import AnswerReader

Event: TypeAlias = tuple[str, dict[str, Any]]
"""Its type and the rest of it, in which some may be `Spelled`."""

Entries: TypeAlias = list[dict[str, object]]
"""Log-probabilities, one entry a token."""

IN_PROGRESS: Final = "in_progress"
COMPLETED: Final = "completed"
INCOMPLETE: Final = "incomplete"


class Item(ABC):
    """One item. `index`: its place among all of them; `status`: in progress until it has another.

    `text`: what it says, thinks or calls with.
    """

    PREFIX: str
    NAME: str
    """Of its id, and of the events that tell its text."""

    def __init__(self, request_id: str, index: int) -> None:
        self.id = f"{self.PREFIX}_{request_id}_{index}"
        self.index = index
        self.status = IN_PROGRESS
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self._texts)

    @abstractmethod
    def value(self) -> dict[str, Any]:
        """Return the item as far as it is written."""

    def begin(self) -> list[Event]:
        """Return the events before its first text."""
        return [("response.output_item.added", {"output_index": self.index, "item": self.value()})]

    def add(self, text: str) -> Event:
        """Take the next text."""
        self._texts.append(text)
        return f"{self.NAME}.delta", {**self._place(), "delta": text}

    def end(self, status: str) -> list[Event]:
        """Return the events behind its last text."""
        self.status = status
        done = (f"{self.NAME}.done", {**self._place(), **self._all_of_it()})
        rest = [("response.output_item.done", {"output_index": self.index, "item": self.value()})]
        return [done, *self._last(), *rest]

    @abstractmethod
    def _all_of_it(self) -> dict[str, Any]:
        """Return what the event says that has all of the text."""

    def _last(self) -> list[Event]:
        return []

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": self.index}


class _InParts(Item):
    """An item whose text is the one part of its content."""

    def begin(self) -> list[Event]:
        part = ("response.content_part.added", {**self._place(), "part": self._part()})
        return [*super().begin(), part]

    @abstractmethod
    def _part(self) -> dict[str, Any]: ...

    def _content(self) -> list[dict[str, Any]]:
        return [] if self.status == IN_PROGRESS else [self._part()]

    def _last(self) -> list[Event]:
        return [("response.content_part.done", {**self._place(), "part": self._part()})]

    def _place(self) -> dict[str, Any]:
        return {**super()._place(), "content_index": 0}


class Message(_InParts):
    """What the model says, with the log-probabilities of its tokens, if they were asked for.

    `untold`: those that have not come with a text yet.
    """

    PREFIX = "msg"
    NAME = "response.output_text"

    def __init__(self, request_id: str, index: int, untold: SpelledList) -> None:
        super().__init__(request_id, index)
        self._logprobs = SpelledList()
        self._untold = untold

    def add(self, text: str) -> Event:
        """Take the next text; the tokens since the last come with it."""
        kind, event = super().add(text)
        self._logprobs.add(self._untold)
        return kind, {**event, "logprobs": self._untold.taken() if self._untold else []}

    def value(self) -> dict[str, Any]:
        """Return the message as far as it is written."""
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "status": self.status,
            "content": self._content(),
        }

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", **self._all_of_it(), "annotations": []}

    def _all_of_it(self) -> dict[str, Any]:
        is_done = self.status != IN_PROGRESS  # with its beginning none come
        return {"text": self.text, "logprobs": self._logprobs.joined() if is_done else []}


class Reasoning(_InParts):
    """What the model thinks."""

    PREFIX = "rs"
    NAME = "response.reasoning_text"

    def value(self) -> dict[str, Any]:
        """Return the reasoning as far as it is written."""
        return {
            "id": self.id,
            "type": "reasoning",
            "status": self.status,
            "summary": [],
            "content": self._content(),
        }

    def _part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", **self._all_of_it()}

    def _all_of_it(self) -> dict[str, Any]:
        return {"text": self.text}


class Call(Item):
    """A function that the model calls; its text is the arguments."""

    PREFIX = "fc"
    NAME = "response.function_call_arguments"

    def __init__(self, request_id: str, index: int, call_id: str, name: str) -> None:
        super().__init__(request_id, index)
        self._call_id = call_id
        self._name = name

    def value(self) -> dict[str, Any]:
        """Return the call as far as it is written."""
        return {
            "id": self.id,
            "type": "function_call",
            "status": self.status,
            "call_id": self._call_id,
            **self._all_of_it(),
        }

    def _all_of_it(self) -> dict[str, Any]:
        return {"name": self._name, "arguments": self.text}


class Output:
    """The items of one answer, made of its text. `reader`: None: all of it is one message.

    Log-probabilities, of all tokens that there are, go with the messages: what has come since the
    last text of one with the next, whichever tokens that was made of.
    """

    def __init__(self, request_id: str, reader: AnswerReader | None) -> None:
        self._request_id = request_id
        self._runs = Runs(reader)
        self._items: list[Item] = []
        self._untold = SpelledList()

    @property
    def num_reasoning_tokens(self) -> int:
        """Once it has finished."""
        return self._runs.num_reasoning_tokens

    def push(self, piece: Piece, entries: Entries) -> list[Event]:
        """Take the next piece of the text; the events of what is certain now."""
        self._untold.extend(entries)
        return self._write(self._runs.push(piece)) + self._tell_the_rest()

    def feed(self, piece: Piece, entries: Entries) -> None:
        """Take the next piece of a text that is wanted as a whole."""
        if entries:  # each goes with its own message
            self.push(piece, entries)
        else:
            self._write(self._runs.feed(piece))

    def finish(self, status: str) -> list[Event]:
        """Take note of the end; `status`: of the response."""
        events = self._write(self._runs.finish("length" if status == INCOMPLETE else "stop"))
        if not self._items:
            events += self._begin(self._new_message())
        events += self._tell_the_rest()
        last = self._items[-1]
        if isinstance(last, Call):
            # A stop text may cut arguments off, and a length an answer behind them.
            status = self._status_of_call()
        return [*events, *last.end(status)]

    def values(self) -> list[dict[str, Any]]:
        """Return the items as far as they are written."""
        return [item.value() for item in self._items]

    def cut_off(self) -> None:
        """Take note that nothing more comes; a call that has all its arguments is completed."""
        for item in self._items[-1:]:
            item.status = self._status_of_call() if isinstance(item, Call) else INCOMPLETE

    def _status_of_call(self) -> str:
        """Return the status of a call that is the last item, when nothing more comes."""
        return COMPLETED if self._runs.is_calling else INCOMPLETE

    def _write(self, runs: list[Run]) -> list[Event]:
        events: list[Event] = []
        for run in runs:
            if run.is_new:
                events += self._begin(self._new_item(run), self._status_of_last(run))
            if run.text or not isinstance(run.part, CallPiece):
                events.append(self._items[-1].add(run.text))
        return events

    def _new_item(self, run: Run) -> Item:
        index = len(self._items)
        if isinstance(run.part, CallPiece):
            return Call(self._request_id, index, run.call_id, run.part.name or "")
        if isinstance(run.part, Thought):
            return Reasoning(self._request_id, index)
        return self._new_message()

    def _new_message(self) -> Message:
        return Message(self._request_id, len(self._items), self._untold)

    def _status_of_last(self, run: Run) -> str:
        """Return the status of the item before a run that begins: a call may have been broken."""
        is_open = bool(self._items) and isinstance(self._items[-1], Call)
        is_last_call = run.is_behind_calls and not isinstance(run.part, CallPiece)
        return self._status_of_call() if is_open and is_last_call else COMPLETED

    def _tell_the_rest(self) -> list[Event]:
        """Tell of tokens that have no text."""
        is_open = bool(self._items) and isinstance(self._items[-1], Message)
        return [self._items[-1].add("")] if self._untold and is_open else []

    def _begin(self, item: Item, status: str = COMPLETED) -> list[Event]:
        """Begin an item; the one before it is done, and `status` its own."""
        events = self._items[-1].end(status) if self._items else []
        self._items.append(item)
        return events + item.begin()
