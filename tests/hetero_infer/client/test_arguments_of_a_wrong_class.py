"""What is no prompt, message or parameter is refused by name, by both clients, before a call."""

from __future__ import annotations

import array
import asyncio
import inspect

import numpy as np
import pytest

from hetero_infer import (
    AsyncClient,
    ChatRequest,
    Client,
    EngineError,
    GenerationParams,
    Message,
    TextRequest,
    ValidationError,
)

NOWHERE = "127.0.0.1:1"
HI = [{"role": "user", "content": "hi"}]

WRONG = [
    ("generate", (b"hi",), {}, "prompt"),
    ("generate", (bytearray(b"hi"),), {}, "prompt"),
    ("generate", (memoryview(b"hi"),), {}, "prompt"),
    ("generate", (5,), {}, "prompt"),
    ("generate", (None,), {}, "prompt"),
    ("generate", ({1: 2},), {}, "prompt"),
    ("generate", ({1, 2},), {}, "prompt"),
    ("generate", ([1.5],), {}, "prompt"),
    ("generate", (["a"],), {}, "prompt"),
    ("generate", ("hi", {"max_tokens": 5}), {}, "params"),
    ("generate", ("hi", 5), {}, "params"),
    ("generate", ("hi",), {"priority": "high"}, "priority"),
    ("generate", ("hi",), {"priority": 1.0}, "priority"),
    ("generate", ("hi",), {"cache_salt": b"x"}, "cache_salt"),
    ("generate", ("hi",), {"model": 5}, "model"),
    ("generate", ("hi",), {"timeout_s": "5"}, "timeout_s"),
    ("chat", ("hi",), {}, "messages"),
    ("chat", (HI[0],), {}, "messages"),
    ("chat", (None,), {}, "messages"),
    ("chat", (5,), {}, "messages"),
    ("chat", (iter(HI),), {}, "messages"),
    ("chat", (HI, "x"), {}, "params"),
    ("chat", (HI,), {"tools": None}, "tools"),
    ("chat", ([Message("user", b"hi")],), {}, "messages[0]"),
    ("chat", (HI,), {"chat_template_kwargs": "{}"}, "chat_template_kwargs"),
    ("chat", (HI,), {"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    ("chat", (HI,), {"chat_template_kwargs": {1: 2}}, "chat_template_kwargs"),
    ("chat", (HI,), {"chat_template_kwargs": {"x": {1}}}, "chat_template_kwargs"),
    ("chat", (HI,), {"chat_template_kwargs": {"x": float("inf")}}, "chat_template_kwargs"),
    ("tokenize", (b"hi",), {}, "text"),
    ("tokenize", (5,), {}, "text"),
    ("tokenize", ("hi",), {"add_special_tokens": "no"}, "add_special_tokens"),
    ("tokenize", ("hi",), {"timeout_s": []}, "timeout_s"),
    ("detokenize", (b"hi",), {}, "token_ids"),
    ("detokenize", ("hi",), {}, "token_ids"),
    ("detokenize", (5,), {}, "token_ids"),
    ("detokenize", ([-1],), {}, "token_ids"),
    ("detokenize", ([1],), {"skip_special_tokens": 0}, "skip_special_tokens"),
    ("apply_chat_template", ("hi",), {}, "messages"),
    ("apply_chat_template", (HI,), {"chat_template_kwargs": 5}, "chat_template_kwargs"),
    ("apply_chat_template", (HI,), {"add_generation_prompt": "x"}, "add_generation_prompt"),
    ("model_info", (5,), {}, "model"),
    ("model_info", (b"x",), {}, "model"),
    ("abort", (5,), {}, "request_id"),
    ("list_requests", (), {"include_ended": "x"}, "include_ended"),
    ("stream", (b"hi",), {}, "prompt"),
    ("stream", ("hi", 5), {}, "params"),
    ("stream", ("hi", 5), {"resume": True}, "params"),
    ("stream", ("hi",), {"patience_s": "x"}, "patience_s"),
    ("stream", ("hi",), {"timeout_s": "x"}, "timeout_s"),
    ("chat_stream", (5,), {}, "messages"),
    ("chat_stream", (HI,), {"chat_template_kwargs": 5}, "chat_template_kwargs"),
    ("stream_request", ("hi",), {}, "request"),
    ("resume", ("hi", [1]), {}, "request"),
    ("resume", (TextRequest("hi"), b"hi"), {}, "received_token_ids"),
    ("resume", (TextRequest("hi"), 5), {}, "received_token_ids"),
]


@pytest.mark.parametrize(("method", "arguments", "named", "field"), WRONG)
def test_a_wrong_argument_is_an_engine_error_that_names_it(method, arguments, named, field):
    with Client(NOWHERE, retries=0) as client, pytest.raises(EngineError) as caught:
        getattr(client, method)(*arguments, **named)
    assert isinstance(caught.value, ValidationError)
    assert caught.value.field == field

    async def other():
        async with AsyncClient(NOWHERE, retries=0) as client:
            called = getattr(client, method)(*arguments, **named)
            if inspect.isawaitable(called):
                await called

    with pytest.raises(ValidationError):
        asyncio.run(other())


@pytest.mark.parametrize(
    "prompt",
    [[104, 105], (104, 105), range(104, 106), array.array("I", [104, 105]), np.array([104, 105])],
)
def test_token_ids_come_in_any_sequence(prompt):
    assert TextRequest(prompt).prompt == (104, 105)


def test_a_request_made_by_hand_is_checked_too():
    for wrong in (
        lambda: TextRequest(b"hi"),
        lambda: TextRequest("hi", params={"max_tokens": 1}),
        lambda: ChatRequest("hi"),
        lambda: ChatRequest(HI, params=GenerationParams),
    ):
        with pytest.raises(ValidationError):
            wrong()
    assert ChatRequest(HI).messages == (Message("user", "hi"),)
