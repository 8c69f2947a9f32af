"""structlog, set up once per process: console lines for people, JSON lines for machines.

Logs go to stderr; stdout belongs to results. Prompt text and generated text are never logged at
info or above; request ids and step ids are bound with `structlog.contextvars`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import TextIO, cast

LOG_FORMATS = ("auto", "console", "json")
GRPC_CORE = "grpc._cython.cygrpc"
LOG_LEVELS = ("debug", "info", "warning", "error")


class _Stderr:
    """Whatever `sys.stderr` is when a line is written: a host program may replace it.

    A line that nobody can read any more is lost: what it tells of must go on, a shutdown above all.
    """

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            return sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.flush()


def lower_what_clients_do(record: logging.LogRecord) -> logging.LogRecord:
    """Make a line of information of gRPC's core giving up an answer that its client does not take.

    Who asked is gone, or takes no message of that size: that is no fault, and needs no traceback.
    """
    if record.name == GRPC_CORE and "ExecuteBatchError" in record.getMessage():
        record.levelno, record.levelname, record.exc_info = logging.INFO, "INFO", None
    return record


def writes_json(log_format: str) -> bool:
    """Whether lines are JSON: as said, or `auto` where stderr is no terminal."""
    if log_format == "auto":
        return sys.stderr is None or not sys.stderr.isatty()
    return log_format == "json"


def _has_colours() -> bool:
    """Whether stderr is a terminal that shows colours, and nobody wants none (no-color.org)."""
    environ = os.environ  # noqa: TID251 - no setting of ours, but what is known of the terminal
    is_unwanted = bool(environ.get("NO_COLOR")) or environ.get("TERM") == "dumb"
    return sys.stderr.isatty() and not is_unwanted


def configure_logging(
    *, plane: str, level: str = "info", log_format: str = "auto", owns_process: bool = True
) -> None:
    """Route structlog, and the standard library's logging of an own process, to stderr.

    `plane` is named in every line. `auto` is console on a terminal, JSON otherwise.
    """
    import structlog  # here, because the command line wants no more of this module than names

    threshold = logging.getLevelNamesMapping()[level.upper()]

    def add_plane(
        _: object, __: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        """Name the plane; not bound as a context variable, which other threads would not see."""
        event["plane"] = plane
        return event

    shared: list[structlog.typing.Processor] = [
        add_plane,
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    # Tracebacks without the values of variables: prompts and bearer tokens are among them.
    tracebacks = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    last: list[structlog.typing.Processor] = (
        [structlog.processors.ExceptionRenderer(tracebacks), structlog.processors.JSONRenderer()]
        if writes_json(log_format)
        else [
            structlog.dev.ConsoleRenderer(
                colors=_has_colours(), exception_formatter=structlog.dev.plain_traceback
            )
        ]
    )
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        # One write a line: processes share stderr, and `print` without buffers makes two of it.
        logger_factory=structlog.WriteLoggerFactory(file=cast(TextIO, _Stderr())),
        # Lines are rare; a cached logger would keep this configuration beyond the next one.
        cache_logger_on_first_use=False,
    )
    if owns_process:
        # What libraries say by themselves (the HTTP server of a bad request, say) looks the same.
        handler = logging.StreamHandler(cast(TextIO, _Stderr()))
        handler.setFormatter(
            structlog.stdlib.ProcessorFormatter(
                foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
                processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
            )
        )
        handler.addFilter(lambda record: lower_what_clients_do(record).levelno >= threshold)
        logging.basicConfig(level=max(threshold, logging.WARNING), handlers=[handler], force=True)
