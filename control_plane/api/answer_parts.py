"""Parts of answers to conversations, as messages."""

from __future__ import annotations

from functools import partial

from control_plane.engine.frontend import Generation
from control_plane.text.answers.parser import AnswerFormat
from control_plane.text.answers.parts import Parts
from control_plane.text.answers.reader import AnswerReader
from control_plane.text.detokenizer import make_detokenizer
from control_plane.text.tokenizer import Tokenizer
from protos.hetero.inference.v1 import inference_pb2


def reader_of(
    generation: Generation,
    tokenizer: Tokenizer,
    answer_format: AnswerFormat | None,
    max_calls: int | None,
) -> AnswerReader | None:
    """Return what reads an answer, from behind what its client has; None: nothing is to be read.

    `max_calls`: of each sample; None: as many as come.
    """
    if answer_format is None:
        return None
    reader = AnswerReader(
        answer_format,
        generation.prompt_token_ids,
        generation.params,
        max_calls=max_calls,
        make_detokenizer=partial(make_detokenizer, tokenizer, answer_format.spelled),
    )
    reader.push(0, generation.continued_text, generation.continued_token_ids)
    return reader


def whole_parts(reader: AnswerReader, sample: int, finish_reason: str) -> inference_pb2.AnswerParts:
    """Return the parts of a sample, all of whose text was fed to the reader."""
    parts = reader.finish(sample, finish_reason)
    return inference_pb2.AnswerParts(
        content=parts.content,
        reasoning_content=parts.reasoning,
        tool_calls=[
            inference_pb2.ToolCall(
                id=reader.call_id(sample, call),
                name=call.name or "",
                arguments_json=call.arguments,
            )
            for call in parts.calls
        ],
    )


def parts_delta(reader: AnswerReader, sample: int, parts: Parts) -> inference_pb2.AnswerPartsDelta:
    """Return what is new."""
    return inference_pb2.AnswerPartsDelta(
        content=parts.content,
        reasoning_content=parts.reasoning,
        tool_calls=[
            inference_pb2.ToolCallDelta(
                index=call.number,
                id="" if call.name is None else reader.call_id(sample, call),
                name=call.name or "",
                arguments_json=call.arguments,
            )
            for call in parts.calls
        ],
    )
