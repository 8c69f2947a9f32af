"""What happens around every HTTP request: its id, its log line, its last line of defence."""

from __future__ import annotations

import time
import uuid
from http import HTTPMethod, HTTPStatus

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from control_plane.http.anthropic_errors import (
    COUNT_TOKENS_PATH,
    MESSAGES_PATH,
    MODELS_PATH,
    failure_response,
    is_anthropic,
)
from control_plane.http.errors import HttpRefusal, describe_fault
from control_plane.http.request_id import begin_request
from control_plane.metrics.visits import FAULT, HTTP, VisitMeter, note_error
from control_plane.tracing.trace_context import enter_trace, read_trace

MAX_CLIENT_ID_CHARACTERS = 128
MAX_HEAD_BYTES = 16 << 10
"""Of a request's path, query and headers, as of a gRPC call's metadata."""

CLIENT_GONE = 499
"""What proxies log for a request whose client did not wait; never sent."""

UNCOUNTED_PATHS = frozenset({"/health", "/healthz", "/readyz", "/metrics", "/openapi.json"})
"""Who watches the server is no client of it."""

API_PATHS = frozenset(
    {
        MODELS_PATH,
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/embeddings",
        MESSAGES_PATH,
        COUNT_TOKENS_PATH,
        "/tokenize",
        "/detokenize",
        "/tokenizer_info",
    }
)
_MODEL_PATH = f"{MODELS_PATH}/"
_METHODS = frozenset(HTTPMethod)

_log = structlog.get_logger(__name__)


def method_of(path: str) -> str:
    """Return what a path is called in metrics: one of a fixed set, whatever clients ask for."""
    if path in API_PATHS:
        return path
    return _MODEL_PATH + "{model}" if path.startswith(_MODEL_PATH) else "other"


class Edge:
    """Wraps the application: every answer has `X-Request-Id`, no fault leaves but as a 500.

    The id is ours. One that the client sends (`X-Request-Id`) is written to the log beside it, and
    is not used as a name: two clients may send the same. `visits`: counts the requests.
    """

    def __init__(self, app: ASGIApp, visits: VisitMeter) -> None:
        self._app = app
        self._visits = visits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = uuid.uuid4().hex
        begin_request(request_id)
        path = scope["path"] if scope["path"] in UNCOUNTED_PATHS else method_of(scope["path"])
        method = scope["method"] if scope["method"] in _METHODS else "other"
        bound = {"request_id": request_id, "method": f"{method} {path}"}
        theirs = Headers(scope=scope).get("x-request-id")
        if theirs is not None and theirs.isprintable():
            bound["client_request_id"] = theirs[:MAX_CLIENT_ID_CHARACTERS]
        trace = read_trace((k.decode("latin-1"), v) for k, v in scope["headers"])
        enter_trace(trace)
        if trace is not None:
            bound["trace_id"] = trace.trace_id
        with structlog.contextvars.bound_contextvars(**bound):
            if scope["path"] in UNCOUNTED_PATHS:
                await self._serve(request_id, scope, receive, send)
                return
            with self._visits.visit(HTTP, method_of(scope["path"])):
                await self._serve(request_id, scope, receive, send)

    async def _serve(self, request_id: str, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.monotonic()
        status = 0

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                if is_anthropic(scope["path"]):
                    headers["request-id"] = request_id  # as its clients look for it
            await send(message)

        try:
            if _head_bytes(scope) > MAX_HEAD_BYTES:
                await _refuse_head(scope, receive, send_named)
                return
            await self._app(scope, receive, send_named)
        except ClientDisconnect:
            pass  # while it sent its body
        # A fault must reach the log, whatever it is; the server goes on.
        except Exception:  # noqa: BLE001
            note_error(FAULT)
            _log.exception("http request failed")
            if status == 0:
                response = failure_response(describe_fault(request_id), scope["path"])
                await response(scope, receive, send_named)
        finally:
            _log.debug(
                "http request ended",
                status=status or CLIENT_GONE,
                seconds=time.monotonic() - started,
            )


def _head_bytes(scope: Scope) -> int:
    headers = sum(len(name) + len(value) for name, value in scope["headers"])
    return len(scope["path"]) + len(scope["query_string"]) + headers


async def _refuse_head(scope: Scope, receive: Receive, send: Send) -> None:
    failure = HttpRefusal(
        HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
        f"Path and headers have at most {MAX_HEAD_BYTES} bytes, got {_head_bytes(scope)}.",
        code="headers_too_large",
    ).failure
    note_error(failure.reason)
    response = failure_response(failure, scope["path"])
    await response(scope, receive, send)
