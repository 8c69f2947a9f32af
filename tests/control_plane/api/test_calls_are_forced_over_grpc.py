"""`tool_choice` over gRPC: the servicer, before an engine that draws what its constraints allow."""

from __future__ import annotations

import json

import pytest

from control_plane.api.conversation import tool_choice_from_proto
from control_plane.text.answers.tool_choice import ToolChoice
from hetero_infer.client.answers import Finished
from hetero_infer.client.convert_answers import answer_from_proto
from hetero_infer.client.convert_requests import request_to_proto
from hetero_infer.client.requests import ChatRequest
from planes.errors import ValidationError
from protos.hetero.inference.v1 import inference_pb2 as pb
from tests.control_plane.api.test_answers_in_parts_over_grpc import serving, streamed
from tests.control_plane.text.known_templates import LLAMA, MISTRAL, QWEN

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["sun", "rain"]}},
    "required": ["kind"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
NOW = {"type": "function", "function": {"name": "now"}}
NAMED = {"type": "function", "function": {"name": "now"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
ROOM = 4096


def asked(choice, *, tools=(WEATHER, NOW), seed=3, n=1, **more) -> pb.ChatRequest:
    """What the client of this repository sends."""
    request = request_to_proto(
        ChatRequest([{"role": "user", "content": "Hi"}], tools, tool_choice=choice, **more)
    )
    assert isinstance(request, pb.ChatRequest)
    request.sampling.max_tokens = 3000
    request.sampling.seed = seed
    request.sampling.n = n
    return request


def test_tools_that_a_choice_calls_strict_are():
    """One of a caller in this process: OpenAI's have no such field."""
    request = asked(ToolChoice(strict=("weather",)))
    assert [tool.strict for tool in request.tools] == [True, False]
    assert tool_choice_from_proto(request) == ToolChoice(strict=("weather",))


@pytest.mark.spread(3)
@pytest.mark.parametrize("template", [QWEN, LLAMA, MISTRAL])
@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"weather", "now"}), (NAMED, {"now"}), (ALLOWED, {"now"})],
    ids=["required", "named", "allowed"],
)
def test_whatever_is_said_is_calls_whole_and_streamed(template, choice, names):
    async def story(servicer, served):
        served.engine.draws = True
        for seed in range(4):
            request = asked(choice, seed=seed, n=2)
            whole = answer_from_proto(await servicer.Chat(request, None))
            events, answer = await streamed(servicer, request)
            assert answer.samples == whole.samples
            for sample in whole.samples:
                calls = sample.parts.tool_calls
                assert calls
                assert {call.name for call in calls} <= names
                assert len(calls) == 1 or choice is not NAMED
                for call in calls:
                    arguments = json.loads(call.arguments)
                    assert call.name != "now" or arguments == {}
                    assert call.name != "weather" or arguments["kind"] in ("sun", "rain")
                assert sample.parts.content == ""
            assert isinstance(events[-1], Finished)
            assert not (await servicer.Chat(request, None)).sampling.HasField("structured_outputs")

    serving(story, None, template, max_model_len=ROOM)


def test_a_stream_that_is_resumed_goes_on_with_the_call_that_it_had_begun():
    async def story(servicer, served):
        served.engine.draws = True
        request = asked("required")
        _, answer = await streamed(servicer, request)
        (whole,) = answer.samples
        served.engine.draws, served.engine.says = False, [list(whole.token_ids)]
        for count in (1, 20, len(whole.token_ids) - 1):
            resumed = pb.ResumeRequest(chat=request, received_token_ids=whole.token_ids[:count])
            events, _ = await streamed(servicer, resumed)
            tokens = [token for event in events for token in getattr(event, "token_ids", ())]
            assert tokens == list(whole.token_ids[count:])
        with pytest.raises(ValidationError, match="continued does not follow tool_choice"):
            await streamed(servicer, pb.ResumeRequest(chat=request, received_token_ids=b"Hi"))

    serving(story, None, QWEN, max_model_len=ROOM)


def test_calls_that_are_not_to_be_parallel_are_one():
    async def story(servicer, served):
        served.engine.draws = True
        for seed in range(5):
            request = asked("required", seed=seed, parallel_tool_calls=False)
            whole = answer_from_proto(await servicer.Chat(request, None))
            assert len(whole.message.tool_calls) == 1
        served.engine.draws = False
        call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
        served.engine.says = [call * 2]
        whole = answer_from_proto(await servicer.Chat(asked(None, parallel_tool_calls=False), None))
        assert len(whole.message.tool_calls) == 1
        assert whole.text == call

    serving(story, None, QWEN, max_model_len=ROOM)


def test_where_none_are_called_the_model_is_told_of_none():
    async def story(servicer, served):
        served.engine.says = ["Hi"]
        await servicer.Chat(asked("none"), None)
        (request,) = served.engine.submitted
        assert b"weather" not in bytes(request.input_tokens)
        assert request.params.structured_outputs is None

    serving(story, None, QWEN, max_model_len=ROOM)


def test_a_strict_tool_keeps_to_its_schema_where_the_model_decides():
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}

    async def story(servicer, served):
        served.engine.says = ["Hi"]
        await servicer.Chat(asked("auto", tools=[NOW, strict]), None)
        form = served.engine.submitted[-1].params.structured_outputs
        assert form.may_say
        assert [json.loads(tool.schema) for tool in form.tools] == [{"type": "object"}, SCHEMA]

    serving(story, None, QWEN, max_model_len=ROOM)


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        ({"mode": 9}, "tool_choice.mode", "must be auto, none or required, got 9"),
        ({"names": ["x"] * 129}, "tool_choice.names", "at most 128 entries"),
        ({"names": ["tides"]}, "tool_choice", "names 'tides', which is none of the tools"),
    ],
)
def test_what_is_no_choice_is_refused_by_name(change, field, message):
    async def story(servicer, _):
        request = asked("required")
        request.tool_choice.MergeFrom(pb.ToolChoice(**change))
        with pytest.raises(ValidationError, match=message) as caught:
            await servicer.Chat(request, None)
        assert caught.value.field == field

    serving(story, None, QWEN)


def test_a_schema_that_is_not_supported_is_named():
    wrong = {"type": "function", "function": {"name": "x", "parameters": {"not": {}}}}

    async def story(servicer, _):
        with pytest.raises(
            ValidationError, match="is not supported: answers cannot keep to"
        ) as caught:
            await servicer.Chat(asked("required", tools=[NOW, wrong]), None)
        assert caught.value.field == "tools[1].parameters_json"

    serving(story, None, QWEN, max_model_len=ROOM)


@pytest.mark.parametrize(
    "given",
    [
        "any", 5, {"type": "function"}, {"type": "function", "function": {"name": 5}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": [NAMED]}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED, 5]}},
    ],
)  # fmt: skip
def test_the_client_refuses_what_is_no_choice(given):
    with pytest.raises(ValidationError, match="tool_choice must be 'none', 'auto', 'required'"):
        ChatRequest([{"role": "user", "content": "Hi"}], tool_choice=given)
