"""Requests of Anthropic's Messages API to the application, and answers that are what it says."""

from __future__ import annotations

import json

import httpx

from control_plane.http.anthropic_answer_schema import AnsweredMessage
from control_plane.http.anthropic_errors import MessageErrorResponse
from tests.control_plane.http.conftest import MODEL, checked

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
HI = [{"role": "user", "content": "Hi"}]


def asked(**fields) -> dict:
    return {"model": MODEL, "messages": HI, "max_tokens": 250, **fields}


async def message(served, **fields) -> dict:
    return checked(await served.post(PATH, asked(**fields)), AnsweredMessage)


async def prompt(served, **fields) -> str:
    """What the model would see, as `count_tokens` counts it, too."""
    await message(served, **{"max_tokens": 1, **fields})
    tokens = served.engine.submitted[-1].input_tokens
    counted = {name: value for name, value in asked(**fields).items() if name != "max_tokens"}
    response = await served.post(COUNT, counted)
    assert response.json() == {"input_tokens": len(tokens)}, response.text
    return bytes(tokens).decode()


async def told(served, **fields) -> dict:
    """The message that a stream tells, each event where and in the order in which it has to be."""
    events = await served.events(PATH, asked(**fields))
    assert all(name == event["type"] for name, event in events)
    start, *rest, delta, stop = [event for name, event in events if name != "ping"]
    assert (start["type"], delta["type"], stop["type"]) == (
        "message_start", "message_delta", "message_stop",
    )  # fmt: skip
    begun = start["message"]
    assert (begun["content"], begun["stop_reason"], begun["stop_sequence"]) == ([], None, None)
    return {**begun, "content": blocks_of(rest), **delta["delta"], "usage": delta["usage"]}


def blocks_of(events: list[dict]) -> list[dict]:
    """The blocks of events, one behind the other."""
    blocks: list[dict] = []
    while events:
        start = events.pop(0)
        assert (start["type"], start["index"]) == ("content_block_start", len(blocks))
        block, arguments = start["content_block"], ""
        while events[0]["type"] == "content_block_delta":
            event = events.pop(0)
            assert event["index"] == len(blocks)
            kind = event["delta"].pop("type")
            ((name, value),) = event["delta"].items()
            assert value
            assert kind == {"partial_json": "input_json"}.get(name, name) + "_delta"
            if name == "partial_json":
                arguments += value
            else:
                block[name] += value
        if block["type"] == "tool_use":
            assert block["input"] == {}
            block["input"] = json.loads(arguments or "{}")
        assert events.pop(0) == {"type": "content_block_stop", "index": len(blocks)}
        blocks.append(block)
    return blocks


def error_of(response: httpx.Response, status: int = 400) -> dict:
    """The error of an answer that is no success, in Anthropic's shape."""
    assert response.status_code == status, response.text
    assert response.headers["request-id"] == response.headers["x-request-id"]
    MessageErrorResponse.model_validate_json(response.content, strict=True, extra="forbid")
    assert response.json()["request_id"] == response.headers["x-request-id"]
    return response.json()["error"]


def without_ids(answer: dict) -> dict:
    """An answer without what differs between two of the same."""
    content = [
        {name: value for name, value in block.items() if name not in ("id", "signature")}
        for block in answer["content"]
    ]
    return {**answer, "id": None, "content": content}
