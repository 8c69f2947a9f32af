"""The id of the HTTP request that a task serves; `Edge` gives each one."""

from __future__ import annotations

from contextvars import ContextVar

_request_id: ContextVar[str] = ContextVar("http_request_id")


def current_request_id() -> str:
    """Return the id of the HTTP request this task serves."""
    return _request_id.get()


def begin_request(request_id: str) -> None:
    """Let this task, and tasks made within, serve the request of that id."""
    _request_id.set(request_id)
