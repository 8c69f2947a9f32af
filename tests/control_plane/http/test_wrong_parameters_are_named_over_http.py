"""Parameters that OpenAI's API does not take, and the words and fields by which it says so."""

from __future__ import annotations

import json

import pytest

from tests.control_plane.http.conftest import error_of

MODEL = "tiny/bytes"
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
HI = [{"role": "user", "content": "Hi"}]


def with_message(**message) -> dict:
    return {"messages": [message]}


SCHEMA_OF_NOTHING = {
    "type": "json_schema",
    "json_schema": {"name": "n", "schema": {"type": "nothing"}, "strict": True},
}
NOTHING_AS_TEXT = {"type": "json_schema", **SCHEMA_OF_NOTHING["json_schema"]}
TOOL = {"type": "function", "name": "f"}
CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        (COMPLETIONS, {"prompt": None}, "prompt", "Missing required parameter: 'prompt'"),
        (COMPLETIONS, {"model": None}, "model", "Missing required parameter: 'model'"),
        (COMPLETIONS, {"prompt": 5}, "prompt", "a string, token ids, or a list of either, got 5"),
        (COMPLETIONS, {"prompt": ""}, "prompt", "at least 1 character"),
        (COMPLETIONS, {"prompt": []}, "prompt", "at least 1 item"),
        (COMPLETIONS, {"prompt": ["a", 5]}, "prompt[1]", "valid string, got 5"),
        (COMPLETIONS, {"prompt": [1.5]}, "prompt[0]", "valid integer, got 1.5"),
        (COMPLETIONS, {"prompt": [[1.5]]}, "prompt[0][0]", "valid integer, got 1.5"),
        (COMPLETIONS, {"prompt": [1, "a"]}, "prompt[1]", "valid integer, got 'a'"),
        (COMPLETIONS, {"prompt": [[1], []]}, "prompt[1]", "at least 1 item"),
        (COMPLETIONS, {"prompt": [999]}, "prompt", "prompt: token ids must be 0 to 258, got 999"),
        (COMPLETIONS, {"prompt": ["a"] * 257}, "prompt", "at most 256 items"),
        (COMPLETIONS, {"max_tokens": "5"}, "max_tokens", "valid integer, got '5'"),
        (COMPLETIONS, {"max_tokens": 0}, "max_tokens", "must be at least 1 without echo"),
        (COMPLETIONS, {"max_tokens": -1}, "max_tokens", "greater than or equal to 0, got -1"),
        (COMPLETIONS, {"temperature": 2.5}, "temperature", "less than or equal to 2, got 2.5"),
        (COMPLETIONS, {"top_p": 0}, "top_p", "greater than 0"),
        (COMPLETIONS, {"n": 0}, "n", "greater than or equal to 1"),
        (COMPLETIONS, {"n": True}, "n", "valid integer, got true"),
        (COMPLETIONS, {"prompt": ["a"] * 20, "n": 128}, "n", "at most 2048 choices"),
        (COMPLETIONS, {"best_of": 3}, "best_of", "best_of must equal n (1)"),
        (COMPLETIONS, {"suffix": "x"}, "suffix", "Unknown or unsupported parameter: 'suffix'"),
        (COMPLETIONS, {"max_token": 3}, "max_token", "Unknown or unsupported parameter"),
        (COMPLETIONS, {"logprobs": 21}, "logprobs", "less than or equal to 20"),
        (COMPLETIONS, {"logprobs": True}, "logprobs", "valid integer"),
        (COMPLETIONS, {"stop": ["a"] * 17}, "stop", "at most 16 items"),
        (COMPLETIONS, {"stop": [""]}, "stop[0]", "at least 1 character"),
        (COMPLETIONS, {"stop": 5}, "stop", "a string or a list of strings, got 5"),
        (COMPLETIONS, {"logit_bias": {"x": 1}}, "logit_bias", "keys must be token ids"),
        (COMPLETIONS, {"logit_bias": {"28": 1, "028": 2}}, "logit_bias", "without leading zeros"),
        (COMPLETIONS, {"logit_bias": {"1": 101}}, "logit_bias.1", "less than or equal to 100"),
        (COMPLETIONS, {"logit_bias": {"300": 1}}, "logit_bias", "must be 0 to 258, got 300"),
        (COMPLETIONS, {"seed": 2**64}, "seed", "less than or equal to"),
        (COMPLETIONS, {"stream_options": {}}, "stream_options", "only allowed with stream"),
        (COMPLETIONS, {"cache_salt": "é" * 129}, "cache_salt", "at most 256 bytes, got 258"),
        (COMPLETIONS, {"seed": -(2**63) - 1}, "seed", "greater than or equal to"),
        (COMPLETIONS, {"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "Unknown"),
        (COMPLETIONS, {"store": True}, "store", "false, got true"),
        (COMPLETIONS, {"service_tier": "flex"}, "service_tier", "'auto' or 'default', got 'flex'"),
        (COMPLETIONS, {"prompt": "x" * 600}, "prompt", "512"),
        (CHAT, {"messages": []}, "messages", "at least 1 item"),
        (CHAT, {"messages": "Hi"}, "messages", "valid array"),
        (CHAT, with_message(role="bot", content="x"), "messages[0].role",
         "'system', 'developer', 'user', 'assistant' or 'tool', got 'bot'"),
        (CHAT, with_message(role=5, content="x"), "messages[0].role", "or 'tool', got 5"),
        (CHAT, with_message(role="b" * 99), "messages[0].role", f"got '{'b' * 59}…"),
        (CHAT, with_message(content="x"), "messages[0].role", "Missing required parameter"),
        (CHAT, with_message(role=None), "messages[0].role", "Missing required parameter"),
        (CHAT, {"messages": ["Hi"]}, "messages[0]", "or tool, got 'Hi'"),
        (CHAT, with_message(role="user"), "messages[0].content", "Missing required parameter"),
        (CHAT, with_message(role="assistant"), "messages[0].content", "content is required"),
        (CHAT, with_message(role="user", content=[]), "messages[0].content", "at least 1 item"),
        (
            CHAT,
            with_message(role="user", content=[{"type": "image_url", "image_url": {"url": "x"}}]),
            "messages[0].content[0].type",
            "should be 'text', got 'image_url'",
        ),
        (
            CHAT,
            with_message(
                role="assistant",
                tool_calls=[
                    {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
                ],
            ),
            "messages[0].tool_calls[0].function.arguments",
            "valid string",
        ),
        (CHAT, {"top_logprobs": 2}, "top_logprobs", "only allowed with logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        (CHAT, {"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "equal, got 1 and 2"),
        (CHAT, {"tool_choice": "any"}, "tool_choice", "'none', 'auto', 'required', or an object"),
        (CHAT, {"tool_choice": {"type": "tool"}}, "tool_choice", "function or allowed_tools"),
        (CHAT, {"tool_choice": {"type": "function"}}, "tool_choice.function", "Missing"),
        (CHAT, {"tool_choice": "required"}, "tool_choice", "where there are no tools"),
        (CHAT, {"response_format": {"type": "xml"}}, "response_format.type", "'text', 'json_o"),
        (CHAT, {"response_format": {"type": []}}, "response_format.type", "'json_schema'"),
        (CHAT, {"response_format": "xml"}, "response_format", "be an object"),
        (CHAT, {"response_format": {"type": "json"}}, "response_format.value", "required"),
        (CHAT, {"response_format": {"type": "regex", "value": {}}}, "response_format.value", "str"),
        (CHAT, {"response_format": {"type": "regex", "value": "("}}, "response_format", "regex"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema", "req"),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema.schema",
            "required",
        ),
        (CHAT, {"response_format": SCHEMA_OF_NOTHING}, "response_format", "not supported"),
        (
            CHAT,
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "not allowed with response_format",
        ),
        (COMPLETIONS, {"structured_outputs": {}}, "structured_outputs", "got none"),
        (
            COMPLETIONS,
            {"structured_outputs": {"choice": []}},
            "structured_outputs.choice",
            "at least 1",
        ),
        (
            COMPLETIONS,
            {"structured_outputs": {"regex": "("}},
            "structured_outputs.regex",
            "not supported",
        ),
        (
            COMPLETIONS,
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            "structured_outputs",
            "got regex and choice",
        ),
        (CHAT, {"functions": []}, "functions", "Unknown or unsupported"),
        (CHAT, {"modalities": ["audio"]}, "modalities[0]", "'text'"),
        (CHAT, {"reasoning_effort": "low"}, "reasoning_effort", "no place for it"),
        (CHAT, {"reasoning_effort": "much"}, "reasoning_effort", "'none', 'minimal', 'low'"),
        (RESPONSES, {"reasoning": {"effort": "low"}}, "reasoning.effort", "no place for it"),
        (RESPONSES, {"reasoning": {"summary": "detailed"}}, "reasoning.summary", "'auto'"),
        (CHAT, {"max_tokens": 600}, "max_tokens", "512"),
        (CHAT, {"max_completion_tokens": 600}, "max_completion_tokens",
         "max_completion_tokens must be at most"),
        (RESPONSES, {"input": []}, "input", "at least 1 item, not 0"),
        (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id", "Unknown or"),
        (RESPONSES, {"tools": [{"type": "function"}]}, "tools[0].name", "Missing required"),
        (RESPONSES, {"tools": [{"type": "web_search"}]}, "tools[0].type", "got 'web_search'"),
        (RESPONSES, {"tools": [TOOL] * 129}, "tools", "at most 128 items"),
        (RESPONSES, {"tool_choice": "any"}, "tool_choice", "'none', 'auto', 'required', or"),
        (RESPONSES, {"tool_choice": "required"}, "tool_choice", "where there are no tools"),
        (RESPONSES, {"tool_choice": {"type": "web_search"}}, "tool_choice", "the type function or"),
        (RESPONSES, {"tools": [TOOL], "include": ["message.output_text.logprobs"]}, "include",
         "only allowed with tool_choice none"),
        (RESPONSES, {"include": ["reasoning.encrypted_content"]}, "include[0]", "logprobs'"),
        (RESPONSES, {"store": True}, "store", "false"),
        (RESPONSES, {"background": True}, "background", "false"),
        (RESPONSES, {"background": 0}, "background", "boolean"),
        (RESPONSES, {"store": 0.0}, "store", "boolean"),
        (RESPONSES, {"truncation": "auto"}, "truncation", "'disabled'"),
        (RESPONSES, {"top_logprobs": 1}, "top_logprobs", "with message.output_text.logprobs"),
        (RESPONSES, {"stream_options": {}}, "stream_options", "only allowed with stream"),
        (CHAT, {"stream_options": {}}, "stream_options", "only allowed with stream"),
        (RESPONSES, {"stream": True, "stream_options": {"include_usage": True}},
         "stream_options.include_usage", "a response has its usage"),
        (RESPONSES, {"stream": True, "stream_options": {"continuous_usage_stats": False}},
         "stream_options.continuous_usage_stats", "a response has its usage"),
        (RESPONSES, {"input": [{"role": "bot", "content": "x"}]}, "input[0].role", "'bot'"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id",
         "nothing is stored here: send the item itself"),
        (RESPONSES, {"input": [{"type": None, "id": "x"}]}, "input[0].id",
         "nothing is stored here: send the item itself"),
        (RESPONSES, {"input": [5]}, "input[0]", "an item of the type message, reasoning"),
        (RESPONSES, {"input": [{"type": "reasoning", "encrypted_content": "x"}]},
         "input[0].encrypted_content", "Unknown"),
        (RESPONSES, {"input": [{"type": "reasoning", "summary": [{"type": "summary_text"}]}]},
         "input[0].summary", "at most 0 items"),
        (RESPONSES, {"input": [CALL | {"arguments": {}}]}, "input[0].arguments", "valid string"),
        (RESPONSES, {"input": [CALL] * 129}, "input", "at most 128 calls in one turn"),
        (RESPONSES, {"input": [{"type": "function_call_output", "output": "x"}]},
         "input[0].call_id", "Missing"),
        (RESPONSES, {"text": {"format": {"type": "json", "value": {}}}}, "text.format.type",
         "'json_object' or 'json_schema'"),
        (RESPONSES, {"text": {"format": {"type": "json_object", "value": {}}}},
         "text.format.value", "nknown"),
        (RESPONSES, {"text": {"format": {"type": "xml"}}}, "text.format.type", "'text', 'json_o"),
        (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "text.format.name", "Missing"),
        (RESPONSES, {"text": {"verbosity": "low"}}, "text.verbosity", "Unknown"),
        (RESPONSES, {"text": {"format": NOTHING_AS_TEXT}}, "text.format", "not supported"),
        (RESPONSES,
         {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
         "structured_outputs", "not allowed with text.format"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input[0].content[0].type", "'input_text' or 'output_text'"),
        (RESPONSES, {"max_output_tokens": 600}, "max_output_tokens",
         "max_output_tokens must be at most"),
        ("/tokenize", {}, "prompt", "one of prompt and messages must be given"),
        ("/tokenize", {"prompt": "a", "tools": []}, "tools", "only allowed with messages"),
        ("/tokenize", {"prompt": "a", "tools": [1]}, "tools[0]", "an object"),
        ("/detokenize", {"tokens": [999]}, "tokens", "token ids must be 0 to 258, got 999"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]", "greater than or equal to 0"),
    ],
)  # fmt: skip
def test_what_is_wrong_or_not_supported_is_named(on_loop, path, fields, param, words):
    async def test(served):
        body = {"model": MODEL}
        if path == COMPLETIONS:
            body["prompt"] = "Hi"
        if path == CHAT:
            body["messages"] = HI
        if path == RESPONSES:
            body["input"] = "Hi"
        error = await served.error(path, body | fields)
        assert words in error["message"]
        assert (error["param"], error["type"]) == (param, "invalid_request_error")
        assert served.engine.submitted == []

    on_loop(test)


@pytest.mark.parametrize(("num_places", "num_planes", "most"), [(1, 1, "1 prompt"), (2, 3, "6 p")])
def test_prompts_that_can_never_wait_together_are_not_told_to_come_again(
    on_loop, num_places, num_planes, most
):
    async def test(served):
        body = {"model": MODEL, "prompt": ["Hi"] * (num_places * num_planes + 1)}
        error = await served.error(COMPLETIONS, body)
        assert f"at most {most}" in error["message"]
        assert "(max_queued_requests), got " in error["message"]
        assert (error["param"], error["code"]) == ("prompt", "invalid_value")
        assert served.engine.submitted == []
        body["prompt"].pop()
        answer = await served.complete(**body)
        assert len(answer["choices"]) == num_places * num_planes

    on_loop(test, max_queued_requests=num_places, num_planes=num_planes)


def test_what_does_not_fit_the_context_has_openais_code(on_loop):
    async def test(served):
        body = {"model": MODEL, "prompt": "Hi", "max_tokens": 511}
        assert (await served.error(COMPLETIONS, body))["code"] == "context_length_exceeded"
        body = {"model": MODEL, "messages": [{"role": "user", "content": "x" * 512}]}
        assert (await served.error(CHAT, body))["code"] == "context_length_exceeded"
        body = {"model": MODEL, "prompt": "x" * 40_000}
        assert (await served.error(COMPLETIONS, body))["code"] == "context_length_exceeded"

    on_loop(test)


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_numbers_that_json_does_not_have_are_refused(on_loop, number):
    async def test(served):
        tool = (
            f'{{"type": "function", "function": {{"name": "f", "parameters": {{"x": {number}}}}}}}'
        )
        body = f'{{"model": "{MODEL}", "messages": {json.dumps(HI)}, "tools": [{tool}]}}'
        json.loads(body)  # Python takes it
        headers = {"content-type": "application/json"}
        response = await served.client.post(CHAT, content=body, headers=headers)
        assert error_of(response)["param"] == "tools[0].function.parameters"

    on_loop(test)
