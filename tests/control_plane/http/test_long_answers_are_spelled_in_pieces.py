"""Answers of many log-probabilities, tokens or choices hold nobody up, and have an end."""

from __future__ import annotations

import asyncio
import json
from typing import NamedTuple

import pytest

from control_plane.api.answer_size import MAX_HELD_LOGPROBS, AnswerSize
from control_plane.core.generation_params import GenerationParams
from control_plane.http import json_text
from control_plane.http.json_text import MEMBERS_AT_ONCE, Spelled, SpelledList, pieces_of
from planes.errors import ValidationError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = "x" * 400


@pytest.fixture
def spelled(monkeypatch):
    """How many members the lists had that were spelled in one call, and as few turns of others."""
    sizes: list[int] = []
    real = json_text.to_json

    def counted(value):
        if isinstance(value, list):
            sizes.append(len(value))
        return real(value)

    monkeypatch.setattr(json_text, "to_json", counted)
    return sizes


@pytest.mark.parametrize("stream", [False, True])
def test_the_logprobs_of_an_echo_are_spelled_once_and_a_little_at_a_time(on_loop, spelled, stream):
    async def test(served):
        body = {"prompt": LONG, "n": 5, "echo": True, "logprobs": 2, "max_tokens": 2}
        if stream:
            events = await served.events(COMPLETIONS, body)
            echoes = [
                data["choices"][0] for _, data in events[:-1] if data["choices"][0]["text"] == LONG
            ]
            assert [len(echo["logprobs"]["tokens"]) for echo in echoes] == [400] * 5
        else:
            answer = await served.complete(**body)
            assert [len(c["logprobs"]["tokens"]) for c in answer["choices"]] == [402] * 5
        assert max(spelled) <= MEMBERS_AT_ONCE
        num_lists = 4 * -(-400 // MEMBERS_AT_ONCE)  # of one prompt, not of five samples
        assert sum(size == MEMBERS_AT_ONCE for size in spelled) <= num_lists

    on_loop(test)


def test_many_tokens_are_named_a_little_at_a_time(on_loop, spelled, monkeypatch):
    monkeypatch.setattr("control_plane.http.text_routes.TOKENS_AT_ONCE", 64)

    async def test(served):
        body = {"prompt": LONG, "return_token_strs": True}
        answer = (await served.post("/tokenize", body)).json()
        assert (answer["count"], answer["tokens"]) == (400, [120] * 400)
        assert answer["token_strs"] == ["x"] * 400
        assert max(spelled) == 64

    on_loop(test)


def test_others_have_their_turns_between_the_prompts_of_one_request(on_loop):
    async def test(served):
        most = num_before = 0

        def look() -> None:
            nonlocal most, num_before
            num_now = len(served.engine.submitted)
            most, num_before = max(most, num_now - num_before), num_now
            loop.call_soon(look)

        loop = asyncio.get_running_loop()
        loop.call_soon(look)
        await served.complete(["a"] * 50, max_tokens=1)
        assert most == 1

    on_loop(test)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"prompt": LONG, "n": 128, "logprobs": 20, "echo": True}, "logprobs"),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "n": 128, "max_tokens": 450,
                "logprobs": True, "top_logprobs": 20}, "top_logprobs"),
    ],
)  # fmt: skip
def test_more_logprobs_than_are_held_are_refused_unless_they_are_streamed(
    on_loop, path, fields, param
):
    async def test(served):
        error = await served.error(path, {"model": "tiny/bytes", **fields})
        assert error["param"] == param
        assert f"at most {MAX_HELD_LOGPROBS} log-probabilities" in error["message"]
        assert "or stream them" in error["message"]
        assert len(served.engine.cancelled) == len(served.engine.submitted)
        assert len(await served.events(path, {**fields, "max_tokens": 1})) > 128

    on_loop(test)


class Asked(NamedTuple):
    params: GenerationParams
    num_prompt_tokens: int


def test_one_sample_of_the_whole_length_may_always_have_all_logprobs():
    for length in (2048, 1 << 20):
        params = GenerationParams(max_tokens=length - 1, num_logprobs=20, num_prompt_logprobs=20)
        AnswerSize(length, num_samples=1).add(Asked(params, 1))
    two = AnswerSize(length, num_samples=2)
    with pytest.raises(ValidationError):
        two.add(Asked(params, 1))


def test_prompts_of_one_answer_are_counted_together_streamed_or_not():
    params = GenerationParams(max_tokens=1, n=128, num_logprobs=20, num_prompt_logprobs=20)
    size = AnswerSize(2048, num_samples=0)
    for _ in range(24):
        size.add(Asked(params, 2000))
    with pytest.raises(ValidationError, match="or samples") as refused:
        size.add(Asked(params, 2000))
    assert "stream" not in refused.value.message
    AnswerSize(2048, num_samples=0).add(Asked(params, 2000))


def test_what_is_spelled_in_pieces_is_what_it_would_be_at_once():
    one, other, empty = SpelledList(), SpelledList(), SpelledList()
    one.extend([1, "é"])
    one.extend([])
    one.extend([{"a": None}])
    other.extend(["]", [2]])
    value = {
        "": one.joined(empty, other), "none": empty.joined(), "one": other.joined(),
        "deep": [{"x": other.joined(), "y": {}}, {"z": []}], "list": [1, [2]], "a": True,
    }  # fmt: skip
    plain = {
        "": [1, "é", {"a": None}, "]", [2]], "none": [], "one": ["]", [2]],
        "deep": [{"x": ["]", [2]], "y": {}}, {"z": []}], "list": [1, [2]], "a": True,
    }  # fmt: skip
    assert json.loads(b"".join(pieces_of(value))) == plain
    assert b"".join(pieces_of(Spelled([b"1", b"2"]))) == b"12"


def test_a_long_answer_is_written_in_pieces_and_whole(on_port):
    async def test(port):
        client = await port.connect(b"GET /long HTTP/1.1\r\nHost: x\r\n\r\n")
        status, headers, data = await client.answer()
        assert (status, headers["content-type"]) == (200, "application/json")
        assert json.loads(data) == {"list": ["é" * 1000] * 3000, "end": 1}
        assert await client.ask() == 200

    on_port(test)
