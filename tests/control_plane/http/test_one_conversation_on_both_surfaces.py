"""The same conversation is the same values for the template, by HTTP and by gRPC."""

from __future__ import annotations

from typing import get_args

import pytest
from pydantic import TypeAdapter

from control_plane.api.conversation import messages_from_proto, tools_from_proto
from control_plane.http.chat_schema import Message, Tool, plain_messages, plain_tools
from control_plane.http.responses_input import InputMessage
from control_plane.text.conversation import ROLES
from protos.hetero.inference.v1 import inference_pb2 as pb

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 3}'}}

BROKEN_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": '}}

WIRE_CALL = pb.ToolCall(id="1", name="f", arguments_json='{"x": 3}')

SAME = [
    (
        {"role": "developer", "content": "Be kind."},
        pb.ChatMessage(role="developer", content="Be kind."),
    ),
    (
        {"role": "user", "content": "Hi", "name": "Ann"},
        pb.ChatMessage(role="user", content="Hi", name="Ann"),
    ),
    (
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        pb.ChatMessage(role="user", content="ab"),
    ),
    (
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        pb.ChatMessage(role="assistant", tool_calls=[WIRE_CALL]),
    ),
    (
        {"role": "assistant", "tool_calls": [CALL], "refusal": None},
        pb.ChatMessage(role="assistant", tool_calls=[WIRE_CALL]),
    ),
    (
        {"role": "assistant", "tool_calls": [BROKEN_CALL]},
        pb.ChatMessage(
            role="assistant", tool_calls=[pb.ToolCall(id="1", name="f", arguments_json='{"x": ')]
        ),
    ),
    (
        {"role": "tool", "content": "42", "tool_call_id": "1", "name": "f"},
        pb.ChatMessage(role="tool", content="42", tool_call_id="1", name="f"),
    ),
]

SAME_TOOLS = [
    ({"type": "function", "function": {"name": "f"}}, pb.Tool(name="f")),
    ({"type": "function", "function": {"name": "f", "description": "does", "strict": False,
                                       "parameters": {"type": "object"}}},
     pb.Tool(name="f", description="does", parameters_json='{"type": "object"}')),
]  # fmt: skip


@pytest.mark.parametrize(("by_http", "by_grpc"), SAME)
def test_a_message_is_the_same_by_http_and_grpc(by_http, by_grpc):
    message = TypeAdapter(Message).validate_python(by_http)
    assert plain_messages([message]) == messages_from_proto([by_grpc])


@pytest.mark.parametrize(("by_http", "by_grpc"), SAME_TOOLS)
def test_a_tool_is_the_same_by_http_and_grpc(by_http, by_grpc):
    assert plain_tools([Tool.model_validate(by_http)]) == tools_from_proto([by_grpc])


def test_the_schemas_know_the_roles_there_are():
    (union, *_) = get_args(Message)
    models = [get_args(member)[0] for member in get_args(union)]
    roles = {role for model in models for role in get_args(model.model_fields["role"].annotation)}
    assert roles == set(ROLES)
    (role,) = (InputMessage.model_fields["role"].annotation,)
    assert set(get_args(role)) == set(ROLES) - {"tool"}
