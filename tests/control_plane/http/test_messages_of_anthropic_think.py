"""Thinking in `/v1/messages`: split off, handed back, and wished for."""

from __future__ import annotations

import pytest

from control_plane.http import anthropic_messages
from tests.control_plane.http.anthropic_calls import (
    HI,
    PATH,
    asked,
    error_of,
    message,
    prompt,
    told,
    without_ids,
)
from tests.control_plane.text.known_templates import HARMONY, QWEN

THOUGHT = "<think>\nRain?\n</think>\n\nHm."
TALK = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
SWITCH = TALK + "{{ '[' ~ enable_thinking ~ ']' if enable_thinking is defined }}"
EFFORT = TALK + "{{ '[' ~ reasoning_effort ~ ']' if reasoning_effort is defined }}"
OFF, ON, ADAPTIVE = (
    {"thinking": {"type": "disabled"}},
    {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    {"thinking": {"type": "adaptive"}},
)


def effort(word: str) -> dict:
    return {"output_config": {"effort": word}}


def test_what_the_model_thinks_is_a_block_of_its_own_with_a_signature(on_loop):
    async def test(served):
        served.engine.says = [THOUGHT]
        answer = await message(served)
        thought, said = answer["content"]
        assert (thought["type"], thought["thinking"], said["text"]) == ("thinking", "Rain?", "Hm.")
        assert thought["signature"]
        assert answer["usage"]["output_tokens_details"] == {"thinking_tokens": len("Rain?")}
        streamed = await told(served)
        assert streamed["content"][0]["signature"]
        assert without_ids(streamed) == without_ids(answer)

    on_loop(test, template=QWEN)


def test_the_signature_comes_behind_the_thinking_and_before_its_end(on_loop):
    async def test(served):
        served.engine.says = [THOUGHT]
        events = [event for _, event in await served.events(PATH, asked())]
        kinds = [event.get("delta", event).get("type", "") for event in events]
        at = kinds.index("signature_delta")
        assert kinds[at - 1 : at + 3] == [
            "thinking_delta", "signature_delta", "content_block_stop", "content_block_start",
        ]  # fmt: skip

    on_loop(test, template=QWEN)


def test_thinking_that_is_omitted_has_no_text(on_loop):
    async def test(served):
        served.engine.says = [THOUGHT]
        fields = {"thinking": {"type": "adaptive", "display": "omitted"}}
        for answer in (await message(served, **fields), await told(served, **fields)):
            thought, said = answer["content"]
            assert (thought["thinking"], said["text"]) == ("", "Hm.")
            assert thought["signature"]
            assert answer["usage"]["output_tokens_details"] == {"thinking_tokens": len("Rain?")}

    on_loop(test, template=QWEN)


def test_a_stream_is_pinged_while_what_comes_is_omitted(on_loop, monkeypatch):
    monkeypatch.setattr(anthropic_messages, "PING_AFTER_S", 0.01)

    async def test(served):
        served.engine.says = [f"<think>{'Rain? ' * 9}"]
        served.engine.hold = 9
        served.hub._loop.call_later(0.1, served.engine.go.set)
        fields = {"thinking": {"type": "adaptive", "display": "omitted"}}
        kinds = [name for name, _ in await served.events(PATH, asked(**fields, max_tokens=40))]
        first = kinds.index("content_block_start")
        assert kinds[first + 1 : first + 4] == ["ping"] * 3
        assert kinds[-1] == "message_stop"

    on_loop(test, template=QWEN)


def test_thinking_between_texts_is_a_block_between_them(on_loop):
    following = "<|end|><|start|>assistant<|channel|>"
    text = (
        f"<|channel|>commentary<|message|>I look.{following}analysis<|message|>Rain?{following}"
        "final<|message|>It rains."
    )

    async def test(served):
        served.engine.says = [text]
        for answer in (await message(served), await told(served)):
            assert [block.get("text") or block["thinking"] for block in answer["content"]] == [
                "I look.", "Rain?", "It rains.",
            ]  # fmt: skip

    on_loop(test, template=HARMONY, max_model_len=1000)


def test_what_was_thought_is_handed_back_to_templates_that_read_it(on_loop):
    thinking = {"type": "thinking", "thinking": "Rain?", "signature": "x"}
    result = {"type": "tool_result", "tool_use_id": "1", "content": "rain"}
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}}
    redacted = {"type": "redacted_thinking", "data": "abc"}

    async def test(served):
        conversation = [
            *HI,
            {"role": "assistant", "content": [
                redacted, thinking, {"type": "text", "text": "Hm."}, call]},
            {"role": "user", "content": [result]},
        ]  # fmt: skip
        seen = await prompt(
            served, messages=conversation, tools=[{"name": "f", "input_schema": {}}]
        )
        assert "<think>\nRain?\n</think>\n\nHm.\n<tool_call>" in seen
        # What is thought behind a call begins another message of the template's.
        more = [call, thinking, {"type": "text", "text": "So."}]
        conversation[1] = {"role": "assistant", "content": more}
        seen = await prompt(
            served, messages=conversation, tools=[{"name": "f", "input_schema": {}}]
        )
        assert seen.index("<tool_call>\n{") < seen.index("<think>\nRain?\n</think>\n\nSo.")

    on_loop(test, template=QWEN, max_model_len=2000)


