"""Messages, reasoning and calls of responses, whole and as events."""

from __future__ import annotations

import json

import pytest

from control_plane.core.request import FinishReason
from control_plane.errors import ComputeUnavailableError
from tests.control_plane.text.known_templates import HARMONY, LLAMA, MISTRAL, QWEN

PATH = "/v1/responses"
LOGPROBS = ["message.output_text.logprobs"]
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"town": "Köln"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "tides", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nRain?\n</think>\n\n"
TEXT_OF = {"message": "text", "reasoning": "text", "function_call": "arguments"}
NAME_OF = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}


def asked(**fields) -> dict:
    return {"max_output_tokens": 250, "tools": [TOOL], "seed": 3, **fields}


def without_ids(items: list[dict]) -> list[dict]:
    return [{name: value for name, value in item.items() if name != "id"} for item in items]


def told_in(events) -> list[dict]:
    """The items that a stream tells, each event where and in the order in which it has to be."""
    rest = [data for _, data in events[2:-1]]
    items = []
    while rest:
        added = rest.pop(0)
        item, place = added["item"], {"output_index": len(items)}
        assert (added["type"], added["output_index"]) == ("response.output_item.added", len(items))
        assert item["status"] == "in_progress"
        place["item_id"], name = item["id"], NAME_OF[item["type"]]
        key, has_parts = TEXT_OF[item["type"]], item["type"] != "function_call"
        text, entries = item.get("arguments", ""), []
        if has_parts:
            assert item["content"] == []
            place["content_index"] = 0
            part = expect(rest, "response.content_part.added", place)["part"]
            assert (part["text"], part.get("logprobs", [])) == ("", [])
        while rest[0]["type"] == f"{name}.delta":
            delta = expect(rest, f"{name}.delta", place)
            assert delta["delta"] or delta.get("logprobs")
            text += delta["delta"]
            entries += delta.get("logprobs", [])
        done = expect(rest, f"{name}.done", place)
        assert (done[key], done.get("logprobs", [])) == (text, entries)
        if has_parts:
            part = expect(rest, "response.content_part.done", place)["part"]
            assert (part["text"], part.get("logprobs", [])) == (text, entries)
        last = rest.pop(0)
        assert (last["type"], last["output_index"]) == ("response.output_item.done", len(items))
        whole = last["item"]
        assert (whole["id"], whole["type"]) == (item["id"], item["type"])
        assert (whole["content"] == [part]) if has_parts else (whole["arguments"] == text)
        items.append(whole)
    return items


def expect(rest: list[dict], kind: str, place: dict) -> dict:
    event = rest.pop(0)
    assert event["type"] == kind
    assert {name: event[name] for name in place} == place
    return event


def test_reasoning_text_and_calls_are_items_in_their_order(on_loop):
    async def test(served):
        served.engine.says = [f"{THOUGHT}Let me see.\n{CALL}\nAnd then {OTHER}"]
        answer = await served.respond("Hi", **asked())
        thought, said, call, more, other = without_ids(answer["output"])
        assert answer["status"] == "completed"
        assert thought == {
            "type": "reasoning", "status": "completed", "summary": [],
            "content": [{"type": "reasoning_text", "text": "Rain?"}],
        }  # fmt: skip
        assert (said["content"][0]["text"], more["content"][0]["text"]) == (
            "Let me see.", "\nAnd then",
        )  # fmt: skip
        call_id = call.pop("call_id")
        assert call == {
            "type": "function_call", "status": "completed", "name": "weather",
            "arguments": '{"town": "Köln"}',
        }  # fmt: skip
        assert (other["name"], other["arguments"]) == ("tides", "{}")
        assert len({item["id"] for item in answer["output"]}) == 5
        assert call_id != other["call_id"]
        assert answer["tools"] == [TOOL | {"description": None, "strict": False}]
        assert (answer["tool_choice"], answer["parallel_tool_calls"]) == ("auto", True)
        assert answer["usage"]["output_tokens"] == len(served.engine.says[0].encode())
        assert answer["usage"]["output_tokens_details"] == {"reasoning_tokens": len("Rain?")}
        events = await served.events(PATH, {"input": "Hi", **asked()})
        assert events[-1][1]["response"]["usage"] == answer["usage"]

    on_loop(test, template=QWEN)


