"""Web pages that the operator names may use the port, and no others."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from control_plane.access.keyring import Keyring
from control_plane.access.limits import Limits
from control_plane.access.token_file import add_token
from control_plane.config import ControlPlaneConfig
from control_plane.engine.gate import Gate
from control_plane.http.app import make_app
from control_plane.http.backend import Backend
from planes.errors import ConfigError

PAGE = "https://chat.example.org"
CHAT = "/v1/chat/completions"
ASKS = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
}


def ask(origins, method, path, origin, keyring=None, **headers) -> httpx.Response:
    async def main():
        transport = httpx.ASGITransport(make_app(Backend(Gate()), keyring, origins))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, headers={"Origin": origin, **headers})

    return asyncio.run(main())


def test_a_page_that_is_named_is_told_that_it_may(tmp_path):
    path = tmp_path / "tokens.json"
    add_token(path, "alice", Limits(), admin=False, shares_cache=False)
    answer = ask([PAGE], "OPTIONS", CHAT, PAGE, Keyring(path), **ASKS)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert "x-stainless-os" in answer.headers["access-control-allow-headers"]
    refused = ask([PAGE], "POST", CHAT, PAGE, Keyring(path))
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == PAGE
    assert "access-control-allow-credentials" not in refused.headers


@pytest.mark.parametrize(("origins", "origin"), [([PAGE], "https://evil.example"), ([], PAGE)])
def test_others_are_not(origins, origin):
    answer = ask(origins, "GET", "/healthz", origin)
    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers
    assert ask(origins, "OPTIONS", CHAT, origin, **ASKS).status_code in (400, 405)


def test_all_pages_may_where_the_operator_says_so():
    assert ask(["*"], "GET", "/healthz", PAGE).headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize("origins", ["chat.example.org", f"{PAGE}/", f"{PAGE},", "http://", ""])
def test_what_is_no_origin_is_refused_at_the_start(origins):
    with pytest.raises(ConfigError, match="http_cors_origins"):
        ControlPlaneConfig(compute="unix:c.sock", http_cors_origins=origins)


def test_origins_have_commas_between_them():
    config = ControlPlaneConfig(compute="unix:c.sock", http_cors_origins=f"{PAGE}, http://x:8080")
    assert config.cors_origins == (PAGE, "http://x:8080")
