"""`parallel_tool_calls: false` where the model decides: the answer ends behind its first call."""

from __future__ import annotations

import json

import pytest

from tests.control_plane.http.test_answers_of_chats_come_in_parts import (
    CALL,
    OTHER,
    PATH,
    TOOLS,
    asked,
    merged,
)
from tests.control_plane.text.known_templates import LLAMA, MISTRAL, QWEN


@pytest.mark.parametrize(
    ("template", "one", "rest"),
    [
        (QWEN, CALL, OTHER),
        (LLAMA, '{"name": "weather", "parameters": {"town": "Köln"}}', '; {"name": "x"}'),
        (MISTRAL, '[TOOL_CALLS][{"name": "weather", "arguments": {"town": "Köln"}}]', " So."),
    ],
)
def test_where_calls_are_not_to_be_parallel_the_answer_ends_behind_the_first(
    on_loop, template, one, rest
):
    async def test(served):
        says = (
            [f"{one}{rest}", "Hm.", one] if template == LLAMA else [f"Hm {one}{rest}", "Hm.", one]
        )
        served.engine.says = says
        fields = asked(tools=TOOLS, parallel_tool_calls=False, n=3, seed=3)
        answer = await served.chat(**fields)
        first, plain, last = answer["choices"]
        for choice in (first, last):
            (call,) = choice["message"]["tool_calls"]
            assert json.loads(call["function"]["arguments"]) == {"town": "Köln"}
            assert choice["finish_reason"] == "tool_calls"
        assert plain["message"]["content"] == "Hm."
        assert answer["usage"]["completion_tokens"] == sum(
            len(text.removesuffix(rest).encode()) for text in says
        )
        assert len(served.engine.stopped) == 2
        streamed = merged(await served.events(PATH, fields))
        for choice in answer["choices"]:
            index, message = choice["index"], choice["message"]
            assert streamed[index]["tool_calls"] == message.get("tool_calls", [])
            assert (streamed[index]["content"] or "") == (message["content"] or "")
            assert streamed[index]["finish_reason"] == choice["finish_reason"]

    on_loop(test, template=template)


def test_an_answer_of_another_form_goes_on_behind_what_looks_like_a_call(on_loop):
    async def test(served):
        served.engine.says = ['{"a": "' + CALL.replace('"', "'").replace("\n", "") + '"}']
        form = {"structured_outputs": {"json_object": True}}
        answer = await served.chat(**asked(tools=TOOLS, parallel_tool_calls=False, **form))
        assert answer["choices"][0]["message"]["content"] == served.engine.says[0]

    on_loop(test, template=QWEN)
