"""`Client` and `AsyncClient` against both planes with the simulated executor."""

from __future__ import annotations

import asyncio
import math
import threading
import time

import pytest

from control_plane.core.errors import ContextLengthError
from control_plane.errors import ModelNotFoundError, RequestNotFoundError
from hetero_infer import (
    AsyncClient,
    Client,
    DeadlineExceededError,
    Delta,
    Finished,
    GenerationParams,
    Message,
    ServerLostError,
    Started,
    ValidationError,
)

PARAMS = GenerationParams(max_tokens=9, seed=7, ignore_eos=True)
ENDLESS = GenerationParams(max_tokens=1800, seed=7, ignore_eos=True)
ASKED = [{"role": "user", "content": "hi"}]
PATIENCE_S = 120.0


@pytest.fixture
def client(server):
    with Client(server) as client:
        yield client


def in_loop(server, story):
    async def run():
        async with AsyncClient(server) as client:
            return await asyncio.wait_for(story(client), PATIENCE_S)

    return asyncio.run(run())


@pytest.mark.wide
def test_a_stream_and_a_whole_answer_are_the_same_answer(client):
    whole = client.generate("hello", PARAMS)
    with client.stream("hello", PARAMS) as stream:
        events = list(stream)
        streamed = stream.answer()
    assert isinstance(events[0], Started)
    assert isinstance(events[-1], Finished)
    assert "".join(event.text for event in events if isinstance(event, Delta)) == whole.text
    assert (streamed.text, streamed.token_ids) == (whole.text, whole.token_ids)
    assert (whole.finish_reason, len(whole.token_ids)) == ("length", 9)
    assert streamed.started.params == whole.started.params == PARAMS
    assert whole.finished.states[-1].state == "completed"
    assert whole.request_id != streamed.request_id


def test_asyncio_brings_what_threads_bring(client, server):
    async def story(other):
        whole = await other.generate("hello", PARAMS)
        async with other.stream("hello", PARAMS) as stream:
            texts = [text async for text in stream.texts()]
            streamed = await stream.answer()
        chat = await other.chat(ASKED, PARAMS)
        async with other.chat_stream(ASKED, PARAMS) as stream:
            assert (await stream.answer()).text == chat.text
        info, tokens = await other.model_info(), await other.tokenize("hello")
        assert await other.detokenize(tokens) == "hello"
        assert (await other.apply_chat_template(ASKED)).token_ids
        assert [model.model for model in await other.list_models()] == [info.model]
        assert (await other.get_memory_stats()).total_blocks > 0
        assert (await other.get_metrics()).completed_requests >= 4
        assert await other.list_requests(include_ended=True)
        assert await other.flush_prefix_cache() >= 0
        with pytest.raises(RequestNotFoundError):
            await other.abort("nobody")
        return whole, texts, streamed, chat, info, tokens

    whole, texts, streamed, chat, info, tokens = in_loop(server, story)
    here = client.generate("hello", PARAMS)
    assert whole.text == here.text == "".join(texts) == streamed.text
    assert chat.text == client.chat(ASKED, PARAMS).text
    assert info == client.model_info()
    assert tokens == client.tokenize("hello")


def test_a_conversation_is_typed_or_json(client):
    prompt = client.apply_chat_template([Message("system", "be brief"), *ASKED])
    assert prompt.text == "[system]be brief[user]hi[assistant]"
    whole = client.chat([Message("user", "hi")], PARAMS)
    assert whole.text == client.chat(ASKED, PARAMS).text
    assert whole.text == client.generate(prompt_of(client), PARAMS).text
    with client.chat_stream(ASKED, PARAMS) as stream:
        assert "".join(stream.texts()) == whole.text


