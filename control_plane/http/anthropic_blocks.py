"""The blocks of a message: thinking, text and calls, one behind the other, with their events.

A block begins with its first text, and stops when the next begins.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Any, TypeAlias

from control_plane.http.answers import Piece
from control_plane.http.anthropic_input import INVALID_JSON
from control_plane.http.runs import Run, Runs
from control_plane.text.answers.parts import CallPiece, Thought
from control_plane.text.answers.reader import AnswerReader
from control_plane.text.conversation import call_arguments

Event: TypeAlias = dict[str, Any]


class Block(ABC):
    """One block. `index`: its place among all of them."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._texts: list[str] = []

    @abstractmethod
    def value(self) -> dict[str, Any]:
        """Return the block as far as it is written."""

    def begin(self) -> Event:
        """Return the event before its first text."""
        return self._event("content_block_start", content_block=self.value())

    def add(self, text: str) -> list[Event]:
        """Take the next text; the events that tell it."""
        self._texts.append(text)
        return [self._event("content_block_delta", delta=self._delta(text))]

    def end(self) -> list[Event]:
        """Return the events behind its last text."""
        return [self._event("content_block_stop")]

    @abstractmethod
    def _delta(self, text: str) -> dict[str, str]: ...

    @property
    def _text(self) -> str:
        return "".join(self._texts)

    def _event(self, kind: str, **content: object) -> Event:
        return {"type": kind, "index": self._index, **content}


class TextBlock(Block):
    """What the model says."""

    def value(self) -> dict[str, Any]:
        """Return the text so far."""
        return {"type": "text", "text": self._text, "citations": None}

    def _delta(self, text: str) -> dict[str, str]:
        return {"type": "text_delta", "text": text}


class ThinkingBlock(Block):
    """What the model thinks. `signature`: told behind it; `is_omitted`: its text is not wanted."""

    def __init__(self, index: int, signature: str, *, is_omitted: bool) -> None:
        super().__init__(index)
        self._final_signature, self._is_omitted = signature, is_omitted
        self._signature = ""

    def value(self) -> dict[str, Any]:
        """Return the thinking so far."""
        return {"type": "thinking", "thinking": self._text, "signature": self._signature}

    def add(self, text: str) -> list[Event]:
        """Take the next text."""
        return [] if self._is_omitted else super().add(text)

    def end(self) -> list[Event]:
        """Return the event of the signature, and the last."""
        self._signature = self._final_signature
        delta = {"type": "signature_delta", "signature": self._signature}
        return [self._event("content_block_delta", delta=delta), *super().end()]

    def _delta(self, text: str) -> dict[str, str]:
        return {"type": "thinking_delta", "thinking": text}


class ToolUseBlock(Block):
    """A tool that the model calls; its text is the JSON of the input.

    `is_eager`: that is told as it comes, though it may never become JSON. Else it is told at the
    end, and is an object then, as the value has it: clients raise on what they cannot parse, and
    take the beginning of an input for all of it.
    """

    def __init__(self, index: int, call_id: str, name: str, *, is_eager: bool) -> None:
        super().__init__(index)
        self._call_id, self._name = call_id, name
        self._is_eager = is_eager

    def value(self) -> dict[str, Any]:
        """Return the call; what is no object stands in one, so that nothing of it is lost."""
        given = call_arguments(self._text)
        return {
            "type": "tool_use",
            "id": self._call_id,
            "name": self._name,
            "input": {INVALID_JSON: given} if isinstance(given, str) else given,
        }

    def add(self, text: str) -> list[Event]:
        """Take the next text."""
        events = super().add(text)
        return events if self._is_eager else []

    def end(self) -> list[Event]:
        """Return the input, if it was not told, and the last event."""
        text = self._text
        if self._is_eager or not text:
            return super().end()
        if isinstance(call_arguments(text), str):
            text = json.dumps({INVALID_JSON: text}, ensure_ascii=False)
        delta = self._event("content_block_delta", delta=self._delta(text))
        return [delta, *super().end()]

    def _delta(self, text: str) -> dict[str, str]:
        return {"type": "input_json_delta", "partial_json": text}


class Blocks:
    """The blocks of one answer, made of its text. `reader`: None: all of it is one text.

    `signature`: of what the model thinks; `omits_thinking`: blocks of it are to have no text.
    `eager`: the names of tools whose input is told as it comes.
    """

    def __init__(
        self,
        reader: AnswerReader | None,
        *,
        signature: str,
        omits_thinking: bool,
        eager: Collection[str],
    ) -> None:
        self._runs = Runs(reader)
        self._eager = eager
        self._signature, self._omits_thinking = signature, omits_thinking
        self._blocks: list[Block] = []

    @property
    def num_reasoning_tokens(self) -> int:
        """Once it has finished."""
        return self._runs.num_reasoning_tokens

    @property
    def is_calling(self) -> bool:
        """Whether tools are called, and that was said to the end."""
        return self._runs.is_calling

    def push(self, piece: Piece) -> list[Event]:
        """Take the next piece of the text; the events of what is certain now."""
        return self._write(self._runs.push(piece))

    def feed(self, piece: Piece) -> None:
        """Take the next piece of a text that is wanted as a whole."""
        self._write(self._runs.feed(piece))

    def finish(self, reason: str) -> list[Event]:
        """Take note of the end. `reason`: of it, in OpenAI's word."""
        events = self._write(self._runs.finish(reason))
        return events + (self._blocks[-1].end() if self._blocks else [])

    def values(self) -> list[dict[str, Any]]:
        """Return the blocks as far as they are written."""
        return [block.value() for block in self._blocks]

    def _write(self, runs: list[Run]) -> list[Event]:
        events: list[Event] = []
        for run in runs:
            if run.is_new:
                events += self._blocks[-1].end() if self._blocks else []
                self._blocks.append(self._block(run))
                events.append(self._blocks[-1].begin())
            if run.text:
                events += self._blocks[-1].add(run.text)
        return events

    def _block(self, run: Run) -> Block:
        index = len(self._blocks)
        if isinstance(run.part, CallPiece):
            name = run.part.name or ""
            return ToolUseBlock(index, run.call_id, name, is_eager=name in self._eager)
        if isinstance(run.part, Thought):
            return ThinkingBlock(index, self._signature, is_omitted=self._omits_thinking)
        return TextBlock(index)
