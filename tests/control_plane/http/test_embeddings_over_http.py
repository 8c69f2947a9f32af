"""`/v1/embeddings`, by hand and by OpenAI's package; behind it the scripted engine."""

from __future__ import annotations

import asyncio
import base64
import math
import struct

import pytest

from control_plane.engine import embedding
from control_plane.errors import RequestFailedError
from control_plane.http.embedding_schema import EmbeddingList
from tests.control_plane.http.conftest import MODEL, checked, embedding_of, error_of
from tests.control_plane.http.own_server import Server
from tests.waiting import until

PATH = "/v1/embeddings"


def normalised(text: str | bytes | list[int]) -> list[float]:
    values = embedding_of(list(text.encode() if isinstance(text, str) else text))
    return [value / math.hypot(*values) for value in values]


async def embed(served, given: object, **fields) -> dict:
    response = await served.post(PATH, {"model": MODEL, "input": given, **fields})
    return checked(response, EmbeddingList)


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ("Hi", ["Hi"]),
        (["Hi", "there"], ["Hi", "there"]),
        ([72, 105], ["Hi"]),
        ([[72, 105], [33]], ["Hi", "!"]),
    ],
)
def test_texts_and_tokens_alone_and_in_lists(on_loop, given, texts):
    async def test(served):
        answer = await embed(served, given)
        assert answer["object"] == "list"
        assert answer["model"] == MODEL
        num_tokens = sum(map(len, texts))
        assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        for index, (one, text) in enumerate(zip(answer["data"], texts, strict=True)):
            assert (one["object"], one["index"]) == ("embedding", index)
            assert one["embedding"] == pytest.approx(normalised(text))
        assert len(served.hub) == 0

    on_loop(test)


def test_base64_is_of_the_same_float32(on_loop):
    async def test(served):
        (numbers,) = (await embed(served, "Hi", encoding_format="float"))["data"]
        (coded,) = (await embed(served, "Hi", encoding_format="base64"))["data"]
        floats = struct.unpack("<3f", base64.b64decode(coded["embedding"]))
        assert struct.pack("<3f", *numbers["embedding"]) == struct.pack("<3f", *floats)

    on_loop(test)


def test_dimensions_and_length_are_as_asked(on_loop):
    async def test(served):
        (one,) = (await embed(served, "Hi", dimensions=2))["data"]
        assert math.hypot(*one["embedding"]) == pytest.approx(1)
        (one,) = (await embed(served, "Hi", dimensions=2, normalize=False, user="me"))["data"]
        assert one["embedding"] == embedding_of(list(b"Hi"))[:2]

    on_loop(test)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": ""}, "input", "invalid_value"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": ["a", ""]}, "input[1]", "invalid_value"),
        ({"input": ["a", "b" * 600]}, "input[1]", "context_length_exceeded"),
        ({"input": "b" * 600}, "input", "context_length_exceeded"),
        ({"input": [[1], [999]]}, "input[1]", "invalid_value"),
        ({"input": [1, "a"]}, "input[1]", "invalid_value"),
        ({"input": {"text": "a"}}, "input", "wrong_kind"),
        ({"input": "a", "dimensions": 4}, "dimensions", "invalid_value"),
        ({"input": "a", "dimensions": 0}, "dimensions", "invalid_value"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "invalid_value"),
        ({"input": "a", "truncate": True}, "truncate", "unknown_parameter"),
        ({}, "input", "missing_required_parameter"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_by_name(on_loop, fields, param, code):
    async def test(served):
        error = await served.error(PATH, {"model": MODEL, **fields})
        assert error["param"] == param
        assert error["code"] == code or (code == "wrong_kind" and error["code"] == "invalid_value")
        assert "inputs" not in error["message"]
        assert served.engine.submitted == []

    on_loop(test)


def test_all_texts_of_a_body_have_so_many_tokens_together(on_loop, monkeypatch):
    monkeypatch.setattr(embedding, "MAX_TOKENS", 5)

    async def test(served):
        error = await served.error(PATH, {"model": MODEL, "input": ["abc", "def"]})
        assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
        assert error["message"] == "input must have at most 5 tokens together, got 6"

    on_loop(test)


def test_another_model_is_not_found_and_a_failed_text_fails_the_call(on_loop):
    async def test(served):
        await served.error(PATH, {"model": "other", "input": "a"}, 404)
        served.engine.hold, served.engine.error = 0, RequestFailedError("no numbers")
        response = await served.post(PATH, {"model": MODEL, "input": ["a", "b"]})
        assert error_of(response, 500)["code"] == "request_failed"
        assert len(served.hub) == 0

    on_loop(test)


def test_a_body_of_many_texts_may_be_longer_than_one_prompt_of_the_model(on_loop):
    async def test(served):
        texts = [f"{number} " + "x" * 490 for number in range(600)]
        assert len((await embed(served, texts))["data"]) == 600
        response = await served.post("/v1/completions", {"model": MODEL, "prompt": texts})
        assert error_of(response, 413)["code"] == "request_too_large"

    on_loop(test)


def test_a_client_that_leaves_ends_all_texts(on_loop):
    async def test(served):
        served.engine.hold = 0
        call = asyncio.create_task(embed(served, ["Hi", "there"]))
        await until(lambda: len(served.engine.submitted) == 2)
        call.cancel()
        await until(lambda: len(served.engine.cancelled) == 2)
        assert len(served.hub) == 0

    on_loop(test)


# OpenAI's package, on a real port


@pytest.fixture(scope="module")
def client(openai):
    server = Server()
    client = openai.OpenAI(base_url=f"http://{server.address}/v1", api_key="-", max_retries=0)
    yield client
    client.close()
    server.close()


def test_the_package_reads_what_it_asks_for(client):
    asked = ["Hi", "there"]
    for options in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
        answer = client.embeddings.create(model=MODEL, input=asked, **options)
        assert answer.usage.total_tokens == 7
        for one, text in zip(answer.data, asked, strict=True):
            values = one.embedding
            if isinstance(values, str):
                values = struct.unpack("<3f", base64.b64decode(values))
            assert list(values) == pytest.approx(normalised(text), rel=1e-6)
    answer = client.embeddings.create(model=MODEL, input=[72, 105], dimensions=1, user="me")
    assert answer.data[0].embedding == [1.0]


def test_the_package_raises_what_it_raises_for_openai(client, openai):
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model=MODEL, input=["Hi", ""])
    assert caught.value.param == "input[1]"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="other", input="Hi")
