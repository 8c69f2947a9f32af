"""`/v1/messages`: what is said, whole and streamed, how it ends, and what it took."""

from __future__ import annotations

import pytest

from control_plane.http import anthropic_messages
from tests.control_plane.http.anthropic_calls import (
    COUNT,
    HI,
    PATH,
    asked,
    message,
    prompt,
    told,
    without_ids,
)
from tests.control_plane.http.conftest import MODEL, answer_to

ANSWER = answer_to("<user>Hi</><assistant>")


def user(*blocks: dict) -> dict:
    return {"role": "user", "content": list(blocks)}


def text(said: str, **fields) -> dict:
    return {"type": "text", "text": said, **fields}


def test_a_message_has_one_block_of_text(on_loop):
    async def test(served):
        answer = await message(served)
        assert answer["id"].startswith("msg_")
        assert (answer["role"], answer["model"]) == ("assistant", MODEL)
        assert answer["content"] == [{"type": "text", "text": ANSWER, "citations": None}]
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)

    on_loop(test)


@pytest.mark.parametrize(
    "fields",
    [{}, {"max_tokens": 5}, {"stop_sequences": ["si"]}, {"stop_sequences": ["x", "漢"]}],
)
def test_a_stream_tells_the_same_message(on_loop, fields):
    async def test(served):
        whole, streamed = await message(served, **fields), await told(served, **fields)
        assert without_ids(streamed) == without_ids(whole)

    on_loop(test)


def test_text_comes_as_it_is_written_and_a_ping_before_it(on_loop):
    async def test(served):
        events = [event for _, event in await served.events(PATH, asked(max_tokens=3))]
        assert [event["type"] for event in events] == [
            "message_start", "ping", "content_block_start", *["content_block_delta"] * 3,
            "content_block_stop", "message_delta", "message_stop",
        ]  # fmt: skip
        assert [event["delta"]["text"] for event in events[3:6]] == [*ANSWER[:3]]

    on_loop(test)


def test_a_stream_in_which_nothing_comes_for_long_is_pinged(on_loop, monkeypatch):
    monkeypatch.setattr(anthropic_messages, "PING_AFTER_S", 0.01)

    async def test(served):
        served.engine.hold = 1
        served.hub._loop.call_later(0.1, served.engine.go.set)
        kinds = [name for name, _ in await served.events(PATH, asked(max_tokens=3))]
        first = kinds.index("content_block_delta")
        assert kinds[first + 1 : first + 4] == ["ping"] * 3
        assert kinds[-1] == "message_stop"

    on_loop(test)


def test_an_answer_without_text_has_no_blocks(on_loop):
    async def test(served):
        served.engine.says = [""]
        whole = await message(served)
        assert (whole["content"], whole["stop_reason"]) == ([], "end_turn")
        assert without_ids(await told(served)) == without_ids(whole)

    on_loop(test)


def test_it_says_which_stop_sequence_ended_the_answer(on_loop):
    async def test(served):
        answer = await message(served, stop_sequences=["xx", "iss", "ssa"])
        assert answer["content"][0]["text"] == ">tnats"
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "iss")

    on_loop(test)


def test_max_tokens_ends_an_answer_and_so_does_the_end_of_the_context(on_loop):
    async def test(served):
        answer = await message(served, max_tokens=4)
        assert (answer["content"][0]["text"], answer["stop_reason"]) == (ANSWER[:4], "max_tokens")
        assert answer["usage"]["output_tokens"] == 4
        served.engine.says = ["x" * 200]
        answer = await message(served, max_tokens=100_000)
        assert answer["stop_reason"] == "model_context_window_exceeded"
        assert answer["usage"]["output_tokens"] == 128 - len("<user>Hi</><assistant>")
        # It would have ended at its own limit, too.
        room = 128 - len("<user>Hi</><assistant>")
        assert (await message(served, max_tokens=room))["stop_reason"] == "max_tokens"

    on_loop(test, max_model_len=128)


