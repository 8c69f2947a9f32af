"""Bytes on the HTTP port that no client library would send: refused or served, never a 5xx."""

from __future__ import annotations

import json
import random
from contextlib import ExitStack

import pytest

from tests.integration.hostile.neighbour import neighbour
from tests.integration.hostile.raw_http import JSON, RawClient, ask, chunk, chunked, head, post

pytestmark = pytest.mark.model

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MIB = 1 << 20
GET = head("GET", "/healthz")


@pytest.fixture
def body(ports) -> bytes:
    """A request that is well."""
    return json.dumps(ports.completion()).encode()


def with_field(body: bytes, text: str) -> bytes:
    return body[:-1] + b", " + text.encode() + b"}"


def unwell(body: bytes) -> dict[str, tuple[int, bytes]]:
    """By name: the status, and what is sent."""
    chat = json.loads(body) | {"messages": [{"role": "user", "content": "Hi"}]}
    del chat["prompt"]
    deep = b"[" * 200_000
    return {
        "bad chunk size": (400, chunked(COMPLETIONS, b"zz\r\nxx\r\n0\r\n\r\n")),
        "negative chunk size": (400, chunked(COMPLETIONS, chunk(body[:9]), b"-5\r\n")),
        "endless chunk size": (400, chunked(COMPLETIONS, b"f" * 40 + b"\r\n")),
        "huge chunk extension": (400, chunked(COMPLETIONS, b"5;" + b"x" * 200_000)),
        "huge trailer": (400, chunked(COMPLETIONS, chunk(body), b"0\r\nX: " + b"y" * 200_000)),
        "length and chunks": (
            400, head("POST", COMPLETIONS, JSON, "Content-Length: 5", "Transfer-Encoding: chunked")
        ),
        "two lengths": (400, post(COMPLETIONS, body, JSON, "Content-Length: 5")),
        "negative length": (400, head("POST", COMPLETIONS, JSON, "Content-Length: -5")),
        "endless length": (400, head("POST", COMPLETIONS, JSON, "Content-Length: " + "9" * 5000)),
        "great length": (413, head("POST", COMPLETIONS, JSON, "Content-Length: " + "9" * 19)),
        "length of other digits": (400, head("POST", COMPLETIONS, JSON, "Content-Length: ²")),
        "unknown transfer": (400, head("POST", COMPLETIONS, JSON, "Transfer-Encoding: gzip")),
        "no body": (400, head("POST", COMPLETIONS, JSON)),
        "long header": (431, head("GET", "/healthz", "X: " + "a" * 300_000)),
        "many headers": (431, head("GET", "/healthz", *(f"X{i}: abcd" for i in range(3000)))),
        "long path": (431, head("GET", "/" + "a" * 40_000)),
        "odd path": (404, head("GET", "/%00%ff%fe%")),
        "path of bytes": (400, head("GET", "/\xff\xfe")),
        "path of a proxy": (200, head("GET", "http://x/healthz")),
        "surrogate in the path": (404, head("GET", "/v1/models/%ED%A0%80")),
        "path upwards": (404, head("GET", "/v1/models/../../etc/passwd")),
        "no host": (400, b"GET /healthz HTTP/1.1\r\n\r\n"),
        "two hosts": (400, head("GET", "/healthz", "Host: y")),
        "options": (404, head("OPTIONS", "*")),
        "options of a route": (405, head("OPTIONS", COMPLETIONS)),
        "connect": (404, head("CONNECT", "x:443")),
        "trace": (405, head("TRACE", "/v1/models")),
        "unknown method": (405, head("BREW", "/v1/models")),
        "http 2": (404, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
        "http 0.9": (400, b"GET /\r\n\r\n"),
        "tls": (400, b"\x16\x03\x01\x02\x00\x01\x00\x01\r\n\r\n"),
        "empty lines": (400, b"\r\n" * 5000 + GET),
        "upgrade": (
            200, head("GET", "/healthz", "Connection: Upgrade", "Upgrade: websocket",
                      "Sec-WebSocket-Key: x", "Sec-WebSocket-Version: 13"),
        ),
        "unknown expectation": (200, post(COMPLETIONS, body, JSON, "Expect: 200-maybe")),
        "no type": (415, post(COMPLETIONS, body, "X: y")),
        "another type": (415, post(COMPLETIONS, body, "Content-Type: text/plain")),
        "type of bytes": (415, post(COMPLETIONS, body, "Content-Type: \xff\xfe")),
        "gzip": (415, post(COMPLETIONS, body, JSON, "Content-Encoding: gzip")),
        "odd headers": (
            200, post(COMPLETIONS, body, JSON, "traceparent: 00-zz", "Authorization: Bearer \xff",
                      "X-Request-Id: \xff\x7f", "Cookie: " + "a=b;" * 100),
        ),
        "nan": (400, post(COMPLETIONS, with_field(body, '"top_p": NaN'))),
        "infinity": (400, post(COMPLETIONS, with_field(body, '"top_p": -Infinity'))),
        "great float": (400, post(COMPLETIONS, with_field(body, '"top_p": 1e999'))),
        "great integer": (400, post(COMPLETIONS, with_field(body, '"seed": ' + "9" * 5000))),
        "key twice": (200, post(COMPLETIONS, with_field(body, '"max_tokens": 1'))),
        "lone surrogate": (400, post(COMPLETIONS, with_field(body, '"user": "\\ud800"'))),
        "no utf-8": (400, post(COMPLETIONS, body[:-1] + b', "user": "\xff\xc0\xaf"}')),
        "utf-16": (400, post(COMPLETIONS, body.decode().encode("utf-16"))),
        "two bodies": (400, post(COMPLETIONS, body + body)),
        "deep list": (413, post(COMPLETIONS, deep)),
        "deep field": (413, post(COMPLETIONS, body[:-1] + b', "metadata": ' + deep)),
        "deep object": (413, post(CHAT, b'{"messages": ' + b'[{"content": ' * 50_000)),
        "deep tool": (  # told of as it is
            200, post(CHAT, with_field(json.dumps(chat).encode(), '"tools": [{"type": "function", '
                      '"function": {"name": "f", "parameters": {"a": ' + "[" * 150 + "]" * 150
                      + "}}}]")),
        ),
        "null bytes": (400, post(COMPLETIONS, b"\0" * 1000)),
    }  # fmt: skip


@pytest.mark.wide
def test_whatever_is_sent_is_answered_as_it_deserves(ports, body):
    with neighbour(ports):
        for name, (expected, data) in unwell(body).items():
            status, answer = ask(ports.http, [data])
            assert status == expected, (name, status, answer)
            if status >= 400:
                assert set(json.loads(answer)["error"]) == {"message", "type", "param", "code"}


def test_a_body_over_the_limit_is_refused_and_the_connection_goes_on(ports):
    blanks = b" " * (9 * MIB)
    pieces = [b" " * 65_536] * 150
    with neighbour(ports), RawClient(ports.http) as client:
        for data in ([post(COMPLETIONS, blanks)],
                     [chunked(COMPLETIONS), *map(chunk, pieces), b"0\r\n\r\n"]):  # fmt: skip
            client.send(*data)
            status, _, answer = client.answer()
            assert (status, json.loads(answer)["error"]["code"]) == (413, "request_too_large")
            client.send(GET)
            assert client.answer()[0] == 200


def test_requests_one_behind_the_other_are_answered_in_order(ports, body):
    stream = json.dumps(ports.completion(stream=True)).encode()
    with neighbour(ports), RawClient(ports.http) as client:
        client.send(
            post(COMPLETIONS, body) + head("HEAD", "/healthz") + post(COMPLETIONS, stream)
            + post(COMPLETIONS, b"{") + chunked(COMPLETIONS, chunk(body), b"0\r\n\r\n") + GET
        )  # fmt: skip
        whole = client.answer()
        assert client.answer(has_body=False)[0] == 200
        events, refused, again, healthy = (client.answer() for _ in range(4))
        assert [status for status, _, _ in (whole, events, refused, again, healthy)] == [
            200, 200, 400, 200, 200
        ]  # fmt: skip
        assert json.loads(whole[2])["choices"] == json.loads(again[2])["choices"]
        assert events[2].endswith(b"data: [DONE]\n\n")


def test_http_1_0_gets_its_answer_and_the_end_of_the_connection(ports, body):
    stream = json.dumps(ports.completion(stream=True)).encode()
    for data in (body, stream):
        with RawClient(ports.http) as client:
            client.send(post(COMPLETIONS, data, version="1.0"))
            status, text, answer = client.answer()
            assert (status, b"chunked" in text.lower()) == (200, False)
            assert client.rest() == b""
            assert answer.endswith(b"[DONE]\n\n" if data is stream else b"}")


def test_who_asks_first_whether_to_send_his_body_is_told(ports, body):
    with RawClient(ports.http) as client:
        length = f"Content-Length: {len(body)}"
        client.send(head("POST", COMPLETIONS, JSON, length, "Expect: 100-continue"))
        assert client.answer()[0] == 100
        client.send(body)
        assert client.answer()[0] == 200
    with RawClient(ports.http) as client:
        client.send(
            head("POST", COMPLETIONS, JSON, f"Content-Length: {9 * MIB}", "Expect: 100-continue")
        )
        assert client.answer()[0] == 413
        assert client.rest() == b""


@pytest.mark.wide
def test_hundreds_who_never_finish_their_request_hold_up_nobody(ports, body):
    """Half a request line, half a header, half a body, a byte now and then."""
    halves = [
        b"", b"P", b"POST /v1/comp", head("POST", COMPLETIONS, JSON)[:-2],
        head("POST", COMPLETIONS, JSON, "Content-Length: 500") + b"{",
        chunked(COMPLETIONS, b"5\r\nab"), post(COMPLETIONS, body)[:-1],
    ]  # fmt: skip
    with ExitStack() as stack, neighbour(ports):
        held = [stack.enter_context(RawClient(ports.http)) for _ in range(100 * len(halves))]
        for index, client in enumerate(held):
            client.send(halves[index % len(halves)])
        for _ in range(5):
            assert ask(ports.http, [post(COMPLETIONS, body)])[0] == 200
        # The last half has its last byte, now that nobody expects it.
        client.send(body[-1:])
        assert client.answer()[0] == 200


@pytest.mark.wide
def test_clients_that_leave_in_mid_stream_leave_nothing(ports):
    cancelled = ports.server.metrics.cancelled_requests
    num_left = 20
    with neighbour(ports):
        for index in range(num_left):
            fields = {"stream": True, "max_tokens": 500, "n": 1 + index % 2}
            data = json.dumps(ports.completion(**fields)).encode()
            with RawClient(ports.http) as client:
                client.send(post(COMPLETIONS, data))
                if index % 4:
                    client.until(b"data: ")
    ports.server.wait_until(lambda: ports.server.metrics.cancelled_requests == cancelled + num_left)


@pytest.mark.parametrize("count", [200, pytest.param(5000, marks=pytest.mark.slow)])
def test_mangled_requests_and_noise_on_both_ports_harm_nobody(ports, body, count):
    draw = random.Random(count)
    whole = [post(COMPLETIONS, body), chunked(COMPLETIONS, chunk(body), b"0\r\n\r\n"), GET]
    frames = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04" + b"\0" * 5
    with neighbour(ports):
        for index in range(count):
            is_http = index % 4 > 0
            data = bytearray(draw.choice(whole) if is_http else frames)
            for _ in range(draw.randint(1, 6)):
                data[draw.randrange(len(data))] = draw.randrange(256)
            if draw.random() < 0.3:
                data += draw.randbytes(200)
            address = ports.http if is_http else ports.server.address
            with RawClient(address) as client:
                client.send(bytes(data))
                client.socket.shutdown(1)
                answers = client.rest()
            for status in answers.split(b"HTTP/1.1 ")[1:] if is_http else ():
                assert status[:1] in b"1 2 4".split(), (bytes(data), answers)
