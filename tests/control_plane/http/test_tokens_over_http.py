"""The same tokens over HTTP, in OpenAI's shapes."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from control_plane.access.keyring import Keyring
from control_plane.access.limits import Limits
from control_plane.access.principal import current_principal
from control_plane.access.token_file import add_token
from control_plane.errors import QueueFullError, TokenRateError
from control_plane.http.doorman import Doorman
from tests.control_plane.http.conftest import error_of

PATH = "/v1/completions"


@pytest.fixture
def token(tmp_path):
    return add_token(tmp_path / "t.json", "alice", Limits(), admin=False, shares_cache=False)


@pytest.fixture
def ask(tmp_path, token):  # noqa: ARG001 - the file has it
    """What an application behind the doorman answers: the name it acts for."""

    async def app(_scope, _receive, send):
        try:
            name = current_principal().name
        except Exception as error:  # noqa: BLE001 - it is the answer
            name = type(error).__name__
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": name.encode()})

    served = Doorman(app, Keyring(tmp_path / "t.json"))

    def run(path, headers=()):
        async def main():
            transport = httpx.ASGITransport(served)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.get(path, headers=list(headers))

        return asyncio.run(main())

    return run


def test_a_request_with_a_token_is_made_in_its_name(ask, token):
    response = ask("/v1/models", [("Authorization", f"Bearer {token}")])
    assert (response.status_code, response.text) == (200, "alice")


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ([], "token_missing"),
        ([("Authorization", "Basic YTpi")], "token_missing"),
        ([("Authorization", "Bearer x"), ("Authorization", "Bearer y")], "token_missing"),
        ([("Authorization", "Bearer wrong")], "token_unknown"),
        ([("Authorization", b"Bearer \xe9\xff")], "token_unknown"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/nowhere", "/healthz/"])
def test_without_one_everything_else_is_401(ask, headers, code, path):
    response = ask(path, headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    error = response.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("authentication_error", code, None)


def test_what_a_token_may_not_use_is_a_429_that_says_when_to_come_again(on_loop, tmp_path):
    file = tmp_path / "limits.json"
    limits = Limits(max_concurrent_requests=2, max_tokens_per_minute=40)
    token = add_token(file, "bob", limits, admin=False, shares_cache=False)

    async def test(served):
        async def complete(prompt):
            body = {"model": "tiny/bytes", "prompt": prompt}
            return await served.post(PATH, body, Authorization=f"Bearer {token}")

        error = error_of(await complete(["a", "b", "c"]), 429)
        assert (error["type"], error["code"]) == (
            "rate_limit_error",
            "too_many_concurrent_requests",
        )
        assert (await complete("x" * 100)).status_code == 200  # in debt from then on
        response = await complete("Hi")
        error = error_of(response, 429)
        assert (error["type"], error["code"]) == ("rate_limit_error", "tokens_per_minute_used_up")
        assert 60 < int(response.headers["retry-after"]) <= 180
        assert len(served.hub) == 0

    on_loop(test, keyring=Keyring(file))


WORK = {
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [72]},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/responses": {"input": "Hi"},
    "/v1/embeddings": {"input": ["Hi", "there"]},
    "/v1/completions": {"prompt": "Hi"},
}


class Untouched:
    """A text service that nobody may ask."""

    def __getattr__(self, name):
        raise AssertionError(name)


@pytest.fixture
def poor(tmp_path):
    """A keyring with one token, the requests that show it, and its meter."""
    file = tmp_path / "limits.json"
    limits = Limits(max_concurrent_requests=2, max_tokens_per_minute=40)
    token = add_token(file, "bob", limits, admin=False, shares_cache=False)
    keyring = Keyring(file, clock=lambda: 0.0)
    shown = {"Authorization": f"Bearer {token}"}
    return keyring, shown, keyring.authenticate(shown["Authorization"]).meter


@pytest.mark.parametrize("path", WORK)
@pytest.mark.parametrize("spent", ["tokens", "places"])
def test_no_text_is_worked_on_for_a_token_that_is_spent(on_loop, poor, path, spent):
    keyring, shown, meter = poor
    if spent == "tokens":
        meter.book(40, 0.0)
    else:
        meter.begin(0.0)
        meter.begin(0.0)

    async def test(served):
        served.frontend._text = Untouched()
        code = error_of(
            await served.post(path, {"model": "tiny/bytes", **WORK[path]}, **shown), 429
        )
        assert code["type"] == "rate_limit_error"

    on_loop(test, keyring=keyring)


def test_text_work_holds_a_place_and_gives_it_back(on_loop, poor):
    keyring, shown, meter = poor

    async def test(served):
        text, seen = served.frontend._text, []

        class Watched:
            def __getattr__(self, name):
                seen.append(meter.num_requests)
                return getattr(text, name)

        served.frontend._text = Watched()
        for path in ("/tokenize", "/detokenize"):
            assert (await served.post(path, WORK[path], **shown)).status_code == 200
        wrong = {"messages": [{"role": "user", "content": "x" * 40_000}]}
        assert (await served.post("/tokenize", wrong, **shown)).status_code == 400
        assert seen == [1, 1, 1]
        assert meter.num_requests == 0

    on_loop(test, keyring=keyring)


def test_an_echo_of_token_ids_needs_no_second_place(on_loop, poor):
    keyring, shown, meter = poor

    async def test(served):
        meter.begin(0.0)  # one of two
        body = {"model": "tiny/bytes", "prompt": [72, 105], "echo": True, "max_tokens": 1}
        response = await served.post("/v1/completions", body, **shown)
        assert response.json()["choices"][0]["text"] == "Hii"

    on_loop(test, keyring=keyring)


def test_a_batch_without_places_for_all_of_it_is_refused_before_its_first_prompt(on_loop, poor):
    keyring, shown, meter = poor

    async def test(served):
        body = {"model": "tiny/bytes", "prompt": ["a", "b", "c"]}
        error_of(await served.post(PATH, body, **shown), 429)
        assert served.engine.submitted == []
        assert meter.num_requests == 0
        meter.check(0.0)

    on_loop(test, keyring=keyring)


def test_what_a_batch_submitted_before_it_was_refused_is_booked(on_loop, poor):
    keyring, shown, meter = poor

    async def test(served):
        body = {"model": "tiny/bytes", "prompt": ["x" * 60, "y" * 600]}
        error_of(await served.post(PATH, body, **shown), 400)
        assert len(served.engine.submitted) == 1
        with pytest.raises(TokenRateError) as caught:
            meter.check(0.0)
        assert caught.value.retry_after_s == pytest.approx(31.5)  # 21 tokens at 40 a minute

    on_loop(test, keyring=keyring)


def test_what_the_engine_refuses_is_not_booked(on_loop, poor):
    keyring, shown, meter = poor

    async def test(served):
        served.engine.refusal = QueueFullError("full")
        error_of(await served.post(PATH, {"model": "tiny/bytes", "prompt": "x" * 60}, **shown), 429)
        meter.check(0.0)

    on_loop(test, keyring=keyring)


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/health", "/openapi.json"])
def test_load_balancers_need_none(ask, path):
    assert ask(path).text == "TokenMissingError"  # let through, in nobody's name