def test_tokens_that_were_found_computed_are_no_input_tokens(on_loop):
    async def test(served):
        num_tokens = len("<user>Hi</><assistant>")
        for answer in (await message(served), await told(served)):
            assert answer["usage"] == {
                "input_tokens": num_tokens - 2, "cache_read_input_tokens": 2,
                "cache_creation_input_tokens": 0, "output_tokens": len(ANSWER.encode()),
                "output_tokens_details": {"thinking_tokens": 0},
            }  # fmt: skip
        events = await served.events(PATH, asked())
        begun = events[0][1]["message"]["usage"]
        assert (begun["input_tokens"], begun["cache_read_input_tokens"]) == (num_tokens, 0)

    on_loop(test)


@pytest.mark.parametrize(
    ("fields", "seen"),
    [
        ({"system": "Be kind."}, "<system>Be kind.</><user>Hi</><assistant>"),
        (
            {"system": [text("Be kind. "), text("Be brief.", cache_control={"type": "ephemeral"})]},
            "<system>Be kind. Be brief.</><user>Hi</><assistant>",
        ),
        ({"system": ""}, "<user>Hi</><assistant>"),
        ({"messages": [user(text("a"), text("b"))]}, "<user>ab</><assistant>"),
        ({"messages": [*HI, user(text("there"))]}, "<user>Hi\n\nthere</><assistant>"),
        (
            {"messages": [*HI, {"role": "assistant", "content": "Oh."}, *HI]},
            "<user>Hi</><assistant>Oh.</><user>Hi</><assistant>",
        ),
        (
            {"messages": [*HI, {"role": "system", "content": [text("Now.")]}, *HI]},
            "<user>Hi</><system>Now.</><user>Hi</><assistant>",
        ),
        (
            {"messages": [*HI, {"role": "assistant", "content": [text("I s"), text("ay")]}]},
            "<user>Hi</><assistant>I say",
        ),
        ({"tools": [{"name": "f", "input_schema": {}}]}, "<tool>f</tool><user>Hi</><assistant>"),
        (
            {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "none"}},
            "<user>Hi</><assistant>",
        ),
    ],
)
def test_the_model_sees_what_was_said_and_its_tokens_are_counted(on_loop, fields, seen):
    async def test(served):
        assert await prompt(served, **fields) == seen

    on_loop(test)


def test_counting_makes_no_message(on_loop):
    async def test(served):
        response = await served.post(COUNT, {"model": MODEL, "messages": HI})
        assert (response.status_code, response.json()) == (200, {"input_tokens": 22})
        assert served.engine.submitted == []

    on_loop(test)


def test_sampling_is_what_was_asked_for(on_loop):
    async def test(served):
        await message(served, temperature=0.5, top_p=0.25, top_k=7, seed=3, stop_sequences=["a"])
        params = served.engine.submitted[-1].params
        assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.25, 7)
        assert (params.seed, params.stop) == (3, ("a",))
        await message(served)
        params = served.engine.submitted[-1].params
        assert (params.temperature, params.top_p, params.top_k, params.stop) == (1.0, 1.0, 0, ())

    on_loop(test)


def test_an_answer_keeps_to_the_schema_of_its_format(on_loop):
    async def test(served):
        served.engine.says = ["{}"]
        schema = {"type": "object", "properties": {}}
        await message(served, output_config={"format": {"type": "json_schema", "schema": schema}})
        form = served.engine.submitted[-1].params.structured_outputs
        assert (form.kind, form.name) == ("json", "output_config.format")

    on_loop(test)


def test_what_anthropics_clients_send_besides_changes_nothing(on_loop):
    everything = {"type": "all"}

    async def test(served):
        plain = without_ids(await message(served))
        cached = {"type": "ephemeral", "ttl": "1h"}
        fields = asked(
            messages=[user(text("Hi", cache_control=cached, citations=None))],
            metadata={"user_id": "me", "other": None}, service_tier="auto", cache_control=cached,
            context_management={"edits": [
                {"type": "clear_thinking_20251015", "keep": kept} for kept in ("all", everything)
            ]},
            container=None, speed="standard",
        )  # fmt: skip
        headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a-2025-01-01,b"}
        response = await served.post(f"{PATH}?beta=true", fields, **headers)
        assert without_ids(response.json()) == plain

    on_loop(test)
