"""Log lines of child planes are told from everything else, and put into words."""

from __future__ import annotations

import json
import sys

import pytest
import structlog

from hetero_infer.child_log import readable
from planes.logs import configure_logging


@pytest.fixture
def logged(capsys):
    """What `planes.logs` writes for a machine."""
    configure_logging(plane="control", log_format="json", owns_process=False)
    yield lambda: capsys.readouterr().err
    structlog.reset_defaults()


def test_a_log_line_is_its_event_and_its_facts(logged):
    structlog.get_logger().warning("still waiting", address="unix:/a b", seconds=10.5, 你="好")
    assert readable(logged().rstrip("\n")) == (
        "hetero-infer: control plane: still waiting (address: unix:/a b, seconds: 10.5, 你: 好)"
    )


def test_an_exception_is_shown_with_its_frames(logged):
    try:
        json.loads("{")
    except ValueError:
        structlog.get_logger().error("broken", exc_info=sys.exc_info())
    first, *frames, last = readable(logged().rstrip("\n")).splitlines()
    assert first == "hetero-infer: control plane: broken"
    assert last.startswith("JSONDecodeError: Expecting property name")
    assert any(f'File "{__file__}"' in frame for frame in frames)


@pytest.mark.parametrize(
    "line", ["", "Traceback (most recent call last):", "{", "[1]", "{}", '{"event": 1}', "{" * 9999]
)
def test_what_is_no_log_line_is_left_to_others(line):
    assert readable(line) is None
