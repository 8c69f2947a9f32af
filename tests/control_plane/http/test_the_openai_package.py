"""The official client, retries off, against a real port; behind it the scripted engine."""

from __future__ import annotations

import asyncio
import json
from http.client import HTTPConnection

import pydantic
import pytest

from control_plane.errors import ComputeUnavailableError, QueueFullError
from tests.control_plane.http.conftest import MODEL, answer_to
from tests.control_plane.http.own_server import Server
from tests.control_plane.text.known_templates import QWEN

HI = [{"role": "user", "content": "Hi"}]
ANSWER = answer_to("<user>Hi</><assistant>")


@pytest.fixture(scope="module")
def running():
    server = Server()
    yield server
    server.close()


@pytest.fixture
def server(running):
    yield running
    engine = running.engine
    engine.hold = engine.error = engine.refusal = engine.says = None


@pytest.fixture(scope="module")
def client(running, openai):
    client = openai.OpenAI(base_url=f"http://{running.address}/v1", api_key="-", max_retries=0)
    yield client
    client.close()


@pytest.mark.wide
def test_models_are_listed_and_found(client, openai):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).object == "model"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


def test_completions_whole_and_streamed_are_the_same_text(client):
    whole = client.completions.create(
        model=MODEL, prompt=["Hi", "there"], n=2, max_tokens=40, seed=1, logprobs=2, echo=True
    )
    stream = client.completions.create(
        model=MODEL, prompt=["Hi", "there"], n=2, max_tokens=40, seed=1, logprobs=2, echo=True,
        stream=True, stream_options={"include_usage": True},
    )  # fmt: skip
    texts, chunks = [""] * 4, list(stream)
    for chunk in chunks[:-1]:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]
    assert chunks[-1].usage == whole.usage
    assert whole.choices[0].logprobs.text_offset[:3] == [0, 1, 2]
    assert whole.system_fingerprint == "scripted/1"


def test_chats_whole_and_streamed_are_the_same_text(client):
    whole = client.chat.completions.create(
        model=MODEL, messages=HI, logprobs=True, top_logprobs=2, user="me"
    )
    assert whole.choices[0].message.content == ANSWER
    again = client.chat.completions.create(
        model=MODEL, messages=[*HI, whole.choices[0].message, *HI], max_tokens=1
    )
    assert again.usage.prompt_tokens > whole.usage.prompt_tokens
    stream = client.chat.completions.create(model=MODEL, messages=HI, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == ANSWER
    with client.chat.completions.stream(model=MODEL, messages=HI) as events:
        assert events.get_final_completion().choices[0].message.content == ANSWER


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning")  # the package's own
def test_an_answer_that_the_package_parsed_is_handed_back_as_it_is(client, server):
    class Town(pydantic.BaseModel):
        name: str

    server.engine.says = ['{"name": "Ulm"}']
    whole = client.chat.completions.parse(model=MODEL, messages=HI, response_format=Town)
    message = whole.choices[0].message
    assert message.parsed == Town(name="Ulm")
    server.engine.says = ["Hm."]
    asked = {"model": MODEL, "messages": [*HI, message, *HI]}
    assert client.chat.completions.create(**asked).choices[0].message.content == "Hm."


def test_responses_whole_and_streamed_are_the_same_text(client):
    whole = client.responses.create(model=MODEL, input="Hi", instructions=None)
    assert (whole.output_text, whole.status) == (ANSWER, "completed")
    with client.responses.stream(model=MODEL, input="Hi") as events:
        kinds = [event.type for event in events]
        assert events.get_final_response().output_text == ANSWER
    assert kinds[-1] == "response.completed"
    again = client.responses.create(
        model=MODEL, input=[*whole.output, {"role": "user", "content": "?"}], max_output_tokens=2
    )
    assert again.incomplete_details.reason == "max_output_tokens"


def test_refusals_are_the_clients_own_errors(client, server, openai):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="Hi", temperature=3)
    assert (caught.value.param, caught.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=HI, max_completion_tokens=5000)
    assert caught.value.code == "context_length_exceeded"
    server.engine.refusal = QueueFullError("4 requests wait already")
    with pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(model=MODEL, prompt="Hi")
    assert caught.value.response.headers["retry-after"] == "1"


