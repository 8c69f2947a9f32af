"""What is said while the compute plane is waited for."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import grpc
import pytest
import structlog

from control_plane.engine import bring_up
from control_plane.engine.compute_client import ComputeClient
from control_plane.errors import LinkError, PlaneNotThereError
from planes.address import parse_address

LIMITS = SimpleNamespace()


class Clock:
    """Time passes by a second for each look at it."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        self.now += 1.0
        return self.now


def words_while_waiting(monkeypatch, error, *, attempts):
    """The events that are logged while so many attempts fail, one a second."""
    stop = threading.Event()
    left = [attempts]

    def describe():
        left[0] -= 1
        if not left[0]:
            stop.set()
        raise error

    monkeypatch.setattr(bring_up, "time", Clock())
    monkeypatch.setattr(bring_up, "RETRY_PAUSE_S", 0.0)
    client = SimpleNamespace(address="unix:/c.sock", describe=describe)
    with structlog.testing.capture_logs() as logged:
        assert bring_up.connect(client, LIMITS, stop=stop) is None
    return logged


def test_a_plane_that_starts_is_no_fault_and_how_long_it_has_taken_is_told(monkeypatch):
    error = PlaneNotThereError("the compute plane does not answer: there is no unix:/c.sock")
    first, *later = words_while_waiting(monkeypatch, error, attempts=45)
    assert (first["event"], first["log_level"]) == ("waiting for the compute plane", "info")
    assert [line["event"] for line in later] == [
        f"waiting for the compute plane to start, {waited} s so far (it compiles its kernels once, "
        "which takes about half a minute, and loads the model)"
        for waited in (10, 20, 40)
    ]
    assert not any("error" in line for line in later)


@pytest.mark.parametrize("reason", ["connection refused", "handshake failed"])
def test_a_plane_that_is_there_and_does_not_answer_is_told_with_the_reason(monkeypatch, reason):
    _, line = words_while_waiting(monkeypatch, LinkError(reason), attempts=12)
    assert line["event"] == "still waiting for the compute plane, 10 s so far"
    assert (line["log_level"], line["error"]) == ("warning", reason)


def test_a_server_that_is_no_compute_plane_is_told_from_one_that_does_not_answer(tmp_path):
    address = f"unix:{tmp_path}/other.sock"
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_insecure_port(address)
    server.start()
    client = ComputeClient(parse_address(address), controller="test")
    try:
        with pytest.raises(LinkError, match=f"at {address} is no compute plane: UNIMPLEMENTED"):
            client.describe()
    finally:
        client.shut_down()
        server.stop(None).wait()
