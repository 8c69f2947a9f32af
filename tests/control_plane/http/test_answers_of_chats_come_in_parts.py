"""Tool calls and reasoning of chat completions, whole and streamed."""

from __future__ import annotations

import json

import pytest

from control_plane.text.simple_tokenizer import SimpleTokenizer
from tests.control_plane.text.known_templates import DEEPSEEK, HARMONY, LLAMA, MISTRAL, QWEN

PATH = "/v1/chat/completions"
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"town": "Köln"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "tides", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nRain?\n</think>\n\n"


def merged(events) -> dict[int, dict]:
    """What a client makes of the chunks of a stream, by choice."""
    found: dict[int, dict] = {}
    for _, data in events:
        if data == "[DONE]":
            continue
        (choice,) = data["choices"]
        one = found.setdefault(
            choice["index"],
            {"content": None, "reasoning_content": "", "tool_calls": [], "entries": []},
        )
        delta = choice["delta"]
        for name in ("content", "reasoning_content"):
            if delta.get(name):
                one[name] = (one[name] or "") + delta[name]
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(one["tool_calls"])
                function = {"name": call["function"]["name"], "arguments": ""}
                one["tool_calls"].append(
                    {"id": call["id"], "type": call["type"], "function": function}
                )
            last = one["tool_calls"][call["index"]]
            last["function"]["arguments"] += call["function"]["arguments"]
        one["entries"] += (choice["logprobs"] or {}).get("content", [])
        one["finish_reason"] = choice["finish_reason"]
    return found


def asked(**fields) -> dict:
    return {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 170, **fields}


def test_calls_come_as_calls_and_the_reason_says_so(on_loop):
    async def test(served):
        served.engine.says = [f"Let me see.\n{CALL}\n{OTHER}"]
        answer = await served.chat(**asked(tools=TOOLS))
        (choice,) = answer["choices"]
        message = choice["message"]
        assert choice["finish_reason"] == "tool_calls"
        assert message["content"] == "Let me see."
        assert "reasoning_content" not in message
        functions = [call["function"] for call in message["tool_calls"]]
        assert functions == [
            {"name": "weather", "arguments": '{"town": "Köln"}'},
            {"name": "tides", "arguments": "{}"},
        ]
        assert len({call["id"] for call in message["tool_calls"]}) == 2
        assert answer["usage"]["completion_tokens"] == len(served.engine.says[0].encode())
        # It can be handed back as it is.
        again = [*asked()["messages"], message, *(
            {"role": "tool", "tool_call_id": call["id"], "content": "rain"}
            for call in message["tool_calls"]
        )]  # fmt: skip
        served.engine.says = ["It rains."]
        answer = await served.chat(messages=again, tools=TOOLS, max_tokens=20)
        assert answer["choices"][0]["finish_reason"] == "stop"
        prompt = bytes(served.engine.submitted[-1].input_tokens).decode()
        assert f"<|im_start|>assistant\nLet me see.\n{CALL}\n{OTHER}<|im_end|>" in prompt

    on_loop(test, template=QWEN)


CHANNELS = (
    "<|channel|>analysis<|message|>Rain?<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.weather <|constrain|>json<|message|>{"town": "Köln"}'
)


def test_answers_in_channels_come_apart_and_can_be_handed_back(on_loop):
    async def test(served):
        served.engine.says = [CHANNELS]
        answer = await served.chat(**asked(tools=TOOLS, seed=1))
        (choice,) = answer["choices"]
        message = choice["message"]
        assert choice["finish_reason"] == "tool_calls"
        assert (message["content"], message["reasoning_content"]) == (None, "Rain?")
        (call,) = message["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": '{"town": "Köln"}'}
        one = merged(await served.events(PATH, asked(tools=TOOLS, seed=1)))[0]
        assert (one["reasoning_content"], one["tool_calls"]) == ("Rain?", [call])
        told = {"role": "tool", "tool_call_id": call["id"], "content": "rain"}
        served.engine.says = ["<|channel|>final<|message|>It rains."]
        answer = await served.chat(messages=[*asked()["messages"], message, told], tools=TOOLS)
        assert answer["choices"][0]["message"]["content"] == "It rains."
        prompt = bytes(served.engine.submitted[-1].input_tokens).decode()
        before = "<|channel|>analysis<|message|>Rain?<|end|><|start|>assistant to=functions.weather"
        assert before in prompt
        assert "<|start|>functions.weather to=assistant" in prompt

    on_loop(test, template=HARMONY)


