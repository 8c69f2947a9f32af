"""Messages of the assistant, from the text of an answer: whole, or as deltas."""

from __future__ import annotations

from functools import partial
from typing import Final

from control_plane.engine.frontend import ChatPrompt
from control_plane.http.answers import Answers, Piece
from control_plane.http.backend import LoadedEngine
from control_plane.text.answers.parts import NOTHING, CallPiece, Parts
from control_plane.text.answers.reader import AnswerReader
from control_plane.text.detokenizer import make_detokenizer

TOOL_CALLS: Final = "tool_calls"


def reader_of(
    engine: LoadedEngine, prompt: ChatPrompt, answers: Answers, *, is_single: bool
) -> AnswerReader | None:
    """Return what reads the answers to a conversation; None: all of them is content.

    `is_single`: of several calls of an answer all but the first are left out.
    """
    if prompt.answer is None:
        return None
    effective = answers.prompt_of(0).params
    max_calls = 1 if is_single else None
    return AnswerReader(
        prompt.answer,
        prompt.token_ids,
        effective,
        max_calls=max_calls,
        make_detokenizer=partial(
            make_detokenizer, engine.frontend.tokenizer, prompt.answer.spelled
        ),
    )


class Messages:
    """Spells the samples of one answer as messages. `reader`: None: all of them is content.

    `says_calls`: that tools are called is a reason to end; not where a caller said which.
    """

    def __init__(self, reader: AnswerReader | None, *, says_calls: bool = True) -> None:
        self._reader = reader
        self._says_calls = says_calls

    @property
    def num_reasoning_tokens(self) -> int:
        """Of all messages, once they are at their ends."""
        return 0 if self._reader is None else self._reader.num_reasoning_tokens

    def delta(self, index: int, piece: Piece) -> dict[str, object]:
        """Return what is new in a message."""
        if self._reader is None:
            return {"content": piece.text} if piece.text or piece.logprobs else {}
        return self._delta(index, self._reader.push(index, piece.text, piece.token_ids))

    def last_delta(self, index: int, reason: str) -> dict[str, object]:
        """Return what was held back of a message that is at its end, which has such a reason."""
        if self._reader is None:
            return {}
        return self._delta(index, self._reader.finish(index, reason))

    def finish_reason(self, index: int, reason: str) -> str:
        """Return the reason of a message that is at its end: to call tools is one."""
        if reason != "stop" or self._reader is None or not self._says_calls:
            return reason
        if self._reader.is_calling(index):
            return TOOL_CALLS
        return reason

    def feed(self, index: int, piece: Piece) -> None:
        """Take the next piece of a message that is to be whole."""
        if self._reader is not None:
            self._reader.feed(index, piece.text, piece.token_ids)

    def whole(self, index: int, text: str, reason: str) -> dict[str, object]:
        """Return a message that is at its end, `text` all of it. `reason`: of the end."""
        if self._reader is None:
            return {"role": "assistant", "content": text, "refusal": None}
        parts = self._reader.finish(index, reason)
        message: dict[str, object] = {
            "role": "assistant",
            "content": parts.content if parts.content or not parts.calls else None,
            "refusal": None,
        }
        if parts.reasoning:
            message["reasoning_content"] = parts.reasoning
        if parts.calls:
            message["tool_calls"] = [self._begin(index, call) for call in parts.calls]
        return message

    def _delta(self, index: int, parts: Parts) -> dict[str, object]:
        delta: dict[str, object] = {}
        if parts is NOTHING:
            return delta
        if parts.reasoning:
            delta["reasoning_content"] = parts.reasoning
        if parts.content:
            delta["content"] = parts.content
        if parts.calls:
            delta["tool_calls"] = [
                {"index": call.number, **self._begin(index, call)}
                if call.name is not None
                else {"index": call.number, "function": {"arguments": call.arguments}}
                for call in parts.calls
            ]
        return delta

    def _begin(self, index: int, call: CallPiece) -> dict[str, object]:
        """Spell the first piece of a call."""
        call_id = "" if self._reader is None else self._reader.call_id(index, call)
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": call_id, "type": "function", "function": function}
