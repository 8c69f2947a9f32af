"""What a stream knows over however many calls it takes. Pure: the transports make the calls."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from google.protobuf.message import Message as ProtoMessage

from hetero_infer.client.answers import Answer, AnswerSoFar, Delta, Event, PromptLogprobs, Started
from hetero_infer.client.arguments import check_seconds, tokens_of
from hetero_infer.client.attempts import (
    DEFAULT_RETRIES,
    RESUME_PATIENCE_S,
    Attempts,
    Clock,
    Deadline,
    OnLost,
    OnWait,
    Patience,
)
from hetero_infer.client.convert_answers import event_from_proto
from hetero_infer.client.convert_requests import request_to_proto, resume_to_proto
from hetero_infer.client.requests import Request, TextRequest, check_request, check_resumable
from hetero_infer.wire_errors import DeadlineExceededError, ServerLostError
from planes.errors import EngineError
from protos.hetero.inference.v1 import inference_pb2

BROKEN_OFF: Final = "the server closed the stream before the end of the text"


@dataclass(frozen=True, slots=True)
class Going:
    """How a stream is to be kept going. `resume`: behind what came, when the server is lost.

    `on_lost`: told at once of each loss that is waited for; `on_wait`: of each pause of a stream
    that is not to be resumed. Both on the thread that reads the stream.
    """

    retries: int = DEFAULT_RETRIES
    resume: bool = False
    patience_s: float = RESUME_PATIENCE_S
    timeout_s: float | None = None
    on_lost: OnLost | None = None
    on_wait: OnWait | None = None


@dataclass(frozen=True, slots=True)
class StreamCall:
    """One call of a stream: a method of InferenceService, its message, the time it may take."""

    method: str
    message: ProtoMessage
    timeout_s: float | None


class StreamProgress:
    """One stream over all its calls.

    `received`: tokens of the answer that came over an earlier stream. Raises ValidationError for a
    request that cannot be sent, or that `going` does not suit.
    """

    def __init__(
        self,
        request: Request,
        going: Going,
        received: Iterable[int] = (),
        clock: Clock = time.monotonic,
    ) -> None:
        check_request(request)
        check_seconds(going.patience_s, "patience_s")
        if going.resume:
            check_resumable(request.params)
        self.request = request
        self.so_far = AnswerSoFar()
        self._received = list(tokens_of(received, "received_token_ids"))
        self._is_resumable = going.resume
        self._deadline = Deadline(going.timeout_s, clock)
        self._attempts = Attempts(going.retries, self._deadline, going.on_wait)
        self._patience = Patience(going.patience_s, self._deadline, clock, going.on_lost)
        self._seen: set[type[Event]] = set()
        self._has_spoken = False
        # Made here, what cannot be sent is found before anything is.
        self._first_message: ProtoMessage | None = self._to_proto()

    @property
    def is_finished(self) -> bool:
        """Whether the last event has come."""
        return self.so_far.finished is not None

    @property
    def received_token_ids(self) -> tuple[int, ...]:
        """All tokens of the answer that came, over earlier streams too."""
        return tuple(self._received)

    def next_call(self) -> StreamCall:
        """Return the call to make now. Raises DeadlineExceededError."""
        timeout_s = self._deadline.left_s()
        if timeout_s == 0.0:
            raise DeadlineExceededError("the time given for this stream has passed")
        self._has_spoken = False
        message, self._first_message = self._first_message or self._to_proto(), None
        if self._is_resumable:
            return StreamCall("Resume", message, timeout_s)
        method = "GenerateStream" if isinstance(self.request, TextRequest) else "ChatStream"
        return StreamCall(method, message, timeout_s)

    def take(self, response: inference_pb2.GenerateStreamResponse) -> Event | None:
        """Return the event of a message; None for one that the reader has seen already."""
        event = event_from_proto(response)
        self._has_spoken = True
        if isinstance(event, Delta):
            self._patience.note_progress()
            if event.index == 0:
                self._received += event.token_ids
        elif isinstance(event, Started | PromptLogprobs) and type(event) in self._seen:
            return None
        elif isinstance(event, Started):
            # What continues it is asked for with the same seed, of the same model.
            self.request = replace(self.request, params=event.params, model=event.model)
        self._seen.add(type(event))
        self.so_far.take(event)
        return event

    def pause_after(self, error: EngineError) -> float:
        """Return how long to wait before the next call; raise the error if there is to be none."""
        started = self.so_far.started
        if error.request_id is None and started is not None:
            error.request_id = started.request_id
        if self._is_resumable:
            return self._patience.pause_after(error, has_spoken=self._has_spoken)
        if self._seen:
            raise error
        return self._attempts.pause_after(error)

    def whole_answer(self) -> Answer:
        """Return what came, once it is all. Raises ServerLostError if it cannot be."""
        answer = self.so_far.answer()
        if answer is None:
            raise ServerLostError("the server did not say how the answer began and ended")
        return answer

    def _to_proto(self) -> ProtoMessage:
        """Return the message that asks for what has not come yet. Raises ValidationError."""
        if self._is_resumable:
            return resume_to_proto(self.request, self._received)
        return request_to_proto(self.request)