def test_a_template_with_channels_may_read_descriptions_that_are_not_there(on_loop):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    line = "// {{ '' + t.function.description + t.function.name }}"
    lines = "{% for t in tools or [] %}" + line + "{% endfor %}"

    async def test(served):
        served.engine.says = ["Hi"]
        await served.chat(**asked(tools=[tool]))
        assert b"// f" in bytes(served.engine.submitted[-1].input_tokens)

    on_loop(test, template=lines + HARMONY)


def test_the_prompt_of_an_answer_in_channels_that_has_a_form_opens_its_content(on_loop):
    async def test(served):
        served.engine.says = ['{"a": 1}']
        for fields in ({}, {"response_format": {"type": "json_object"}}):
            answer = await served.chat(**asked(**fields))
            assert answer["choices"][0]["message"]["content"] == '{"a": 1}'
        free, formed = (bytes(one.input_tokens) for one in served.engine.submitted)
        assert formed == free + b"<|channel|>final<|message|>"

    on_loop(test, template=HARMONY)


def test_nothing_but_calls_has_no_content(on_loop):
    async def test(served):
        served.engine.says = [CALL]
        answer = await served.chat(**asked(tools=TOOLS))
        assert answer["choices"][0]["message"]["content"] is None

    on_loop(test, template=QWEN)


def test_without_tools_or_where_none_may_be_called_calls_are_text(on_loop):
    async def test(served):
        served.engine.says = [CALL]
        for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
            answer = await served.chat(**asked(**fields))
            message = {"role": "assistant", "content": CALL, "refusal": None}
            assert answer["choices"][0]["message"] == message
            assert answer["choices"][0]["finish_reason"] == "stop"

    on_loop(test, template=QWEN)


def test_a_call_that_is_cut_off_says_so(on_loop):
    async def test(served):
        served.engine.says = [CALL]
        fields = asked(tools=TOOLS) | {"max_tokens": 50}
        (choice,) = (await served.chat(**fields))["choices"]
        assert choice["finish_reason"] == "length"
        (call,) = choice["message"]["tool_calls"]
        assert '{"town": "Köln"}'.startswith(call["function"]["arguments"])
        fields["max_tokens"] = len(CALL.encode()) - 3  # the arguments are whole, the answer is not
        (choice,) = (await served.chat(**fields))["choices"]
        assert choice["finish_reason"] == "length"
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"town": "Köln"}'
        (choice,) = (await served.chat(**asked(tools=TOOLS, stop="ln")))["choices"]
        assert choice["finish_reason"] == "stop"
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"town": "Kö'

    on_loop(test, template=QWEN)


def test_reasoning_comes_beside_the_content(on_loop):
    async def test(served):
        served.engine.says = [f"{THOUGHT}It rains."]
        answer = await served.chat(**asked())
        message = answer["choices"][0]["message"]
        assert message == {
            "role": "assistant", "content": "It rains.", "refusal": None,
            "reasoning_content": "Rain?",
        }  # fmt: skip
        again = [*asked()["messages"], message, {"role": "user", "content": "And now?"}]
        await served.chat(messages=again, max_tokens=20)
        template = {"enable_thinking": False}
        answer = await served.chat(**asked(chat_template_kwargs=template))
        assert answer["choices"][0]["message"]["content"] == f"{THOUGHT}It rains."

    on_loop(test, template=QWEN)