def test_thinking_without_text_changes_nothing_when_it_is_handed_back(on_loop):
    omitted = {"type": "thinking", "thinking": "", "signature": "x"}
    first, second = {"type": "text", "text": "Hm."}, {"type": "text", "text": " So."}

    async def test(served):
        def turn(*blocks: dict) -> list[dict]:
            return [*HI, {"role": "assistant", "content": list(blocks)}, *HI]

        seen = await prompt(served, messages=turn(omitted, first, omitted, second, omitted))
        assert seen == await prompt(served, messages=turn(first, second))
        going_on = turn(first, omitted)[:-1]
        assert await prompt(served, messages=going_on) == await prompt(
            served, messages=turn(first)[:-1]
        )

    on_loop(test, template=QWEN, max_model_len=2000)


@pytest.mark.parametrize(
    ("template", "fields", "said"),
    [
        (SWITCH, {}, ""),
        (SWITCH, OFF, "[False]"),
        (SWITCH, ON, "[True]"),
        (SWITCH, ADAPTIVE, "[True]"),
        (SWITCH, effort("low"), ""),
        (SWITCH, OFF | effort("high"), "[False]"),
        (EFFORT, {}, ""),
        (EFFORT, ON, ""),
        (EFFORT, OFF, "[none]"),
        (EFFORT, OFF | effort("high"), "[none]"),
        (EFFORT, ADAPTIVE | effort("high"), "[high]"),
        (EFFORT, effort("max"), "[xhigh]"),
        (TALK, OFF, ""),
        (TALK, ON | effort("low"), ""),
    ],
)
def test_a_template_is_told_what_it_can_be_told_of_thinking(on_loop, template, fields, said):
    async def test(served):
        assert await prompt(served, **fields) == f"<user>Hi{said}"

    on_loop(test, template=template)


def test_what_is_said_twice_must_agree(on_loop):
    async def test(served):
        switched = {"chat_template_kwargs": {"enable_thinking": True}}
        assert await prompt(served, **ON, **switched) == "<user>Hi[True]"
        error = error_of(await served.post(PATH, asked(**OFF, **switched)))
        assert error["message"] == (
            "thinking is given, which chat_template_kwargs contradicts: its enable_thinking must "
            "be false or be left out"
        )

    on_loop(test, template=SWITCH)


def test_thinking_that_is_cut_off_is_a_block_that_ends(on_loop):
    async def test(served):
        served.engine.says = [THOUGHT]
        whole, streamed = await message(served, max_tokens=12), await told(served, max_tokens=12)
        (thought,) = whole["content"]
        assert (thought["thinking"], whole["stop_reason"]) == ("Rain", "max_tokens")
        assert without_ids(streamed) == without_ids(whole)

    on_loop(test, template=QWEN)
