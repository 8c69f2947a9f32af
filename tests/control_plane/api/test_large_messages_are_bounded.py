"""What messages and conversations hold is known before they are made objects of."""

from __future__ import annotations

import asyncio

import pytest

from control_plane.api.conversation import conversation_from_proto
from control_plane.api.convert import params_from_proto
from control_plane.api.message_size import careful_reader
from control_plane.core.errors import ContextLengthError
from control_plane.text.bounds import MAX_ELEMENTS, MAX_JSON_BYTES, MAX_MESSAGES, MAX_TOOL_CALLS
from planes.errors import ValidationError
from protos.hetero.inference.v1 import inference_pb2 as pb

CHAT = pb.ChatMessage(role="user", content="x")


def read(request, max_bytes=1 << 20):
    return careful_reader(type(request).FromString, max_bytes)(request.SerializeToString())


def test_a_message_that_is_too_large_is_not_parsed():
    with pytest.raises(ContextLengthError, match="has 1001 bytes, at most 1000 are taken"):
        careful_reader(lambda _: pytest.fail("parsed"), 1000)(b"x" * 1001)


@pytest.mark.parametrize(
    "many",
    [
        pb.ChatRequest(messages=[pb.ChatMessage()] * 100_000),
        pb.ChatRequest(messages=[pb.ChatMessage(tool_calls=[pb.ToolCall()] * 100_000)]),
        pb.ResumeRequest(chat=pb.ChatRequest(tools=[pb.Tool()] * 100_000)),
        pb.GenerateRequest(
            sampling=pb.SamplingParams(logit_bias=dict.fromkeys(range(MAX_ELEMENTS), 1.0))
        ),
    ],
)
def test_a_message_of_too_many_fields_is_not_parsed(many):
    with pytest.raises(ValidationError, match=f"more than {MAX_ELEMENTS} fields"):
        read(many)


def test_large_messages_of_few_fields_are_what_they_were():
    for request in (
        pb.ChatRequest(messages=[CHAT] * MAX_MESSAGES, tools=[pb.Tool(name="x" * 99_000)]),
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[70_000] * 100_000)),
        pb.GenerateRequest(text="\0é\xff" * 100_000),
        pb.ResumeRequest(received_token_ids=range(100_000)),
    ):
        assert read(request) == request


@pytest.mark.parametrize(
    "end", [b"\xff" * 20, b"\x12\xff\xff\xff\xff\x7f", b"\x12", b"\x0b", b"\x0e"]
)
def test_a_large_message_that_cannot_be_read_is_its_callers_fault(end):
    data = pb.ChatRequest(messages=[pb.ChatMessage(content="x" * 70_000)]).SerializeToString()
    with pytest.raises(ValidationError, match="cannot be read"):
        careful_reader(pb.ChatRequest.FromString, None)(data + end)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.ChatRequest(messages=[CHAT] * (MAX_MESSAGES + 1)), "messages"),
        (pb.ApplyChatTemplateRequest(messages=[CHAT], tools=[pb.Tool()] * 129), "tools"),
        (
            pb.ChatRequest(
                messages=[pb.ChatMessage(tool_calls=[pb.ToolCall()] * (MAX_TOOL_CALLS + 1))]
            ),
            "messages[0].tool_calls",
        ),
        (
            pb.ChatRequest(tools=[pb.Tool(name="f", parameters_json=" " * (MAX_JSON_BYTES + 1))]),
            "tools[0].parameters_json",
        ),
    ],
)
def test_too_many_messages_tools_or_calls_are_refused(request_, field):
    with pytest.raises(ValidationError, match="must have at most") as refused:
        asyncio.run(conversation_from_proto(request_))
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("stop", ["a"] * 17),
        ("stop_token_ids", [1] * 65),
        ("logit_bias", dict.fromkeys(range(1025), 0)),
    ],
)
def test_too_many_entries_of_a_parameter_are_refused_uncopied(name, values):
    with pytest.raises(ValidationError, match="must have at most") as refused:
        params_from_proto(pb.SamplingParams(**{name: values}))
    assert refused.value.field == name
