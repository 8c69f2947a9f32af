"""Calls whose values nothing quotes: each surface tells the reader what its tools' values are."""

from __future__ import annotations

import json

import pytest

from hetero_infer.client.answers import AnswerSoFar
from hetero_infer.client.convert_answers import answer_from_proto
from protos.hetero.inference.v1 import inference_pb2 as pb
from tests.control_plane.api.test_answers_in_parts_over_grpc import Context, serving, streamed
from tests.control_plane.http.test_answers_of_chats_come_in_parts import merged
from tests.control_plane.http.test_responses_have_items import told_in, without_ids
from tests.control_plane.text.known_templates import QWEN_CODER

SCHEMA = {
    "type": "object",
    "properties": {"zip": {"type": "string"}, "days": {"type": "integer"}},
}
FUNCTION = {"name": "weather", "parameters": SCHEMA}
CALL = """<tool_call>
<function=weather>
<parameter=zip>
89073
</parameter>
<parameter=days>
3
</parameter>
<parameter=wind>
true
</parameter>
</function>
</tool_call>"""
ARGUMENTS = '{"zip": "89073", "days": 3, "wind": true}'
SAYS = f"Let me see.\n{CALL}\n{CALL}\nSo."
OPEN = "<function=weather>\nWell"
ROOM = 600


def test_chats_are_read_with_their_tools(on_loop):
    async def test(served):
        served.engine.says = [SAYS]
        body = {
            "messages": [{"role": "user", "content": "Hi"}],
            "tools": [{"type": "function", "function": FUNCTION}],
            "max_tokens": ROOM,
            "seed": 3,
        }
        (choice,) = (await served.chat(**body))["choices"]
        message = choice["message"]
        assert message["content"] == "Let me see.\nSo."
        functions = [call["function"] for call in message["tool_calls"]]
        assert functions == [{"name": "weather", "arguments": ARGUMENTS}] * 2
        events = await served.events("/v1/chat/completions", body)
        told = merged(events)[0]
        assert (told["content"], told["tool_calls"]) == (message["content"], message["tool_calls"])
        # It is told to the template as it was said.
        again = [*body["messages"], message, *(
            {"role": "tool", "tool_call_id": call["id"], "content": "rain"}
            for call in message["tool_calls"]
        )]  # fmt: skip
        await served.chat(**{**body, "messages": again})
        prompt = bytes(served.engine.submitted[-1].input_tokens).decode()
        assert CALL.replace("true", "True") in prompt  # Jinja writes it so

    on_loop(test, template=QWEN_CODER, max_model_len=4096)


def test_responses_are_read_with_their_tools_and_say_which_call_is_whole(on_loop):
    async def test(served):
        body = {
            "tools": [{"type": "function", **FUNCTION}],
            "max_output_tokens": ROOM,
            "seed": 3,
        }
        call = {"type": "function_call", "name": "weather"}
        whole = {**call, "arguments": ARGUMENTS, "status": "completed"}
        for says, wanted in (
            (SAYS, [None, whole, whole, None]),
            (OPEN, [{**call, "arguments": "{", "status": "incomplete"}, None]),
            (f"{CALL}{OPEN}", [whole, {**call, "arguments": "{", "status": "incomplete"}, None]),
        ):
            served.engine.says = [says]
            items = (await served.respond(**body))["output"]
            for item, expected in zip(items, wanted, strict=True):
                assert item["type"] == (expected or {"type": "message"})["type"]
                assert expected is None or item.items() >= expected.items()
            events = await served.events("/v1/responses", {**body, "input": "Hi"})
            assert without_ids(told_in(events)) == without_ids(items)

    on_loop(test, template=QWEN_CODER, max_model_len=4096)


@pytest.mark.parametrize("single", [False, True])
def test_chats_over_grpc_are_read_with_their_tools_resumed_anywhere_too(single):
    async def story(servicer, _):
        request = pb.ChatRequest(
            messages=[pb.ChatMessage(role="user", content="Hi")],
            sampling=pb.SamplingParams(max_tokens=ROOM, seed=3),
            tools=[pb.Tool(name="weather", parameters_json=json.dumps(SCHEMA))],
            tool_choice=pb.ToolChoice(single=single),
        )
        whole = answer_from_proto(await servicer.Chat(request, None))
        calls = whole.message.tool_calls
        assert [call.arguments for call in calls] == [ARGUMENTS] * (1 if single else 2)
        events, answer = await streamed(servicer, request)
        assert answer.samples == whole.samples
        for num_events in (*range(1, len(events), 7), len(events) - 1):
            so_far = AnswerSoFar()
            for event in events[:num_events]:
                so_far.take(event)
            context = Context()
            resumed = pb.ResumeRequest(chat=request, received_token_ids=so_far.token_ids)
            await servicer.Resume(resumed, context)
            for event in context.events:
                so_far.take(event)
            assert so_far.answer().samples == whole.samples

    serving(story, [SAYS], QWEN_CODER, max_model_len=4096)
