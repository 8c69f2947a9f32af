"""The items of a response: messages, reasoning and calls, one behind the other, with their events.

An item begins when the first of it is written and is done when the next begins, so that a client
may read the events as one story.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Final, TypeAlias

from control_plane.http.answers import Piece
from control_plane.http.json_text import SpelledList
from control_plane.text.answers.parts import CallPiece, Parts, Said, Thought
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
        self._reader = reader
        self._items: list[Item] = []
        self._untold = SpelledList()

    @property
    def num_reasoning_tokens(self) -> int:
        """Once it has finished."""
        return 0 if self._reader is None else self._reader.num_reasoning_tokens

    def push(self, piece: Piece, entries: Entries) -> list[Event]:
        """Take the next piece of the text; the events of what is certain now."""
        self._untold.extend(entries)
        if self._reader is None:
            parts = Parts(piece.text)
        else:
            parts = self._reader.push(0, piece.text, piece.token_ids)
        events = self._write(parts)
        return events + self._tell_the_rest()

    def feed(self, piece: Piece, entries: Entries) -> None:
        """Take the next piece of a text that is wanted as a whole."""
        if entries:  # each goes with its own message
            self.push(piece, entries)
        elif self._reader is None:
            self._write(Parts(piece.text))
        else:
            self._reader.feed(0, piece.text, piece.token_ids)

    def finish(self, status: str) -> list[Event]:
        """Take note of the end; `status`: of the response."""
        reason = "length" if status == INCOMPLETE else "stop"
        events = [] if self._reader is None else self._write(self._reader.finish(0, reason))
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
        is_whole = self._reader is not None and self._reader.is_calling(0)
        return COMPLETED if is_whole else INCOMPLETE

    def _write(self, parts: Parts) -> list[Event]:
        events: list[Event] = []
        num_calls = len(parts.calls)
        for one in parts.in_order():
            is_behind_all = num_calls == 0
            if isinstance(one, CallPiece):
                num_calls -= 1
                events += self._call(one)
            elif isinstance(one, Thought):
                events += self._think(one, is_behind_all=is_behind_all)
            else:
                events += self._say(one, is_behind_all=is_behind_all)
        return events

    def _think(self, part: Thought, *, is_behind_all: bool) -> list[Event]:
        """Add to the reasoning. `is_behind_all`: to what was read of calls, whole or not."""
        events, text = [], part.text
        if not (self._items and isinstance(self._items[-1], Reasoning)):
            item = Reasoning(self._request_id, len(self._items))
            events = self._begin(item, self._status_of_last(is_behind_all=is_behind_all))
            text = text.removeprefix(part.gap)
        return [*events, self._items[-1].add(text)]

    def _say(self, part: Said, *, is_behind_all: bool = False) -> list[Event]:
        """Add to the message. `is_behind_all`: to what was read of calls, whole or not."""
        events, text = [], part.text
        if not (self._items and isinstance(self._items[-1], Message)):
            item = self._new_message()
            events = self._begin(item, self._status_of_last(is_behind_all=is_behind_all))
            text = text.removeprefix(part.gap)
        return [*events, self._items[-1].add(text)]

    def _status_of_last(self, *, is_behind_all: bool) -> str:
        is_open = is_behind_all and bool(self._items) and isinstance(self._items[-1], Call)
        return self._status_of_call() if is_open else COMPLETED

    def _new_message(self) -> Message:
        return Message(self._request_id, len(self._items), self._untold)

    def _tell_the_rest(self) -> list[Event]:
        """Tell of tokens that have no text."""
        is_open = bool(self._items) and isinstance(self._items[-1], Message)
        return self._say(Said("")) if self._untold and is_open else []

    def _call(self, piece: CallPiece) -> list[Event]:
        events = []
        if piece.name is not None and self._reader is not None:
            call_id = self._reader.call_id(0, piece)
            events = self._begin(Call(self._request_id, len(self._items), call_id, piece.name))
        return [*events, self._items[-1].add(piece.arguments)] if piece.arguments else events

    def _begin(self, item: Item, status: str = COMPLETED) -> list[Event]:
        """Begin an item; the one before it is done, and `status` its own."""
        events = self._items[-1].end(status) if self._items else []
        self._items.append(item)
        return events + item.begin()
