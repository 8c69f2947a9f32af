"""Request targets as proxies write them: RFC 9112, section 3.2."""

from __future__ import annotations

import h11
import pytest

from control_plane.http.parser import MeteredParser


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (b"/v1/models?a=b", b"/v1/models?a=b"),
        (b"http://127.0.0.1:3000/v1/models?a=b", b"/v1/models?a=b"),
        (b"HTTPS://user@[::1]:3000/v1/models/a%2Fb", b"/v1/models/a%2Fb"),
        (b"http://other.host", b"/"),
        (b"http://other.host?a=b/c", b"/?a=b/c"),
        (b"/http://other.host/x", b"/http://other.host/x"),
        (b"ftp://other.host/x", b"ftp://other.host/x"),
        (b"*", b"*"),
    ],
)
def test_a_target_in_absolute_form_is_that_of_its_path(target, path):
    parser = MeteredParser()
    parser.receive_data(b"POST " + target + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
    request = parser.next_event()
    assert type(request) is h11.Request
    assert (request.method, request.target) == (b"POST", path)
    assert dict(request.headers) == {b"host": b"x", b"content-length": b"2"}
    assert parser.num_body_bytes_left == 2
    assert parser.next_event().data == b"{}"


def test_what_a_proxy_asks_for_is_answered(on_port):
    async def test(port):
        for target in (b"/count", b"http://other.host/count"):
            client = await port.connect(b"GET " + target + b" HTTP/1.1\r\nHost: x\r\n\r\n")
            status, _, body = await client.answer()
            assert (status, body) == (200, b"0")

    on_port(test)
