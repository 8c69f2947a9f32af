"""What a command says of itself, and of the planes that it keeps alive."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

from planes.logs import configure_logging, writes_json

PLANE = "supervisor"
"""What stands where a plane's lines have its name."""


def teller(log_format: str, level: str) -> Callable[[str], None]:
    """Return what says a line: a warning where planes write JSON, else plain text."""
    return _tell_people if not writes_json(log_format) else _Json(level)


def warn_as_commands_do() -> None:
    """From now on, write what modules of planes warn of as this command's own lines."""
    import structlog

    def spell(_: object, level: str, event: structlog.typing.EventDict) -> str:
        facts = ", ".join(f"{name}: {value}" for name, value in event.items() if name != "event")
        return f"hetero-infer: {level}: {event['event']}" + (f" ({facts})" if facts else "")

    structlog.configure(
        processors=[spell],
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
    )


def _tell_people(line: str) -> None:
    sys.stderr.write(f"hetero-infer: {line}\n")
    sys.stderr.flush()


class _Json:
    def __init__(self, level: str) -> None:
        self._level = level

    def __call__(self, line: str) -> None:
        import structlog  # which takes a while, and mostly there is nothing to say

        configure_logging(plane=PLANE, level=self._level, log_format="json", owns_process=False)
        structlog.get_logger().warning(line)