@pytest.mark.parametrize("logprobs", [False, True])
def test_tokens_of_reasoning_are_counted_of_all_samples_whole_and_streamed(on_loop, logprobs):
    async def test(served):
        served.engine.says = [f"{THOUGHT}It rains.", "<think>ja: Köln</think>Ja.", "No.", CALL]
        fields = asked(n=4, tools=TOOLS, seed=3, logprobs=logprobs)
        usage = (await served.chat(**fields))["usage"]
        # A token is a byte here.
        num_tokens = len(b"Rain?") + len("ja: Köln".encode())
        assert usage["completion_tokens_details"] == {"reasoning_tokens": num_tokens}
        events = await served.events(PATH, fields | {"stream_options": {"include_usage": True}})
        assert events[-2][1]["usage"] == usage
        none = {"structured_outputs": {"json_object": True}}
        served.engine.says = ['{"a": "<think>b</think>"}']
        usage = (await served.chat(**asked(**none)))["usage"]
        assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}

    on_loop(test, template=QWEN)


def test_where_reasoning_is_not_told_apart_no_token_is(on_loop):
    async def test(served):
        served.engine.says = [THOUGHT]
        usage = (await served.chat(**asked()))["usage"]
        assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}
        response = await served.post("/v1/completions", {"model": "tiny/bytes", "prompt": "Hi"})
        assert "completion_tokens_details" not in response.json()["usage"]

    on_loop(test)


def test_reasoning_that_is_handed_back_reaches_the_template(on_loop):
    async def test(served):
        message = {"role": "assistant", "content": "c", "reasoning_content": "r"}
        await served.chat(messages=[*asked()["messages"], message], max_tokens=5)
        prompt = bytes(served.engine.submitted[-1].input_tokens).decode()
        assert "<think>\nr\n</think>\n\nc" in prompt

    on_loop(test, template=QWEN)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (QWEN, [f"{THOUGHT}Well:\n{CALL}\n{OTHER}", f"{THOUGHT}Hi <b>", CALL, "", "<tool_cal"]),
        (LLAMA, [
            '{"name": "weather", "parameters": {"town": "Köln"}}', "Hi {", '{"name": "x"}',
            '<|python_tag|>{"name": "weather", "parameters": {}}', " ",
        ]),
        (MISTRAL, [
            '[TOOL_CALLS] [{"name": "weather", "arguments": {"town": "Köln"}}]', "[TOOL]", "[",
            "Hm [TOOL_CALLS]weather[ARGS]{}[TOOL_CALLS]tides[ARGS]{}", "[TOOL_CALLS]?",
        ]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("logprobs", [False, True])
def test_a_stream_of_parts_equals_the_whole(on_loop, template, says, logprobs):
    async def test(served):
        served.engine.says = says
        fields = asked(n=len(says), tools=TOOLS, seed=3, logprobs=logprobs)
        whole = await served.chat(**fields)
        events = await served.events(PATH, fields)
        streamed = merged(events)
        for choice in whole["choices"]:
            one, message = streamed[choice["index"]], choice["message"]
            assert one["finish_reason"] == choice["finish_reason"]
            assert (one["content"] or "") == (message["content"] or "")
            assert one["reasoning_content"] == message.get("reasoning_content", "")
            assert one["tool_calls"] == message.get("tool_calls", [])
            # Of all tokens, of calls and reasoning too.
            num_tokens = len(says[choice["index"]].encode()) if logprobs else 0
            assert len(one["entries"]) == num_tokens
            assert one["entries"] == (choice["logprobs"] or {}).get("content", [])
        reasons = [choice["finish_reason"] for choice in whole["choices"]]
        assert {"stop", "tool_calls"} == set(reasons)

    on_loop(test, template=template)


class MarkingTokenizer(SimpleTokenizer):
    """Its token 258 is a marker, without a text."""

    def encode_plain(self, text):
        return [258] if text == "[TOOL_CALLS]" else super().encode_plain(text)


def test_a_marker_that_is_a_special_token_is_seen_where_there_are_tools(on_loop):
    async def test(served):
        served.engine.says = [[258, *b'[{"name": "weather", "arguments": {}}]']]
        whole = await served.chat(**asked(tools=TOOLS, seed=1, logprobs=True))
        (choice,) = whole["choices"]
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"
        assert choice["logprobs"]["content"][0]["token"] == "token_id:258"
        assert whole["usage"]["completion_tokens"] == len(served.engine.says[0])
        streamed = merged(await served.events(PATH, asked(tools=TOOLS, seed=1)))
        assert streamed[0]["tool_calls"] == choice["message"]["tool_calls"]
        plain = await served.chat(**asked())
        assert plain["choices"][0]["message"]["content"].startswith('[{"name"')

    on_loop(test, template=MISTRAL, tokenizer=MarkingTokenizer())


def test_arguments_are_streamed_while_they_are_written(on_loop):
    async def test(served):
        served.engine.says = [CALL]
        events = await served.events(PATH, asked(tools=TOOLS))
        deltas = [data["choices"][0]["delta"] for _, data in events[:-1]]
        calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
        assert calls[0]["function"] == {"name": "weather", "arguments": "{"}
        assert {"index", "function"} == set(calls[1])
        assert len(calls) == len('{"town": "Köln"}')
        assert json.loads("".join(call["function"]["arguments"] for call in calls)) == {
            "town": "Köln"
        }
        assert all(delta for delta in deltas[:-1])  # chunks that say nothing are not sent
        assert deltas[-1] == {}

    on_loop(test, template=QWEN)


CONTINUED = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Well, "},
]


