"""What both planes are told of themselves as processes: their log, and the pipes of a parent."""

from __future__ import annotations

from dataclasses import dataclass

from planes.logs import LOG_FORMATS, LOG_LEVELS
from planes.settings import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    """Declared here once; each plane's configuration has them with `as_in`."""

    log_level: str = setting("info", help="least severe log line shown", choices=LOG_LEVELS)
    log_format: str = setting(
        "auto", help="console, json, or by whether stderr is a terminal", choices=LOG_FORMATS
    )
    ready_fd: int | None = setting(
        None, help="descriptor that gets one line once the plane serves", minimum=0
    )
    lifeline_fd: int | None = setting(
        None, help="descriptor whose end of file ends the plane", minimum=0
    )
