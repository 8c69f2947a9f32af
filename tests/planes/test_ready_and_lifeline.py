from __future__ import annotations

import os
import threading

import pytest

from planes.errors import ConfigError
from planes.ready import MAX_REASON_BYTES, announce_failure, announce_ready, watch_lifeline

PATIENCE_S = 120.0


def test_ready_is_one_line_and_the_end_of_the_pipe():
    read, write = os.pipe()
    announce_ready(write, "127.0.0.1:5")
    with os.fdopen(read) as lines:
        assert lines.read() == "READY 127.0.0.1:5\n"


def test_a_failure_is_one_line_of_a_bound_length():
    read, write = os.pipe()
    announce_failure(write, "no such\n  file: " + "ü" * MAX_REASON_BYTES)
    os.close(write)
    with os.fdopen(read, "rb") as lines:
        said = lines.read()
    assert said.startswith("FAILED no such file: üü".encode())
    assert said.count(b"\n") == 1
    assert said.endswith(b"\n")
    assert len(said) == len(b"FAILED \n") + MAX_REASON_BYTES


def test_a_failure_that_nobody_listens_to_is_none_of_its_own():
    read, write = os.pipe()
    os.close(read)
    announce_failure(write, "no such file")
    os.close(write)


def test_without_a_pipe_nothing_is_announced_or_watched():
    announce_ready(None, "127.0.0.1:5")
    announce_failure(None, "no such file")
    watch_lifeline(None, lambda: pytest.fail("nobody's parent is gone"))


def test_a_ready_pipe_that_is_none_is_refused_by_key_and_number():
    read, write = os.pipe()
    os.close(read)
    os.close(write)
    with pytest.raises(ConfigError, match=f"ready_fd {write} cannot be written"):
        announce_ready(write, "127.0.0.1:5")


def test_the_lifelines_end_calls_once_and_nothing_before_does():
    read, write = os.pipe()
    gone = threading.Event()
    watch_lifeline(read, gone.set)
    os.write(write, b"still here")
    assert not gone.is_set()
    os.close(write)
    assert gone.wait(PATIENCE_S)
    os.close(read)
