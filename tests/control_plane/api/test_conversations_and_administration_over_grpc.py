"""Conversations, tokens, models and what operators ask for: over gRPC, on a fake plane."""

from __future__ import annotations

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from control_plane.api.services import SERVICES
from protos.hetero.inference.v1 import inference_pb2 as pb
from tests.control_plane.api.services import Services
from tests.control_plane.api.text_over_grpc import (
    _calm_plane,
    ask,
    control_plane,
    events_of,
    fake_plane,
    template,
    text_of,
)

__all__ = ["_calm_plane", "control_plane", "fake_plane", "template"]

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def test_metadata_beyond_its_bound_is_refused_and_the_next_call_served(stub):
    with pytest.raises(grpc.RpcError) as caught:
        stub.GetMetrics(pb.GetMetricsRequest(), metadata=(("x-long", "y" * 64_000),))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    stub.GetMetrics(pb.GetMetricsRequest())


def test_a_conversation_is_answered_as_its_prompt_would_be(stub, expected):
    messages = [
        pb.ChatMessage(role="user", content="hi"),
        pb.ChatMessage(
            role="assistant",
            tool_calls=[pb.ToolCall(id="1", name="f", arguments_json='{"x": 3}')],
        ),
    ]
    tools = [pb.Tool(name="f", description="", parameters_json="{}")]
    prompt = stub.ApplyChatTemplate(pb.ApplyChatTemplateRequest(messages=messages, tools=tools))
    assert prompt.text == "<user>hi<assistant>!f(3)[f]<assistant>"
    assert list(prompt.token_ids) == list(prompt.text.encode())
    request = pb.ChatRequest(
        messages=messages, tools=tools, sampling=pb.SamplingParams(max_tokens=9, seed=3)
    )
    whole = expected(prompt.text, 9, 3)
    assert stub.Chat(request).text == text_of(events_of(stub.ChatStream(request))) == whole
    resumed = pb.ResumeRequest(chat=request, received_token_ids=whole[:4].encode())
    assert text_of(events_of(stub.Resume(resumed))) == whole[4:]
    bare = pb.ApplyChatTemplateRequest(messages=messages[:1], add_generation_prompt=False)
    assert stub.ApplyChatTemplate(bare).text == "<user>hi"


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.ChatRequest(), "messages"),
        (
            pb.ChatRequest(
                messages=[pb.ChatMessage(role="user")], tools=[pb.Tool(parameters_json="[1]")]
            ),
            "tools[0].parameters_json",
        ),
        (
            pb.ChatRequest(
                messages=[
                    pb.ChatMessage(
                        role="assistant", tool_calls=[pb.ToolCall(arguments_json="{" * 32_769)]
                    )
                ]
            ),
            "messages[0].tool_calls[0].arguments_json",
        ),
        (
            pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="x" * 140_000)]),
            "messages",
        ),
        (pb.ChatRequest(messages=[pb.ChatMessage(role="bot", content="x")]), "messages[0].role"),
        (
            pb.ChatRequest(messages=[pb.ChatMessage(role="user")], tools=[pb.Tool()]),
            "tools[0]",
        ),
        (
            pb.ChatRequest(messages=[pb.ChatMessage(role="user")], cache_salt="é" * 129),
            "cache_salt",
        ),
    ],
)
def test_what_is_no_conversation_is_refused(stub, request_, field, field_of):
    with pytest.raises(grpc.RpcError) as caught:
        stub.Chat(request_)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field_of(caught.value) == field


def test_text_becomes_tokens_and_tokens_text(stub, field_of):
    assert stub.Tokenize(pb.TokenizeRequest(text="")).token_ids == []
    ids = stub.Tokenize(pb.TokenizeRequest(text="hé")).token_ids
    assert list(ids) == list("hé".encode())
    detokenize = pb.DetokenizeRequest(token_ids=pb.TokenIds(ids=ids))
    assert stub.Detokenize(detokenize).text == "hé"
    for call, request, field in (
        (stub.Detokenize, pb.DetokenizeRequest(token_ids=pb.TokenIds(ids=[259])), "token_ids.ids"),
        (stub.Tokenize, pb.TokenizeRequest(text="x" * 200_000), "text"),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            call(request)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert field_of(caught.value) == field


def test_the_models_are_listed_and_another_one_is_not_found(stub):
    (info,) = stub.ListModels(pb.ListModelsRequest()).models
    assert info == stub.GetModelInfo(pb.GetModelInfoRequest(model="fake"))
    assert (info.model, info.has_chat_template) == ("fake", True)
    for call, request in (
        (stub.GetModelInfo, pb.GetModelInfoRequest(model="other")),
        (stub.Tokenize, pb.TokenizeRequest(model="other", text="x")),
        (stub.Chat, pb.ChatRequest(model="other")),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            call(request)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_request_is_aborted_by_its_name(stub, fake_plane):
    fake_plane.may_run.clear()
    stream = stub.GenerateStream(ask("x", max_tokens=50))
    request_id = next(stream).started.request_id
    stub.Abort(pb.AbortRequest(request_id=request_id))
    fake_plane.may_run.set()
    (finished,) = events_of(stream)["finished"]
    assert finished.finish_reason == pb.FINISH_REASON_CANCELLED
    for unknown, code in (
        (request_id, grpc.StatusCode.NOT_FOUND),
        ("", grpc.StatusCode.INVALID_ARGUMENT),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            stub.Abort(pb.AbortRequest(request_id=unknown))
        assert caught.value.code() is code


def test_the_prefix_cache_is_flushed(stub):
    request = ask("a prompt that is long enough", max_tokens=2)
    stub.Generate(request)
    assert stub.Generate(request).usage.cached_tokens > 0
    assert stub.FlushPrefixCache(pb.FlushPrefixCacheRequest()).num_blocks > 0
    assert stub.Generate(request).usage.cached_tokens == 0


def test_each_service_has_its_health(channel):
    health = health_pb2_grpc.HealthStub(channel)
    assert len(SERVICES) == 4
    for service in SERVICES:
        request = health_pb2.HealthCheckRequest(service=service)
        assert health.Check(request).status == SERVING
        watch = health.Watch(request, timeout=60)
        assert next(watch).status == SERVING
        watch.cancel()


def test_a_drained_server_takes_nothing_new_and_finishes_what_runs(
    launch_with_template, fake_plane, expected
):
    process = launch_with_template()
    with grpc.insecure_channel(process.address) as channel:
        stub = Services(channel)
        fake_plane.may_run.clear()
        stream = stub.GenerateStream(ask("hello", max_tokens=20))
        assert next(stream).HasField("started")
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service=SERVICES[0]), timeout=60
        )
        assert next(watch).status == SERVING
        assert stub.Drain(pb.DrainRequest()).num_requests == 1
        assert next(watch).status == NOT_SERVING
        with pytest.raises(grpc.RpcError) as caught:
            stub.Generate(ask("hello"))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        fake_plane.may_run.set()
        assert text_of(events_of(stream)) == expected("hello", 20)


@pytest.fixture
def launch_with_template(fake_plane, start_control_plane, template):
    """A control plane of its own takes the plane over: it comes last in this file."""
    started = []

    def start():
        process = start_control_plane(fake_plane, f"--chat-template={template}")
        process.ready()
        started.append(process)
        return process

    yield start
    for process in started:
        process.close()