def test_a_failure_in_mid_stream_is_raised_behind_the_text_before_it(client, server, openai):
    server.engine.hold, server.engine.error = 3, ComputeUnavailableError("it is away")
    stream = client.completions.create(model=MODEL, prompt="Hi", stream=True)
    texts = []
    with pytest.raises(openai.APIError, match="it is away") as caught:
        texts.extend(chunk.choices[0].text for chunk in stream)
    assert caught.value.code == "compute_unavailable"
    stream = client.chat.completions.create(model=MODEL, messages=HI, stream=True)
    with pytest.raises(openai.APIError, match="it is away"):
        list(stream)


SKY = {"name": "sky", "parameters": {"type": "object"}}
CALLS = (
    "<think>\nRain?\n</think>\n\nHm.\n"
    '<tool_call>\n{"name": "sky", "arguments": {"at": "Köln"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "sky", "arguments": {"at": "Ulm"}}\n</tool_call>'
)


def test_tools_are_called_and_answered_as_openai_does_it(openai):
    server = Server(template=QWEN)
    server.engine.says = [CALLS]
    asked = {
        "model": MODEL, "messages": HI, "seed": 1, "max_tokens": 250,
        "tools": [{"type": "function", "function": SKY}],
    }  # fmt: skip
    try:
        with openai.OpenAI(
            base_url=f"http://{server.address}/v1", api_key="-", max_retries=0
        ) as client:
            whole = client.chat.completions.create(**asked)
            assert whole.choices[0].finish_reason == "tool_calls"
            message = whole.choices[0].message
            assert (message.content, message.reasoning_content) == ("Hm.", "Rain?")
            towns = [json.loads(call.function.arguments)["at"] for call in message.tool_calls]
            assert towns == ["Köln", "Ulm"]
            # The package puts the deltas together itself.
            with client.chat.completions.stream(**asked) as stream:
                kinds = {event.type for event in stream}
                streamed = stream.get_final_completion().choices[0]
            assert "tool_calls.function.arguments.delta" in kinds
            assert streamed.finish_reason == "tool_calls"
            assert streamed.message.content == "Hm."
            calls = [(call.id, call.function.name, call.function.arguments)
                     for call in streamed.message.tool_calls]  # fmt: skip
            assert calls == [(call.id, call.function.name, call.function.arguments)
                             for call in message.tool_calls]  # fmt: skip
            server.engine.says = ["It rains."]
            results = [
                {"role": "tool", "tool_call_id": call.id, "content": "rain"}
                for call in message.tool_calls
            ]
            for said in (message, streamed.message, message.model_dump()):
                asked["messages"] = [*HI, said, *results]
                answer = client.chat.completions.create(**asked | {"max_tokens": 20})
                assert answer.choices[0].message.content == "It rains."
    finally:
        server.close()


def test_closing_a_stream_ends_the_request(client, server):
    engine = server.engine
    engine.hold = 2
    before = len(engine.cancelled)
    stream = client.completions.create(model=MODEL, prompt="Hi", stream=True)
    next(stream)
    stream.close()
    wait_until(server, lambda: len(engine.cancelled) > before)


def test_closing_the_connection_ends_a_request_that_is_not_streamed(server):
    engine = server.engine
    engine.hold = 2
    before, submitted = len(engine.cancelled), len(engine.submitted)
    connection = HTTPConnection(server.address.host, server.address.port, timeout=10)
    body = f'{{"model": "{MODEL}", "prompt": "Hi"}}'
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    wait_until(server, lambda: len(engine.submitted) > submitted)
    connection.close()
    wait_until(server, lambda: len(engine.cancelled) > before)


def wait_until(server, is_so) -> None:
    """Wait for the engine's next news until something is so."""

    async def wait():
        while not is_so():
            await server.engine.news.wait()
            server.engine.news.clear()

    asyncio.run_coroutine_threadsafe(wait(), server.loop).result(10)
