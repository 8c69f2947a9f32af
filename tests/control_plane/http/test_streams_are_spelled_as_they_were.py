"""What is spelled once a stream, or without asking h11, is what it would be otherwise."""

from __future__ import annotations

import json

import h11
import pytest

from control_plane.http.choices import ChunkSpeller, Heading
from control_plane.http.json_text import to_json
from control_plane.http.parser import MeteredParser

DATA = [h11.Data(data=b"data: 1\n\n"), h11.Data(data=b""), h11.Data(data=b"x" * 300)]
END = h11.EndOfMessage()
KEEP, ONCE, HEAD = b"GET / HTTP/1.1", b"GET / HTTP/1.0", b"HEAD / HTTP/1.1"


def answer(*headers: tuple[str, str]) -> h11.Response:
    return h11.Response(status_code=200, headers=list(headers))


OF_UNKNOWN_LENGTH = [answer(), *DATA, END]
OF_KNOWN_LENGTH = [answer(("content-length", "309")), *DATA, END]


def spelled(server: h11.Connection, exchanges) -> list[bytes]:
    """What the server writes for each of its events."""
    written = []
    for line, events in exchanges:
        server.receive_data(line + b"\r\nHost: x\r\n\r\n")
        while type(server.next_event()) is not h11.EndOfMessage:
            pass
        written += [server.send(event) for event in events]
        if server.our_state is h11.DONE:
            server.start_next_cycle()
    return written


@pytest.mark.parametrize(
    "exchanges",
    [
        [(KEEP, OF_UNKNOWN_LENGTH), (KEEP, OF_KNOWN_LENGTH), (KEEP, OF_UNKNOWN_LENGTH)],
        [(KEEP, OF_KNOWN_LENGTH), (ONCE, OF_UNKNOWN_LENGTH)],
        [(HEAD, [answer(), DATA[1], END]), (KEEP, OF_UNKNOWN_LENGTH)],
    ],
    ids=["chunks and not", "an old client", "only the head"],
)
def test_the_parser_writes_what_h11_writes(exchanges):
    assert spelled(MeteredParser(), exchanges) == spelled(h11.Connection(h11.SERVER), exchanges)


@pytest.mark.parametrize("events", [[*OF_UNKNOWN_LENGTH, DATA[0]], [DATA[0]]])
def test_what_may_not_be_sent_is_refused(events):
    with pytest.raises(h11.LocalProtocolError):
        spelled(MeteredParser(), [(KEEP, events)])


@pytest.mark.parametrize("has_usage", [False, True])
def test_a_chunk_has_its_choice_where_the_others_have_theirs(has_usage):
    heading = Heading("cmpl-1", 7, 'a model"[]', "[]")
    choice = {"index": 0, "text": "[]"}
    chunk = ChunkSpeller(heading, "text_completion", has_usage=has_usage).around(to_json(choice))
    rest = {"usage": None} if has_usage else {}
    whole = heading.over("text_completion", choices=[choice], **rest)
    assert list(json.loads(b"".join(chunk.pieces)).items()) == list(whole.items())