@pytest.mark.parametrize("logprobs", [None, LOGPROBS])
def test_reasoning_between_messages_is_an_item_of_its_own(on_loop, logprobs):
    """Of an answer in channels, whole and as events; tokens go with the message behind them."""
    following = "<|end|><|start|>assistant<|channel|>"
    text = (
        f"<|channel|>commentary<|message|>I look.{following}analysis<|message|>Rain?{following}"
        "final<|message|>It rains."
    )

    async def test(served):
        served.engine.says = [text]
        fields = asked(tools=[], include=logprobs, max_output_tokens=len(text))
        answer = await served.respond("Hi", **fields)
        streamed = told_in(await served.events(PATH, {"input": "Hi", **fields}))
        for items in (answer["output"], streamed):
            assert [(item["type"], item["content"][0]["text"]) for item in items] == [
                ("message", "I look."), ("reasoning", "Rain?"), ("message", "It rains."),
            ]  # fmt: skip
            entries = [len(item["content"][0].get("logprobs", [])) for item in items]
            assert sum(entries) == (len(text) if logprobs else 0)

    on_loop(test, template=HARMONY, max_model_len=1000)


def test_reasoning_behind_a_call_is_no_part_of_its_arguments(on_loop):
    call = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    text = f'{call}{{"x": 1}}<|call|><|start|>assistant<|channel|>analysis<|message|>Rain?'

    async def test(served):
        served.engine.says = [text]
        items = told_in(await served.events(PATH, {"input": "Hi", **asked()}))
        assert [item["type"] for item in items] == ["function_call", "reasoning"]
        assert (items[0]["arguments"], items[0]["status"]) == ('{"x": 1}', "completed")

    on_loop(test, template=HARMONY, max_model_len=1000)


def test_the_events_of_each_item_come_in_openais_order(on_loop):
    async def test(served):
        served.engine.says = [f"{THOUGHT}Hm.\n{CALL}"]
        events = await served.events(PATH, {"input": "Hi", **asked()})
        assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
        assert all(name == data["type"] for name, data in events)
        kinds = [name for name, _ in events]
        told = [kind for at, kind in enumerate(kinds) if kind != kinds[at - 1]]
        assert told == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.reasoning_text.delta",
            "response.reasoning_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ]
        # Arguments come while they are written.
        num_deltas = sum(kind == "response.function_call_arguments.delta" for kind in kinds)
        assert num_deltas == len('{"town": "Köln"}')
        for at in (0, 1):
            begun = events[at][1]["response"]
            assert (begun["status"], begun["output"], begun["usage"]) == ("in_progress", [], None)

    on_loop(test, template=QWEN)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (QWEN, [
            f"{THOUGHT}Well:\n{CALL}\n{OTHER}", f"{THOUGHT}Hi <b>", CALL, "", "<tool_cal",
            f"{CALL} then {OTHER} and {CALL}{CALL}.", f"{THOUGHT}", "<think>hm", f"Hm {CALL[:40]}",
        ]),
        (LLAMA, [
            '{"name": "weather", "parameters": {"town": "Köln"}}', "Hi {", '{"name": "x"}', " ",
        ]),
        (MISTRAL, [
            '[TOOL_CALLS] [{"name": "weather", "arguments": {"town": "Köln"}}]', "[TOOL]",
            "Hm [TOOL_CALLS]weather[ARGS]{}[TOOL_CALLS]tides[ARGS]{} so",
        ]),
    ],
)  # fmt: skip
def test_a_stream_of_items_equals_the_whole(on_loop, template, says):
    async def test(served):
        fields = asked(max_output_tokens=170 if template == LLAMA else 250)
        for text in says:
            served.engine.says = [text]
            whole = await served.respond("Hi", **fields)
            events = await served.events(PATH, {"input": "Hi", **fields})
            final = events[-1][1]["response"]
            assert told_in(events) == final["output"], text
            assert without_ids(final["output"]) == without_ids(whole["output"])
            assert (final["status"], final["usage"]) == (whole["status"], whole["usage"])
            assert final["tools"] == whole["tools"]

    on_loop(test, template=template)


