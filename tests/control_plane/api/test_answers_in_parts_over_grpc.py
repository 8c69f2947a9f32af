"""Parts of answers to conversations over gRPC: the servicer, before an engine that says them."""

from __future__ import annotations

import asyncio

import pytest

from control_plane.api import interceptors
from control_plane.api.engine_access import EngineAccess
from control_plane.api.inference_servicer import InferenceServicer
from control_plane.engine.gate import Gate
from hetero_infer import Delta, Finished, Message
from hetero_infer.client.answers import AnswerParts, AnswerSoFar
from hetero_infer.client.convert_answers import answer_from_proto, event_from_proto
from protos.hetero.inference.v1 import inference_pb2 as pb
from tests.control_plane.http.conftest import Served
from tests.control_plane.http.test_answers_of_chats_come_in_parts import MarkingTokenizer
from tests.control_plane.text.known_templates import MISTRAL, QWEN

TOOL = pb.Tool(name="weather")
CALL = '<tool_call>\n{"name": "weather", "arguments": {"town": "Köln"}}\n</tool_call>'
SAYS = f"<think>\nRain?\n</think>\n\nLet me see. \n{CALL}\n{CALL}\n"


class Context:
    """Takes what a servicer writes."""

    def __init__(self) -> None:
        self.events = []

    async def write(self, message):
        self.events.append(event_from_proto(message))


def asked(*, messages=(), n=1, **fields) -> pb.ChatRequest:
    messages = messages or [pb.ChatMessage(role="user", content="Hi")]
    sampling = pb.SamplingParams(max_tokens=200, seed=3, n=n)
    return pb.ChatRequest(messages=messages, sampling=sampling, **fields)


def serving(story, says, template=QWEN, **options):
    async def main():
        served = Served(template=template, attached=False, **options)
        served.engine.says = says
        interceptors._request_id.set("of the test")
        access = EngineAccess(Gate())
        access.attach(served.frontend)
        async with served.client:
            await asyncio.wait_for(story(InferenceServicer(access), served), 30)

    asyncio.run(main())


async def streamed(servicer, request) -> tuple[list, object]:
    context, so_far = Context(), AnswerSoFar()
    if isinstance(request, pb.ResumeRequest):
        await servicer.Resume(request, context)
    else:
        await servicer.ChatStream(request, context)
    for event in context.events:
        so_far.take(event)
    return context.events, so_far.answer()


def test_text_stays_all_of_it_and_the_parts_come_beside_it():
    async def story(servicer, _):
        whole = answer_from_proto(await servicer.Chat(asked(tools=[TOOL]), None))
        assert whole.text == SAYS
        (sample,) = whole.samples
        assert (sample.parts.content, sample.parts.reasoning_content) == ("Let me see.", "Rain?")
        first, second = sample.parts.tool_calls
        assert (first.name, first.arguments) == ("weather", '{"town": "Köln"}')
        assert first.id != second.id
        assert whole.message == Message(
            "assistant", "Let me see.", tool_calls=(first, second), reasoning_content="Rain?"
        )
        assert whole.finish_reason == "stop"
        events, answer = await streamed(servicer, asked(tools=[TOOL]))
        assert answer.samples == whole.samples
        parts = [event.parts for event in events if isinstance(event, Delta) and event.parts]
        calls = [call for new in parts for call in new.tool_calls]
        assert [call.id for call in calls if call.id or call.name] == [first.id, second.id]

    serving(story, [SAYS])


def test_a_marker_that_is_a_special_token_is_seen_where_there_are_tools():
    text = '[{"name": "weather", "arguments": {}}]'

    async def story(servicer, _):
        for fields, wanted in (
            ({"tools": [TOOL]}, f"[TOOL_CALLS]{text}"),
            ({}, text),
        ):
            whole = answer_from_proto(await servicer.Chat(asked(**fields), None))
            assert whole.text == wanted
            assert [call.name for call in whole.message.tool_calls] == ["weather"] * len(fields)
            _, answer = await streamed(servicer, asked(**fields))
            assert answer.samples == whole.samples

    serving(story, [[258, *text.encode()]], MISTRAL, tokenizer=MarkingTokenizer())


@pytest.mark.wide
def test_tokens_of_reasoning_are_counted_whole_streamed_and_resumed_anywhere():
    async def story(servicer, _):
        request = asked(tools=[TOOL], n=2)
        # A token is a byte here.
        num_tokens = len(b"Rain?") + len("ja: Köln".encode())
        whole = answer_from_proto(await servicer.Chat(request, None))
        assert whole.finished.reasoning_tokens == num_tokens
        _, answer = await streamed(servicer, request)
        assert answer.finished.reasoning_tokens == num_tokens
        request = asked(tools=[TOOL])
        whole = answer_from_proto(await servicer.Chat(request, None))
        assert whole.finished.reasoning_tokens == len(b"Rain?")
        token_ids = whole.samples[0].token_ids
        for count in range(len(token_ids)):
            resumed = pb.ResumeRequest(chat=request, received_token_ids=token_ids[:count])
            (*_, last), _ = await streamed(servicer, resumed)
            assert last.reasoning_tokens == len(b"Rain?")
        request = pb.GenerateRequest(text="Hi", sampling=request.sampling)
        plain = answer_from_proto(await servicer.Generate(request, None))
        assert plain.finished.reasoning_tokens == 0

    serving(story, [SAYS, "<think>ja: Köln</think>Ja."])


