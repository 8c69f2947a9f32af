"""Bodies, headers and paths that are no request are refused in OpenAI's shape."""

from __future__ import annotations

import asyncio

import pytest

from control_plane.http import body as body_module
from control_plane.http import body_size as body_size_module
from tests.control_plane.http.conftest import error_of
from tests.control_plane.http.test_wrong_parameters_are_named_over_http import (
    CHAT,
    COMPLETIONS,
    HI,
    MODEL,
    RESPONSES,
)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"[]", b"5", b'"x"', b"null", b"\xff\xfe", b'{"model": "\xff"}', b'{"a": NaN}',
        b'{"model": "\\ud800"}', b'{"model": "x", "prompt": "\\udc00"}', b"[" * 10_000,
        b'{"a":' * 5_000, b'{"model": ' + b"9" * 5_000 + b"}", b"{}" * 2,
    ],
)  # fmt: skip
def test_a_body_that_is_no_json_object_is_a_400(on_loop, path, data):
    async def test(served):
        headers = {"Content-Type": "application/json"}
        error_of(await served.client.post(path, content=data, headers=headers))

    on_loop(test)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "application/json; charset=latin-1"},
        {"Content-Type": "application/json", "Content-Encoding": "gzip"},
    ],
)
def test_a_body_of_another_kind_is_a_415(on_loop, headers):
    async def test(served):
        data = b'{"model": "tiny/bytes", "prompt": "Hi"}'
        error_of(await served.client.post(COMPLETIONS, content=data, headers=headers), 415)
        headers["Content-Type"] = 'Application/JSON; charset="UTF-8"'
        headers.pop("Content-Encoding", None)
        response = await served.client.post(COMPLETIONS, content=data, headers=headers)
        assert response.status_code == 200

    on_loop(test)


def test_a_body_that_is_too_large_is_refused_before_it_is_read(on_loop, monkeypatch):
    monkeypatch.setattr(body_size_module, "max_body_bytes", lambda _: 1000)
    num_sent = 0

    async def endless():
        nonlocal num_sent
        while num_sent < 1_000_000:
            num_sent += 100
            yield b" " * 100

    async def test(served):
        headers = {"Content-Type": "application/json"}
        response = await served.client.post(COMPLETIONS, content=b" " * 1001, headers=headers)
        assert error_of(response, 413)["code"] == "request_too_large"
        response = await served.client.post(COMPLETIONS, content=endless(), headers=headers)
        error_of(response, 413)
        assert num_sent <= 1200

    on_loop(test)


@pytest.mark.parametrize("path", ["/readyz", "/nowhere"])
def test_headers_have_a_bound_like_a_calls_metadata(on_loop, path):
    async def test(served):
        for url, headers in ((path, {"X-Long": "y" * 17_000}), (f"{path}?{'y' * 17_000}", {})):
            error = error_of(await served.client.get(url, headers=headers), 431)
            assert error["code"] == "headers_too_large"
        response = await served.client.get(path, headers={"X-Long": "y" * 16_000})
        assert response.status_code in (200, 404)

    on_loop(test)


def test_a_body_that_does_not_come_is_given_up(on_loop, monkeypatch):
    monkeypatch.setattr(body_module, "BODY_PATIENCE_S", 0.01)

    async def never():
        yield b"{"
        await asyncio.Event().wait()

    async def test(served):
        headers = {"Content-Type": "application/json"}
        response = await served.client.post(COMPLETIONS, content=never(), headers=headers)
        error_of(response, 408)

    on_loop(test)


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),  # a base_url without /v1
        ("/v1/v1/models", "/v1/models"),  # and one with a second
        ("/v1/tokenize", "/tokenize"),
        ("/v1/completion", "/v1/completions"),
        ("/v1//models", "/v1/models"),
        ("/healty", "/health"),
    ],
)
def test_a_path_that_is_nearly_one_is_told_which_one(on_loop, path, meant):
    async def test(served):
        error = error_of(await served.client.post(path, json={}), 404)
        assert error["message"] == f"Invalid URL (POST {path}): did you mean {meant!r}?"

    on_loop(test)


def test_unknown_paths_methods_and_models_have_openais_shape(on_loop):
    async def test(served):
        client = served.client
        for path in ("/", "/v1", "/v1/moderations", "/docs", "/redoc"):
            error = error_of(await client.get(path), 404)
            assert error["message"] == (
                f"Invalid URL (GET {path}). The routes are listed at /openapi.json."
            )
        error_of(await client.get("/v1/models/"), 404)
        response = await client.get(COMPLETIONS)
        error_of(response, 405)
        assert response.headers["allow"] == "POST"
        error_of(await client.delete("/v1/models"), 405)
        error = error_of(await client.get("/v1/models/other"), 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        for path, fields in (
            (COMPLETIONS, {"prompt": "x"}),
            (CHAT, {"messages": HI}),
            (RESPONSES, {"input": "x"}),
            ("/tokenize", {"prompt": "x"}),
        ):
            error = await served.error(path, {"model": "other", **fields}, 404)
            assert error["message"] == "model 'other' is not loaded, 'tiny/bytes' is"

    on_loop(test)


def test_every_answer_has_an_id_of_the_servers(on_loop):
    async def test(served):
        first = await served.client.get("/healthz", headers={"X-Request-Id": "mine"})
        second = await served.client.get("/nowhere", headers={"X-Request-Id": "mine"})
        ids = {first.headers["x-request-id"], second.headers["x-request-id"]}
        assert len(ids) == 2
        assert "mine" not in ids
        answer = await served.post(COMPLETIONS, {"model": MODEL, "prompt": "Hi"})
        assert answer.json()["id"] == f"cmpl-{answer.headers['x-request-id']}"
        assert served.engine.submitted[0].name == answer.headers["x-request-id"]

    on_loop(test)


def test_metrics_are_a_page_where_there_are_any(on_loop):
    async def without(served):
        error_of(await served.client.get("/metrics"), 404)

    async def with_page(served):
        response = await served.client.get("/metrics")
        assert (response.content, response.headers["content-type"]) == (b"m 1\n", "text/x")

    on_loop(without)
    on_loop(with_page, metrics=lambda: (b"m 1\n", "text/x"))
