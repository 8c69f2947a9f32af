"""`model` names an adapter: on every route of both APIs, and in `/v1/models`."""

from __future__ import annotations

import pytest

from control_plane.engine.plane import AdapterDescription
from control_plane.http.embedding_schema import EmbeddingList
from control_plane.http.model_schema import Model, ModelList
from tests.control_plane.http.anthropic_calls import COUNT, message, told
from tests.control_plane.http.conftest import MODEL, checked

ADAPTERS = ("poet", "teams/lawyer:v2")
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def with_adapters(on_loop):
    """Runs a test with an application whose plane has adapters."""
    return lambda test: on_loop(test, adapters=tuple(map(AdapterDescription, ADAPTERS)))


def asked_with(served) -> list[int]:
    """The adapters of all requests so far, which are forgotten."""
    found = [request.adapter for request in served.engine.submitted]
    served.engine.submitted.clear()
    return found


def test_the_model_and_its_adapters_are_listed_and_described(with_adapters):
    async def test(served):
        listed = checked(await served.client.get("/v1/models"), ModelList)["data"]
        assert [(one["id"], one["root"], one["parent"]) for one in listed] == [
            (MODEL, MODEL, None),
            *((name, name, MODEL) for name in ADAPTERS),
        ]
        for one in listed:
            found = checked(await served.client.get(f"/v1/models/{one['id']}"), Model)
            assert found == one

    with_adapters(test)


@pytest.mark.parametrize("adapter", [0, 1, 2])
def test_every_route_asks_with_the_adapter_and_answers_in_its_name(with_adapters, adapter):
    name = (MODEL, *ADAPTERS)[adapter]

    async def test(served):
        whole = [
            await served.complete(["Hi", "there"], model=name),
            await served.chat(model=name, n=2),
            await served.respond(model=name),
            checked(
                await served.post("/v1/embeddings", {"model": name, "input": ["a", "b"]}),
                EmbeddingList,
            ),
            await message(served, model=name),
        ]
        assert {answer["model"] for answer in whole} == {name}
        assert asked_with(served) == [adapter] * 7
        streams = [
            await served.events("/v1/completions", {"model": name, "prompt": "Hi"}),
            await served.events("/v1/chat/completions", {"model": name, "messages": HI}),
        ]
        named = {event["model"] for events in streams for _, event in events if event != "[DONE]"}
        responses = await served.events("/v1/responses", {"model": name, "input": "Hi"})
        named |= {event["response"]["model"] for _, event in responses if "response" in event}
        assert named == {name} == {(await told(served, model=name))["model"]}
        assert asked_with(served) == [adapter] * 4

    with_adapters(test)


def test_text_is_the_same_whatever_reads_it(with_adapters):
    async def test(served):
        for path, body in (
            ("/tokenize", {"prompt": "Hi"}),
            ("/detokenize", {"tokens": [72, 105]}),
            (COUNT, {"messages": HI}),
        ):
            plain, adapted = [
                await served.post(path, {"model": name, **body}) for name in (MODEL, ADAPTERS[0])
            ]
            assert adapted.status_code == 200
            assert plain.json() == adapted.json()

    with_adapters(test)


def test_another_name_is_refused_in_a_message_that_names_them(with_adapters):
    told_names = f"model 'x' is not loaded, {MODEL!r} is, with the adapters {', '.join(ADAPTERS)}"

    async def test(served):
        error = await served.error("/v1/completions", {"model": "x", "prompt": "Hi"}, 404)
        assert (error["message"], error["code"]) == (told_names, "model_not_found")
        response = await served.post(
            "/v1/messages", {"model": "x", "messages": HI, "max_tokens": 1}
        )
        assert response.status_code == 404
        assert response.json()["error"]["message"] == told_names
        assert asked_with(served) == []

    with_adapters(test)