def test_samples_have_parts_of_their_own():
    async def story(servicer, _):
        request = asked(tools=[TOOL], n=3)
        whole = answer_from_proto(await servicer.Chat(request, None))
        _, answer = await streamed(servicer, request)
        assert answer.samples == whole.samples
        assert [bool(sample.parts.tool_calls) for sample in whole.samples] == [True, False, False]
        # What was held back to its end: it might have been a marker.
        assert whole.samples[1].parts == AnswerParts("Hi <tool_ca")
        assert whole.samples[2].parts == AnswerParts("", "hm")

    serving(story, [SAYS, "Hi <tool_ca", "<think>hm"])


def test_what_was_held_back_of_the_sample_that_ends_last_is_not_the_first_ones_too():
    async def story(servicer, _):
        _, answer = await streamed(servicer, asked(tools=[TOOL], n=2))
        assert [sample.parts.content for sample in answer.samples] == ["Hi", "Well <tool_ca"]

    serving(story, ["Hi", "Well <tool_ca"])


@pytest.mark.parametrize("says", ["<think>\n\n</think>\n\n", "<think>", ""])
def test_an_answer_of_nothing_but_marks_says_nothing_streamed_too(says):
    async def story(servicer, _):
        whole = answer_from_proto(await servicer.Chat(asked(), None))
        assert whole.samples[0].parts == AnswerParts()
        for count in (1, 2):
            events, answer = await streamed(servicer, asked(n=count))
            assert all(event.parts is not None for event in events if isinstance(event, Delta))
            assert [sample.parts for sample in answer.samples] == [AnswerParts()] * count
            assert answer.message.content == ""

    serving(story, [says] * 2)


def test_an_answer_of_which_nothing_comes_apart_has_no_parts():
    async def story(servicer, _):
        whole = await servicer.Chat(asked(), None)
        assert not whole.HasField("parts")
        events, answer = await streamed(servicer, asked())
        assert answer.samples[0].parts is None
        assert answer.message == Message("assistant", SAYS)
        assert all(event.parts is None for event in events if isinstance(event, Delta | Finished))

    serving(story, [SAYS], template="{% for m in messages %}{{ m.content }}{% endfor %}")


def test_an_answer_that_may_have_one_call_ends_behind_it():
    async def story(servicer, served):
        request = asked(tools=[TOOL], tool_choice=pb.ToolChoice(single=True))
        whole = answer_from_proto(await servicer.Chat(request, None))
        assert whole.text == SAYS[: SAYS.index(CALL) + len(CALL)]
        assert whole.finish_reason == "stop"
        assert whole.finished.completion_tokens == len(whole.text.encode())
        assert whole.samples[0].matched_stop is None
        assert len(whole.message.tool_calls) == 1
        _, answer = await streamed(servicer, request)
        assert answer.samples == whole.samples
        assert [*served.engine.stopped.values()] == [len(whole.text.encode())] * 2

    serving(story, [SAYS])


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("says", [SAYS, "<think>hm</think>Well <tool_c", f"{CALL} "])
def test_a_stream_that_is_resumed_anywhere_has_each_part_once(says, single):
    async def story(servicer, _):
        request = asked(tools=[TOOL], tool_choice=pb.ToolChoice(single=single))
        events, whole = await streamed(servicer, request)
        for num_events in (*range(1, len(events), 7), len(events) - 1):
            so_far = AnswerSoFar()
            for event in events[:num_events]:
                so_far.take(event)
            resumed = pb.ResumeRequest(chat=request, received_token_ids=so_far.token_ids)
            context = Context()
            await servicer.Resume(resumed, context)
            for event in context.events:
                so_far.take(event)
            assert so_far.answer().samples == whole.samples

    serving(story, [says])


def test_a_message_with_reasoning_and_calls_is_told_to_the_template_and_gone_on_with():
    async def story(servicer, served):
        call = pb.ToolCall(id="1", name="weather", arguments_json='{"town": "Ulm"}')
        messages = [
            pb.ChatMessage(role="user", content="Hi"),
            pb.ChatMessage(role="assistant", reasoning_content="r", tool_calls=[call]),
            pb.ChatMessage(role="tool", tool_call_id="1", content="rain"),
            pb.ChatMessage(role="assistant", content="It is"),
        ]
        request = asked(messages=messages, continue_final_message=True)
        answer = answer_from_proto(await servicer.Chat(request, None))
        assert answer.message.content == " raining."
        prompt = bytes(served.engine.submitted[-1].input_tokens).decode()
        assert "<think>\nr\n</think>" in prompt
        assert prompt.endswith("It is")

    serving(story, [" raining."])


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ((), '"tool_calls": "hermes", "reasoning": "think"'),
        (("--tool-call-parser=qwen3_coder",), '"tool_calls": "qwen3_coder", "reasoning": "think"'),
        (("--tool-call-parser=mistral", "--reasoning-parser=none"),
         '"tool_calls": "mistral", "reasoning": "no"'),
    ],
)  # fmt: skip
def test_the_log_says_how_answers_are_read(launch, tmp_path, flags, line):
    template = tmp_path / "chat.jinja"
    template.write_text(QWEN)
    process = launch(f"--chat-template={template}", *flags)
    process.ready()
    process.wait_for_log(line)
    process.wait_for_log("answers of chats come in parts")
