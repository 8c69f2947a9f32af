"""Messages of the assistant, from the text of an answer: whole, or as deltas."""

from __future__ import annotations

from typing import Final

from control_plane.engine.frontend import Generation
from control_plane.text.answers.call_ids import CallIds
from control_plane.text.answers.parser import AnswerFormat, AnswerParser
from control_plane.text.answers.parts import NOTHING, CallPiece, Parts

TOOL_CALLS: Final = "tool_calls"


class MessageReader:
    """Reads the text of the samples of one generation, which answers a conversation.

    `answer_format`: None: all of it is content. `is_parallel`: there may be several calls.
    """

    def __init__(
        self, generation: Generation, answer_format: AnswerFormat | None, *, is_parallel: bool
    ) -> None:
        self._generation = generation
        self._format = answer_format
        self._max_calls = None if is_parallel else 1
        self._parsers: dict[int, AnswerParser] = {}
        self._ids: CallIds | None = None

    def delta(self, index: int, text: str) -> dict[str, object]:
        """Return what is new in a message."""
        if self._format is None:
            return {"content": text}
        return self._spell(index, self._parser(index).push(text))

    def last_delta(self, index: int) -> dict[str, object]:
        """Return what was held back of a message that is at its end."""
        if self._format is None:
            return {}
        return self._spell(index, self._parser(index).finish())

    def finish_reason(self, index: int, reason: str) -> str:
        """Return the reason of a message that is at its end: to call tools is one."""
        is_calling = index in self._parsers and self._parsers[index].is_calling
        return TOOL_CALLS if reason == "stop" and is_calling else reason

    def whole(self, index: int, text: str) -> dict[str, object]:
        """Return the message of a whole text."""
        if self._format is None:
            return {"role": "assistant", "content": text, "refusal": None}
        parser = self._parser(index)
        parts, rest = parser.push(text), parser.finish()
        content, reasoning = parts.content + rest.content, parts.reasoning + rest.reasoning
        message: dict[str, object] = {
            "role": "assistant",
            "content": content if content or not parts.calls else None,
            "refusal": None,
        }
        if reasoning:
            message["reasoning_content"] = reasoning
        if parts.calls:
            message["tool_calls"] = [
                _first_piece(call, self._id(index, call)) for call in parts.calls
            ]
        return message

    def _parser(self, index: int) -> AnswerParser:
        parser = self._parsers.get(index)
        if parser is None and self._format is not None:
            parser = self._parsers[index] = self._format.parser(max_calls=self._max_calls)
        if parser is None:
            raise ValueError("the answer is not read")
        return parser

    def _spell(self, index: int, parts: Parts) -> dict[str, object]:
        delta: dict[str, object] = {}
        if parts is NOTHING:
            return delta
        if parts.reasoning:
            delta["reasoning_content"] = parts.reasoning
        if parts.content:
            delta["content"] = parts.content
        if parts.calls:
            delta["tool_calls"] = [
                {"index": call.index, "function": {"arguments": call.arguments}}
                if call.name is None
                else {
                    "index": call.index,
                    **_first_piece(call, self._id(index, call)),
                }
                for call in parts.calls
            ]
        return delta

    def _id(self, index: int, call: CallPiece) -> str:
        if self._ids is None:
            self._ids = CallIds(self._generation.prompt_token_ids, self._generation.params.seed)
        return self._ids.name(index, call.index)


def _first_piece(call: CallPiece, call_id: str) -> dict[str, object]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call_id, "type": "function", "function": function}