@pytest.mark.parametrize(
    ("says", "length", "stop", "status", "items"),
    [
        (f"{THOUGHT}Hi", 10, None, "incomplete", [("reasoning", "incomplete")]),
        (f"{THOUGHT}Hi, you", 28, None, "incomplete",
         [("reasoning", "completed"), ("message", "incomplete")]),
        (f"Hm {CALL}", 50, None, "incomplete",
         [("message", "completed"), ("function_call", "incomplete")]),
        (CALL, CALL.encode().index(b"}") + 1, None, "incomplete", [("function_call", "completed")]),
        (CALL, 250, "ln", "completed", [("function_call", "incomplete")]),
        ("Hi, you", 250, "yo", "completed", [("message", "completed")]),
        ("", 250, None, "completed", [("message", "completed")]),
    ],
)  # fmt: skip
def test_what_was_cut_off_says_so(on_loop, says, length, stop, status, items):
    async def test(served):
        served.engine.says = [says]
        fields = asked(max_output_tokens=length, stop=stop)
        answer = await served.respond("Hi", **fields)
        assert answer["status"] == status
        assert [(item["type"], item["status"]) for item in answer["output"]] == items
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        assert answer["incomplete_details"] == reason
        events = await served.events(PATH, {"input": "Hi", **fields})
        assert events[-1][0] == f"response.{status}"
        assert without_ids(told_in(events)) == without_ids(answer["output"])

    on_loop(test, template=QWEN)


def test_a_failure_leaves_the_item_that_was_being_written_incomplete(on_loop):
    async def test(served):
        served.engine.says = [f"Hm {CALL}"]
        served.engine.hold, served.engine.error = 55, ComputeUnavailableError("it is away")
        events = await served.events(PATH, {"input": "Hi", **asked()})
        assert events[-1][0] == "response.failed"
        said, call = events[-1][1]["response"]["output"]
        assert (said["status"], call["status"]) == ("completed", "incomplete")
        assert '{"town": "Köln"}'.startswith(call["arguments"])
        served.engine.hold, served.engine.error = 0, None
        served.engine.end_reason = FinishReason.CANCELLED
        events = await served.events(PATH, {"input": "Hi", **asked()})
        assert [name for name, _ in events] == [
            "response.created", "response.in_progress", "response.failed",
        ]  # fmt: skip
        assert events[-1][1]["response"]["output"] == []

    on_loop(test, template=QWEN)


def test_a_failure_behind_a_call_that_is_whole_leaves_it_completed(on_loop):
    async def test(served):
        served.engine.says = [f"{CALL}\n"]
        served.engine.hold = len(CALL.encode()) + 1
        served.engine.error = ComputeUnavailableError("it is away")
        events = await served.events(PATH, {"input": "Hi", **asked()})
        assert events[-1][0] == "response.failed"
        (call,) = events[-1][1]["response"]["output"]
        assert (call["status"], json.loads(call["arguments"])) == ("completed", {"town": "Köln"})

    on_loop(test, template=QWEN)


def test_without_tools_or_where_none_may_be_called_calls_are_text(on_loop):
    async def test(served):
        served.engine.says = [CALL]
        for fields in ({"tools": None}, {"tool_choice": "none"}, {"tools": []}):
            answer = await served.respond("Hi", **asked(**fields))
            (message,) = answer["output"]
            assert message["content"][0]["text"] == CALL
            assert answer["tool_choice"] == fields.get("tool_choice", "auto")

    on_loop(test, template=QWEN)


def test_of_calls_that_are_not_to_be_parallel_the_first_counts(on_loop):
    async def test(served):
        served.engine.says = [CALL + OTHER]
        answer = await served.respond("Hi", **asked(parallel_tool_calls=False))
        (call,) = answer["output"]
        assert (call["name"], answer["parallel_tool_calls"]) == ("weather", False)

    on_loop(test, template=QWEN)


@pytest.mark.parametrize("says", [f"{THOUGHT}Hi é", "Hi", "", "<think>hm", [258, 258]])
def test_log_probabilities_of_all_tokens_go_with_the_message(on_loop, says):
    async def test(served):
        served.engine.says = [says]
        fields = asked(include=LOGPROBS, top_logprobs=1, tool_choice="none")
        answer = await served.respond("Hi", **fields)
        item = answer["output"][-1]
        if item["type"] == "message":  # thoughts have no place for them
            num_entries = len(item["content"][0]["logprobs"])
            assert num_entries == len(says.encode() if isinstance(says, str) else says)
        events = await served.events(PATH, {"input": "Hi", **fields})
        assert without_ids(told_in(events)) == without_ids(answer["output"])

    on_loop(test, template=QWEN)
