"""Messages of answers come back as clients leave them, and change nothing on the way."""

from __future__ import annotations

import pytest

from tests.control_plane.http.conftest import MODEL, error_of
from tests.control_plane.http.test_chats_over_http import prompt_of
from tests.control_plane.text.known_templates import LLAMA, QWEN, QWEN_CODER

PATH = "/v1/chat/completions"
ASKED = {"role": "user", "content": "Weather?"}
TOLD = {"role": "tool", "tool_call_id": "abcdefghi", "content": "What?"}
WRITTEN = ['{"town": ', '{"town": NaN}', '{"town": "Ulm"', r'{"town": "\ud83d"}']


def calling(arguments, **more):
    function = {"name": "weather", "arguments": arguments, **more}
    call = {"id": "abcdefghi", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


async def prompt_for(served, *messages) -> str:
    await served.chat(messages=list(messages), max_tokens=1)
    return prompt_of(served.engine.submitted[-1])


@pytest.mark.parametrize("written", WRITTEN)
def test_a_call_that_is_no_json_is_handed_back_as_the_model_wrote_it(on_loop, written):
    says = f'<tool_call>\n{{"name": "weather", "arguments": {written}\n</tool_call>'

    async def test(served):
        served.engine.says = [says]
        tool = {"type": "function", "function": {"name": "weather"}}
        answer = await served.chat(messages=[ASKED], tools=[tool], max_tokens=250)
        message = answer["choices"][0]["message"]
        told = {**TOLD, "tool_call_id": message["tool_calls"][0]["id"]}
        prompt = await prompt_for(served, ASKED, message, told, ASKED)
        arguments = message["tool_calls"][0]["function"]["arguments"]
        assert written in arguments
        assert f'"name": "weather", "arguments": {arguments}' in prompt

    on_loop(test, template=QWEN)


def test_a_template_that_spells_arguments_as_json_spells_the_text_of_a_call_that_is_none(on_loop):
    async def test(served):
        prompt = await prompt_for(served, ASKED, calling('{"town": '), TOLD)
        assert r'"parameters": "{\"town\": "}' in prompt

    on_loop(test, template=LLAMA)


def test_a_template_that_can_tell_no_such_call_is_what_refuses_it(on_loop):
    async def test(served):
        body = {"model": MODEL, "messages": [ASKED, calling('{"town": '), TOLD]}
        error = error_of(await served.post(PATH, body))
        assert error["param"] == "messages"
        assert "the chat template refused the messages" in error["message"]

    on_loop(test, template=QWEN_CODER)


def test_what_packages_leave_beside_a_message_changes_no_prompt(on_loop):
    async def test(served):
        said = {"role": "assistant", "content": '{"town": "Ulm"}'}
        for plain, left in (
            (said, {**said, "parsed": {"town": "Ulm"}}),
            (said, {**said, "provider_specific_fields": {"refusal": None}}),
            (calling("{}"), calling("{}", parsed_arguments={})),
        ):
            ask = [ASKED, plain, TOLD] if "tool_calls" in plain else [ASKED, plain, ASKED]
            wanted = await prompt_for(served, *ask)
            assert await prompt_for(served, ask[0], left, ask[2]) == wanted

    on_loop(test, template=QWEN)


def test_what_only_another_service_could_read_in_a_message_is_refused_by_name(on_loop):
    async def test(served):
        fields = {"provider_specific_fields": {"thought_signature": "x"}}
        body = {"model": MODEL, "messages": [{"role": "assistant", "content": "Hi", **fields}]}
        error = error_of(await served.post(PATH, body))
        assert error["param"] == "messages[0].provider_specific_fields.thought_signature"
        assert error["code"] == "unknown_parameter"

    on_loop(test)