def test_an_answer_goes_on_with_a_message_that_was_begun(on_loop):
    async def test(served):
        served.engine.says = ["it rains."]
        answer = await served.chat(messages=CONTINUED, continue_final_message=True, max_tokens=20)
        assert answer["choices"][0]["message"]["content"] == "it rains."
        prompt = bytes(served.engine.submitted[-1].input_tokens).decode()
        assert prompt == "<user>Hi</><assistant>Well, "
        tokens = {"messages": CONTINUED, "continue_final_message": True}
        response = await served.post("/tokenize", tokens)
        assert response.json()["tokens"] == served.engine.submitted[-1].input_tokens
        await served.chat(messages=CONTINUED, add_generation_prompt=False, max_tokens=1)
        prompt = bytes(served.engine.submitted[-1].input_tokens).decode()
        assert prompt == "<user>Hi</><assistant>Well, </>"

    on_loop(test)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"add_generation_prompt": True}, "must not both be true"),
        (
            {"messages": CONTINUED[:1]},
            "unless the last message is the assistant's, got role 'user'",
        ),
        ({"messages": [CONTINUED[0], {"role": "assistant", "content": " "}]}, "has content"),
    ],
)
def test_a_message_that_cannot_be_gone_on_with_is_refused(on_loop, fields, said):
    async def test(served):
        body = {"model": "tiny/bytes", "messages": CONTINUED, "continue_final_message": True}
        error = await served.error(PATH, body | fields)
        assert error["param"] == "continue_final_message"
        assert said in error["message"]

    on_loop(test)


def test_a_template_that_leaves_the_message_out_is_told(on_loop):
    async def test(served):
        body = {"model": "tiny/bytes", "messages": CONTINUED, "continue_final_message": True}
        error = await served.error(PATH, body)
        assert "leaves out what the last message says" in error["message"]

    on_loop(test, template="{{ messages[0].content }}")


@pytest.mark.parametrize(
    ("form", "says", "content", "reasoning"),
    [
        ({"json_object": True}, '{"a": 1}', '{"a": 1}', None),
        ({"json": {"type": "object"}}, '{"a": 1}', '{"a": 1}', None),
        ({"choice": ["yes", "no"]}, "yes", "yes", None),
        ({"regex": "[a-z]+</think>[a-z]+"}, "hm</think>yes", "yes", "hm"),
    ],
)
def test_a_form_without_a_place_for_thoughts_is_content_though_the_prompt_opens_them(
    on_loop, form, says, content, reasoning
):
    async def test(served):
        served.engine.says = [says]
        (choice,) = (await served.chat(**asked(structured_outputs=form)))["choices"]
        assert choice["message"]["content"] == content
        assert choice["message"].get("reasoning_content") == reasoning

    on_loop(test, template=DEEPSEEK)