def test_the_template_is_told_what_the_caller_says(client, server):
    told = {"chat_template_kwargs": {"mood": "(gruff)"}}
    prompt = client.apply_chat_template(ASKED, **told)
    assert prompt.text == "[user]hi[assistant](gruff)"
    whole = client.generate(prompt.token_ids, PARAMS).text
    assert client.chat(ASKED, PARAMS, **told).text == whole
    assert client.chat_stream(ASKED, PARAMS, **told).answer().text == whole
    assert client.chat_stream(ASKED, PARAMS, **told, resume=True).answer().text == whole

    async def story(other):
        assert await other.apply_chat_template(ASKED, **told) == prompt
        return (await other.chat(ASKED, PARAMS, **told)).text

    assert in_loop(server, story) == whole
    for call in (client.chat, client.apply_chat_template):
        with pytest.raises(ValidationError, match="it reads mood") as caught:
            call(ASKED, chat_template_kwargs={"mod": 1})
        assert caught.value.field == "chat_template_kwargs"
        (violation,) = caught.value.field_violations
        assert violation.field == "chat_template_kwargs_json"  # as the message spells it


def prompt_of(client):
    return client.apply_chat_template(ASKED).token_ids


def test_samples_and_logprobs_arrive_either_way(client):
    params = GenerationParams(
        max_tokens=4, n=3, seed=5, num_logprobs=2, num_prompt_logprobs=0, ignore_eos=True
    )
    whole = client.generate("hello", params)
    streamed = client.stream("hello", params).answer()
    assert streamed.samples == whole.samples
    assert streamed.prompt_logprobs == whole.prompt_logprobs
    assert [sample.index for sample in whole.samples] == [0, 1, 2]
    assert len(whole.prompt_logprobs) == 4
    for sample in whole.samples:
        assert len(sample.logprobs) == len(sample.token_ids) == 4
        assert len(sample.logprobs[0].top_logprobs) == 2


def test_an_unset_parameter_is_the_servers_choice(client):
    params = client.generate("hello").started.params
    assert params.seed is not None
    assert (params.max_tokens, params.temperature) == (100, 1.0)


@pytest.mark.wide
def test_what_grpc_itself_refuses_for_its_size_is_too_long_too(client):
    for size, who in ((4 << 20, "SERVER: Received"), (20 << 20, "CLIENT: Sent")):
        with pytest.raises(ContextLengthError, match=f"{who} message larger than max"):
            client.generate("x" * size)
        with pytest.raises(ContextLengthError, match=f"{who} message larger than max"):
            client.stream("x" * size).answer()


def test_a_length_that_nobody_gave_is_what_is_left_and_one_that_is_given_is_kept(client):
    prompt = [65] * (client.model_info().max_model_len - 9)
    params = GenerationParams(temperature=0.0)
    assert client.generate(prompt, params).started.params.max_tokens == 9
    with pytest.raises(ContextLengthError) as caught:
        client.generate(prompt, GenerationParams(max_tokens=100, temperature=0.0))
    assert caught.value.field == "max_tokens"


@pytest.fixture
def await_cancelled(client):
    """Wait until so many requests, and no others, have ended, all of them as cancelled."""
    before = client.get_metrics().cancelled_requests

    def wait(count):
        deadline = time.monotonic() + PATIENCE_S
        while client.list_requests():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert client.get_metrics().cancelled_requests - before == count

    return wait


def test_leaving_a_stream_aborts_its_request(client, await_cancelled):
    with client.stream("hello", ENDLESS) as stream:
        assert isinstance(next(stream), Started)
        assert len(client.list_requests()) == 1
    await_cancelled(1)
    assert list(stream) == []


def test_another_thread_may_close_a_stream_that_is_read(client, await_cancelled):
    stream = client.stream("hello", ENDLESS, resume=True)
    next(stream)
    closing = threading.Thread(target=stream.close)
    closing.start()
    assert not any(isinstance(event, Finished) for event in stream)
    closing.join()
    await_cancelled(1)


def test_leaving_an_async_stream_aborts_its_request(server, await_cancelled):
    async def story(other):
        async with other.stream("hello", ENDLESS) as stream:
            await anext(stream)
        assert [event async for event in stream] == []
        # Closed by another task while this one reads.
        stream = other.stream("hello", ENDLESS)
        started = asyncio.Event()

        async def read():
            async for _ in stream:
                started.set()
            return stream.is_finished

        reading = asyncio.create_task(read())
        await started.wait()
        await stream.close()
        assert await reading is False
        # A cancelled task.
        task = asyncio.create_task(other.generate("hello", ENDLESS))
        while len(await other.list_requests()) == 0:  # noqa: ASYNC110 - the server's state
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    in_loop(server, story)
    await_cancelled(3)


