"""From a generation under way to the messages of an answer: whole, or event by event."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from control_plane.api.answer_parts import parts_delta, whole_parts
from control_plane.api.convert import (
    finish_reason_to_proto,
    logprobs_to_proto,
    matched_stop_to_proto,
    params_to_proto,
    prompt_logprobs_to_proto,
    states_to_proto,
    timings_to_proto,
    usage_to_proto,
)
from control_plane.engine.events import RequestEnd
from control_plane.engine.frontend import Generation, TextDelta
from control_plane.metrics.visits import note_streamed
from control_plane.text.answers.parts import NOTHING
from control_plane.text.answers.reader import AnswerReader
from protos.hetero.inference.v1 import inference_pb2
from protos.hetero.inference.v1.inference_pb2 import GenerateStreamResponse


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What every answer says of its request."""

    request_id: str
    model: str


@dataclass(slots=True)
class _Collected:
    """One sample as far as it is known."""

    message: inference_pb2.Sample
    text: list[str] = field(default_factory=list)
    finish_reason: str = ""

    def take(self, delta: TextDelta) -> None:
        self.text.append(delta.text)
        message = self.message
        message.token_ids.extend(delta.token_ids)
        if delta.logprobs:
            message.logprobs.extend(logprobs_to_proto(delta.logprobs))
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason.value
            message.finish_reason = finish_reason_to_proto(delta.finish_reason)
            stop = matched_stop_to_proto(delta.matched_stop)
            if stop is not None:
                message.matched_stop.CopyFrom(stop)


async def whole_answer(
    generation: Generation, head: AnswerHead, reader: AnswerReader | None = None
) -> inference_pb2.GenerateResponse:
    """Read a generation to its end. `reader`: of its parts; None: there are none."""
    samples = [
        _Collected(inference_pb2.Sample(index=index)) for index in range(generation.params.n)
    ]
    await generation.admitted()
    while True:
        delta = await generation.next_delta()
        samples[delta.sample_index].take(delta)
        if reader is not None:
            reader.feed(delta.sample_index, delta.text, delta.token_ids)
        if delta.end is not None:
            break
    for sample in samples:
        message = sample.message
        message.text = "".join(sample.text)
        if reader is not None:
            message.parts.CopyFrom(whole_parts(reader, message.index, sample.finish_reason))
    first, end = samples[0].message, delta.end
    return inference_pb2.GenerateResponse(
        request_id=head.request_id,
        model=head.model,
        text=first.text,
        token_ids=first.token_ids,
        finish_reason=finish_reason_to_proto(end.finish_reason),
        usage=_usage(generation, end, reader),
        timings=timings_to_proto(end.timings),
        sampling=params_to_proto(generation.params),
        samples=[sample.message for sample in samples] if len(samples) > 1 else (),
        states=states_to_proto(end.history, arrival_time=generation.arrival_time),
        logprobs=first.logprobs,
        matched_stop=first.matched_stop if first.HasField("matched_stop") else None,
        prompt_logprobs=prompt_logprobs_to_proto(generation.prompt_logprobs),
        parts=None if reader is None else first.parts,
    )


async def events(
    generation: Generation, head: AnswerHead, reader: AnswerReader | None = None
) -> AsyncIterator[GenerateStreamResponse]:
    """Yield `started`, the deltas, the ends of samples if there are several, and `finished`.

    `reader`: of the parts; None: there are none. What it held back comes with the end: a client
    that has the end does not resume, so that nothing comes twice.
    """
    await generation.admitted()
    note_streamed()
    yield GenerateStreamResponse(
        started=inference_pb2.Started(
            request_id=head.request_id,
            model=head.model,
            prompt_tokens=generation.num_prompt_tokens,
            sampling=params_to_proto(generation.params),
            received_tokens=len(generation.continued_token_ids),
        )
    )
    params = generation.params
    owes_prompt_logprobs = params.num_prompt_logprobs is not None
    first_stop: inference_pb2.MatchedStop | None = None
    rest: inference_pb2.AnswerPartsDelta | None = None
    while True:
        piece = await generation.next_delta()
        if owes_prompt_logprobs and generation.prompt_logprobs is not None:
            owes_prompt_logprobs = False
            yield GenerateStreamResponse(
                prompt_logprobs=prompt_logprobs_to_proto(generation.prompt_logprobs)
            )
        if piece.token_ids or piece.text:
            yield _delta(piece, reader)
        if piece.finish_reason is not None:
            rest = _rest(piece, reader)
            stop = matched_stop_to_proto(piece.matched_stop)
            if piece.sample_index == 0:
                first_stop = stop
            if params.n > 1:
                yield GenerateStreamResponse(sample_finished=_sample_finished(piece, stop, rest))
        if piece.end is not None:
            break
    yield GenerateStreamResponse(
        finished=inference_pb2.Finished(
            finish_reason=finish_reason_to_proto(piece.end.finish_reason),
            usage=_usage(generation, piece.end, reader),
            timings=timings_to_proto(piece.end.timings),
            states=states_to_proto(piece.end.history, arrival_time=generation.arrival_time),
            matched_stop=first_stop,
            parts=rest if params.n == 1 else None,
        )
    )


def _usage(
    generation: Generation, end: RequestEnd, reader: AnswerReader | None
) -> inference_pb2.Usage:
    return usage_to_proto(generation, end, 0 if reader is None else reader.num_reasoning_tokens)


def _rest(piece: TextDelta, reader: AnswerReader | None) -> inference_pb2.AnswerPartsDelta | None:
    """Return what was held back of a sample that has ended.

    Maybe nothing, which tells a client that the text has come apart: all of it may be marks.
    """
    if reader is None:
        return None
    reason = "" if piece.finish_reason is None else piece.finish_reason.value
    return parts_delta(reader, piece.sample_index, reader.finish(piece.sample_index, reason))


def _delta(piece: TextDelta, reader: AnswerReader | None) -> GenerateStreamResponse:
    """Fill the event in place: a `Delta` made by itself would be copied into it, 2 µs a token."""
    event = GenerateStreamResponse()
    delta = event.delta
    delta.text = piece.text
    delta.token_ids.extend(piece.token_ids)
    delta.offset = piece.offset
    delta.index = piece.sample_index
    if piece.logprobs:
        delta.logprobs.extend(logprobs_to_proto(piece.logprobs))
    if reader is not None:
        index = piece.sample_index
        parts = reader.push(index, piece.text, piece.token_ids)
        if parts is NOTHING:
            delta.parts.SetInParent()  # it is told that the text comes apart
        else:
            delta.parts.CopyFrom(parts_delta(reader, index, parts))
    return event


def _sample_finished(
    piece: TextDelta,
    stop: inference_pb2.MatchedStop | None,
    rest: inference_pb2.AnswerPartsDelta | None,
) -> inference_pb2.SampleFinished:
    if piece.finish_reason is None:
        raise ValueError("the sample goes on")
    return inference_pb2.SampleFinished(
        index=piece.sample_index,
        finish_reason=finish_reason_to_proto(piece.finish_reason),
        completion_tokens=piece.offset + len(piece.token_ids),
        matched_stop=stop,
        parts=rest,
    )
