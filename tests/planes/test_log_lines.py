from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest

from hetero_infer.config import child_environment
from planes import logs

SCRIPT = """
import logging, sys, threading
import structlog
from planes.logs import configure_logging
configure_logging(plane="control", level=sys.argv[1], log_format=sys.argv[2])
log = structlog.get_logger()
log.debug("quiet")
with structlog.contextvars.bound_contextvars(request_id="r-1"):
    log.info("hello", step_id=3)
thread = threading.Thread(target=lambda: log.warning("from a thread"))
thread.start()
thread.join()
prompt = "a " + "secret"
try:
    raise ValueError("boom")
except ValueError:
    log.exception("failed")
logging.getLogger("library").info("chatter")
try:
    raise RuntimeError("took no answer")
except RuntimeError:
    logging.getLogger("grpc._cython.cygrpc").exception(
        "ExecuteBatchError raised in core by servicer method [%s]", "/a/B"
    )
try:
    raise KeyError("lost")
except KeyError:
    logging.getLogger("library").warning("a library's %s", "warning", exc_info=True)
"""


def run(level: str, log_format: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, level, log_format],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert result.stdout == ""
    return result.stderr


def test_a_json_log_is_one_object_a_line_with_plane_level_time_and_bound_ids():
    lines = run("info", "json").splitlines()
    hello, thread, failed, lowered, library = map(json.loads, lines)
    assert hello["event"] == "hello"
    assert hello["level"] == "info"
    assert hello["request_id"] == "r-1"
    assert hello["step_id"] == 3
    assert hello["timestamp"].endswith("Z")
    assert {line["plane"] for line in (hello, thread, failed, library)} == {"control"}
    assert (lowered["level"], "exception" in lowered) == ("info", False)
    assert failed["exception"][0]["exc_value"] == "boom"
    assert (library["event"], library["level"]) == ("a library's warning", "warning")
    assert library["logger"] == "library"
    assert library["exception"][0]["exc_type"] == "KeyError"
    assert library["timestamp"].endswith("Z")


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_a_traceback_shows_no_value_of_a_variable(log_format):
    text = run("info", log_format)
    assert "boom" in text
    assert "a secret" not in text


@pytest.mark.parametrize(
    ("environment", "has_colours"),
    [
        ({}, True),
        ({"NO_COLOR": "1"}, False),
        ({"NO_COLOR": ""}, True),
        ({"TERM": "dumb"}, False),
    ],
)
def test_a_terminal_has_colours_unless_they_are_unwanted(monkeypatch, environment, has_colours):
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert logs._has_colours() is has_colours
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    assert not logs._has_colours()


def test_in_a_pipe_the_automatic_format_is_json():
    assert json.loads(run("info", "auto").splitlines()[0])["event"] == "hello"


def test_the_level_hides_what_is_less_severe():
    text = run("error", "console")
    assert "hello" not in text
    assert "from a thread" not in text
    assert "failed" in text
    assert "boom" in text


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_lines_of_processes_that_share_a_pipe_do_not_mix_even_without_buffers(log_format):
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # keeps writes apart
    with ours, its:
        subprocess.run(
            [sys.executable, "-c", SCRIPT, "info", log_format],
            env={**child_environment(), "PYTHONUNBUFFERED": "1"},
            stderr=its.fileno(),
            check=True,
            timeout=60,
        )
        its.close()
        writes = list(iter(lambda: ours.recv(1 << 16), b""))
    assert len(writes) == 5  # hello, from a thread, failed, what gRPC says, a library's warning
    assert all(written.endswith(b"\n") for written in writes)