def test_giving_an_async_stream_up_aborts_its_request(server, await_cancelled):
    async def story(other):
        async for _ in other.stream("hello", ENDLESS):
            break
        async for _ in other.stream("hello", ENDLESS).texts():
            break
        # The client, whose end would end them, is open still.
        while await other.list_requests():  # noqa: ASYNC110 - the server's state
            await asyncio.sleep(0.01)

    in_loop(server, story)
    await_cancelled(2)


def test_an_async_stream_may_outlive_its_loop(server, await_cancelled):
    async def story(other):
        stream = other.stream("hello", ENDLESS)
        await anext(stream)
        return stream

    stream = in_loop(server, story)
    await_cancelled(1)
    del stream  # an exception here would be a warning, and that an error


@pytest.mark.parametrize("timeout_s", [math.inf, 1e300, 1e10])
def test_a_time_limit_may_be_longer_than_grpc_can_say(client, server, timeout_s):
    whole = client.generate("hello", PARAMS, timeout_s=timeout_s)
    assert client.stream("hello", PARAMS, timeout_s=timeout_s).answer().text == whole.text

    async def story(other):
        return (await other.generate("hello", PARAMS, timeout_s=timeout_s)).text

    assert in_loop(server, story) == whole.text


def test_a_time_limit_aborts_the_request(client, server, await_cancelled):
    with pytest.raises(DeadlineExceededError):
        client.generate("hello", ENDLESS, timeout_s=0.05)
    with pytest.raises(DeadlineExceededError):
        client.stream("hello", ENDLESS, timeout_s=0.05, resume=True).answer()

    async def story(other):
        with pytest.raises(DeadlineExceededError):
            await other.chat(ASKED, ENDLESS, timeout_s=0.05)

    in_loop(server, story)
    await_cancelled(3)


def test_aborting_by_id_ends_a_stream_as_cancelled(client):
    stream = client.stream("hello", ENDLESS)
    client.abort(next(stream).request_id)
    answer = stream.answer()
    assert answer.finish_reason == "cancelled"


def test_errors_name_field_and_request(client, server):
    with pytest.raises(ContextLengthError) as caught:
        client.generate("hello", GenerationParams(max_tokens=5000))
    error = caught.value
    assert (error.field, error.retry_after_s) == ("max_tokens", None)
    assert [violation.field for violation in error.field_violations] == ["sampling.max_tokens"]
    assert len(error.request_id) == 32
    with pytest.raises(ModelNotFoundError):
        client.generate("hello", model="other")

    async def story(other):
        with pytest.raises(ContextLengthError):
            await other.stream("hello", GenerationParams(max_tokens=5000)).answer()

    in_loop(server, story)


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.generate([-1]),
        lambda client: client.generate("\ud800"),
        lambda client: client.generate("x", GenerationParams(max_tokens="many")),
        lambda client: client.generate("x", priority=1 << 40),
        lambda client: client.chat([Message("user", 7)]),
        lambda client: client.chat("hi"),
        lambda client: client.tokenize("\ud800"),
        lambda client: client.detokenize(["x"]),
        lambda client: client.generate("x", timeout_s=0),
        lambda client: client.generate("x", timeout_s=math.nan),
        lambda client: client.stream("x", patience_s=math.nan),
        lambda client: client.stream("x", GenerationParams(n=2), resume=True),
        lambda client: client.resume(client.stream("x").request, [-1]),
    ],
)
def test_what_cannot_be_sent_is_a_validation_error(client, ask):
    with pytest.raises(ValidationError):
        ask(client)


def test_a_closed_client_says_so(server):
    client = Client(server)
    stream = client.stream("hello", ENDLESS, resume=True)
    next(stream)
    client.close()
    for ask in (stream.answer, client.model_info, client.stream("x").answer):
        with pytest.raises(ServerLostError, match="the client is closed"):
            ask()
