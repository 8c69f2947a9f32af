"""Templates built like those of models in use render as transformers renders them, switches too.

They are in `known_templates`.
"""

from __future__ import annotations

import pytest

from control_plane.text.chat_template import ChatTemplate
from planes.errors import TokenizationError
from tests.control_plane.text.known_templates import LLAMA, MARKED, MISTRAL, QWEN

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "How it is outside, <now>",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
    },
}
PLAIN = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "你好 & goodbye?"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHi."},
    {"role": "user", "content": "And now?"},
]
CALLING = [
    {"role": "user", "content": "Weather in Köln?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "abcdefghi",
                "type": "function",
                "function": {"name": "weather", "arguments": {"town": "Köln", "days": 2}},
            }
        ],
    },
    {"role": "tool", "content": '{"sky": "blue"}', "tool_call_id": "abcdefghi"},
]


def theirs(source, messages, **arguments):
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template([messages], chat_template=source, **arguments)
    return rendered[0]


@pytest.mark.spread(24)
@pytest.mark.parametrize("messages", [PLAIN, CALLING, PLAIN[1:2]], ids=["plain", "calling", "one"])
@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["no tools", "tools"])
@pytest.mark.parametrize(
    ("source", "variables"),
    [
        (LLAMA, {}),
        (LLAMA, {"date_string": "26 Jul 2024", "tools_in_user_message": False}),
        (LLAMA, {"builtin_tools": ["brave_search", "code_interpreter"]}),
        (LLAMA, {"custom_tools": [{"name": "g"}]}),
        (QWEN, {}),
        (QWEN, {"enable_thinking": False}),
        (QWEN, {"enable_thinking": True}),
        (MISTRAL, {}),
        (MARKED, {}),
        (MARKED, {"documents": [{"title": "T", "text": "a < b"}], "suffix": "!"}),
    ],
)
def test_it_reads_as_transformers_writes_it(source, variables, tools, messages):
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    for opens in (True, False):
        ours = ChatTemplate(source, **names).render(
            messages, add_generation_prompt=opens, tools=tools, variables=variables
        )
        assert ours == theirs(
            source, messages, add_generation_prompt=opens, tools=tools, **names, **variables
        )


@pytest.mark.parametrize(
    ("source", "names"),
    [
        (LLAMA, {"custom_tools", "tools_in_user_message", "date_string", "builtin_tools"}),
        (QWEN, {"enable_thinking"}),
        (MARKED, {"documents", "suffix"}),
    ],
)
def test_the_switches_of_a_template_are_known_by_name(source, names):
    known = ChatTemplate(source).variables
    assert names <= known
    # What it sets in one branch only may be set from outside where that branch is not taken.
    assert known - names <= {
        "system_message",
        "first_user_message",
        "tool_call",
        "reasoning_content",
    }


def test_qwen_is_told_not_to_think():
    text = ChatTemplate(QWEN).render(PLAIN[1:2], variables={"enable_thinking": False})
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert "<think>" not in ChatTemplate(QWEN).render(PLAIN[1:2])


@pytest.mark.parametrize(
    ("source", "messages", "said"),
    [
        (LLAMA, [{"role": "system", "content": "x"}], "no first user message"),
        (MISTRAL, PLAIN[1:2] * 2, "roles must alternate"),
    ],
)
def test_what_a_template_refuses_is_told_in_its_words(source, messages, said):
    with pytest.raises(TokenizationError, match=said):
        ChatTemplate(source).render(messages, tools=[TOOL])
