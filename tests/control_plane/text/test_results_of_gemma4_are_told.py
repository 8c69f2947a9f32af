"""Results of calls reach Gemma 4's templates: the first ones know them in the calls' message."""

from __future__ import annotations

import pytest

from control_plane.text.answers.told_tools import ToldTools
from control_plane.text.chat_template import ChatTemplate
from tests.control_plane.text.gemma4_template import EARLIER_GEMMA4, GEMMA4
from tests.control_plane.text.known_templates import HARMONY, LLAMA, MISTRAL, QWEN
from tests.control_plane.text.test_tools_are_told_where_templates_have_no_place import (
    ASKED,
    TOOL,
    result,
)

NAMES = {"1": "f", "2": "g"}
CALLS = [
    {"id": call_id, "type": "function", "function": {"name": name, "arguments": {"x": 1}}}
    for call_id, name in NAMES.items()
]
CALLING = {"role": "assistant", "content": "", "tool_calls": CALLS}
SAID = {"role": "assistant", "content": "So."}
WRITTEN = (
    "<|turn>user\nHi<turn|>\n<|turn>model\n"
    + "".join(f"<|tool_call>call:{name}{{x:1}}<tool_call|>" for name in NAMES.values())
    + "".join(
        f'<|tool_response>response:{name}{{value:<|"|>r{call_id}<|"|>}}<tool_response|>'
        for call_id, name in NAMES.items()
    )
)
RESULTS = [result(f"r{call_id}", call_id) for call_id in NAMES]


def rewritten(source, messages) -> list:
    return list(ToldTools(ChatTemplate(source), "gemma4").rewritten(messages, [TOOL]).messages)


@pytest.mark.parametrize("source", [GEMMA4, EARLIER_GEMMA4], ids=["now", "earlier"])
def test_results_stand_behind_their_calls_and_the_turn_goes_on(source):
    for behind, expected in (([], ""), ([SAID, ASKED], "So.<turn|>\n<|turn>user\nHi<turn|>\n")):
        messages = rewritten(source, [ASKED, CALLING, *RESULTS, *behind])
        if source == GEMMA4:
            assert messages == [ASKED, CALLING, *RESULTS, *behind]
            continue
        text = ChatTemplate(source).render(messages, add_generation_prompt=False)
        assert text == WRITTEN + expected


def test_results_that_have_no_call_or_no_name_are_told_too():
    responses = [{"name": "n", "response": "a"}, {"name": "unknown", "response": ""}]
    results = [{**result("a", "?"), "name": "n"}, {"role": "tool", "content": None}]
    given = [result("first"), ASKED, {**CALLING, "content": "Well."}, *results, SAID, CALLING, SAID]
    assert rewritten(EARLIER_GEMMA4, given) == [
        result("first"),
        ASKED,
        {**CALLING, "content": "Well.", "tool_responses": responses},
        SAID,
        CALLING,
        SAID,
    ]


@pytest.mark.parametrize("source", [GEMMA4, QWEN, LLAMA, MISTRAL, HARMONY])
def test_templates_that_know_results_as_messages_get_them_so(source):
    assert not ChatTemplate(source).tool_places.results_in_calls


def test_many_results_take_no_longer_than_their_text():
    results = [result("x", "1")] * 20_000
    messages = rewritten(EARLIER_GEMMA4, [ASKED, CALLING, *results])
    assert len(messages) == 2
    assert len(messages[1]["tool_responses"]) == 20_000
