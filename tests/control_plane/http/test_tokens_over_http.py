"""The same tokens over HTTP, in OpenAI's shapes."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from control_plane.access.keyring import Keyring
from control_plane.access.limits import Limits
from control_plane.access.principal import current_principal
from control_plane.access.token_file import add_token
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


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/openapi.json"])
def test_load_balancers_need_none(ask, path):
    assert ask(path).text == "TokenMissingError"  # let through, in nobody's name
