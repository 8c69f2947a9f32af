from __future__ import annotations

import json

import pytest

PATH = "/v1/chat/completions"
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "of today", "parameters": {"type": "object"}},
}


def prompt_of(request) -> str:
    return bytes(request.input_tokens).decode()


def test_a_chat_has_a_message_reason_and_usage(on_loop):
    async def test(served):
        answer = await served.chat("Hi", max_completion_tokens=5)
        assert answer["id"].startswith("chatcmpl-")
        assert answer["object"] == "chat.completion"
        assert answer["choices"] == [
            {
                "index": 0,
                "message": {"role": "assistant", "content": ">tnat", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
            }
        ]
        assert answer["usage"]["prompt_tokens"] == len("<user>Hi</><assistant>")

    on_loop(test)


def test_an_answer_may_be_as_long_as_there_is_room_behind_the_prompt(on_loop):
    async def test(served):
        await served.chat("Hi")
        (request,) = served.engine.submitted
        assert len(request.input_tokens) + request.params.max_tokens == 512

    on_loop(test)


def test_the_conversation_goes_through_the_template(on_loop):
    async def test(served):
        await served.chat(
            max_tokens=1,
            messages=[
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": [
                    {"type": "text", "text": "How "}, {"type": "text", "text": "are you?"}
                ]},
                {"role": "assistant", "content": "Fine.", "refusal": None, "tool_calls": None,
                 "annotations": [], "audio": None, "function_call": None},
                {"role": "assistant", "tool_calls": [
                    {"id": "1", "type": "function",
                     "function": {"name": "f", "arguments": '{"x": "an x"}'}}
                ]},
                {"role": "tool", "tool_call_id": "1", "content": "42"},
                {"role": "user", "content": "And now?", "name": "Ann"},
            ],
        )  # fmt: skip
        assert prompt_of(served.engine.submitted[0]) == (
            "<system>Be brief.</><user>How are you?</><assistant>Fine.</><assistant>an x</>"
            "<tool>42</><user>And now?</><assistant>"
        )

    on_loop(test)


def test_tools_go_to_the_template_unless_none_may_be_called(on_loop):
    async def test(served):
        await served.chat("Hi", tools=[TOOL], tool_choice="auto", max_tokens=1)
        await served.chat("Hi", tools=[TOOL], tool_choice="none", max_tokens=1)
        await served.chat("Hi", tools=[], max_tokens=1)
        prompts = [prompt_of(request) for request in served.engine.submitted]
        assert prompts[0] == "<tool>weather</tool><user>Hi</><assistant>"
        assert prompts[1] == prompts[2] == "<user>Hi</><assistant>"

    on_loop(test)


def test_a_model_whose_template_ignores_tools_is_told_of_them_in_a_message(on_loop):
    async def test(served):
        await served.chat("Hi", tools=[TOOL], max_tokens=1)
        await served.chat("Hi", tools=[TOOL], tool_choice="none", max_tokens=1)
        told, plain = map(prompt_of, (request for request in served.engine.submitted))
        assert told.startswith("<system># Tools")
        assert json.dumps(TOOL) in told
        assert told.endswith("<user>Hi")
        assert plain == "<user>Hi"

    on_loop(test, template=PLAIN, max_model_len=4096)


def test_where_nothing_can_be_told_tools_are_refused(on_loop):
    async def test(served):
        body = {
            "model": "tiny/bytes",
            "messages": [{"role": "user", "content": "Hi"}],
            "tools": [TOOL],
        }
        error = await served.error(PATH, body)
        assert error["param"] == "tools"
        assert "has no place for tools" in error["message"]

    on_loop(test, template="Hi")


def test_a_model_without_a_template_says_so(on_loop):
    async def test(served):
        body = {"model": "tiny/bytes", "messages": [{"role": "user", "content": "Hi"}]}
        error = await served.error(PATH, body)
        assert error["message"] == "the model has no chat template"

    on_loop(test, template=None)


@pytest.mark.parametrize(
    "fields", [{}, {"n": 3}, {"logprobs": True, "top_logprobs": 2}, {"stop": "é"}]
)
def test_a_streamed_chat_equals_a_whole_one(on_loop, fields):
    async def test(served):
        fields["max_tokens"] = 60
        whole = await served.chat("Hi", **fields)
        body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
        events = await served.events(PATH, body)
        assert events.pop() == (None, "[DONE]")
        for choice in whole["choices"]:
            chunks = [
                data["choices"][0]
                for _, data in events
                if data["choices"][0]["index"] == choice["index"]
            ]
            assert chunks[0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
            content = "".join(chunk["delta"].get("content", "") for chunk in chunks)
            assert content == choice["message"]["content"]
            assert chunks[-1]["delta"] == {}
            reasons = [chunk["finish_reason"] for chunk in chunks]
            assert reasons == [None] * (len(chunks) - 1) + [choice["finish_reason"]]
            entries = [e for c in chunks if c["logprobs"] for e in c["logprobs"]["content"]]
            assert entries == (choice["logprobs"] or {}).get("content", [])

    on_loop(test)


def test_a_streamed_chat_ends_with_its_usage_if_that_is_asked_for(on_loop):
    async def test(served):
        whole = await served.chat("Hi", max_tokens=5)
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
        events = await served.events(PATH, {**body, "stream_options": {"include_usage": True}})
        *chunks, usage, done = [data for _, data in events]
        assert done == "[DONE]"
        assert (usage["choices"], usage["usage"]) == ([], whole["usage"])
        assert all(chunk["usage"] is None for chunk in chunks)

    on_loop(test)


def test_chat_logprobs_have_bytes_and_as_many_others_as_asked_for(on_loop):
    async def test(served):
        answer = await served.chat("é", logprobs=True, top_logprobs=1, max_tokens=1, n=1)
        (entry,) = answer["choices"][0]["logprobs"]["content"]
        assert entry == {
            "token": ">",
            "logprob": -0.062,
            "bytes": [62],
            "top_logprobs": [{"token": "z", "logprob": -0.25, "bytes": [122]}],
        }
        answer = await served.chat("é", logprobs=True, max_tokens=1)
        assert answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []

    on_loop(test)
