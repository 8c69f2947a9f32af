"""The FastAPI application: routes, errors in the shape of their API, `/openapi.json`."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import structlog
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp

from control_plane.access.keyring import Keyring
from control_plane.http import anthropic_messages, chat, completions, responses, text_routes
from control_plane.http.anthropic_errors import (
    COUNT_TOKENS_PATH,
    MESSAGES_PATH,
    MessageErrorResponse,
    failure_response,
)
from control_plane.http.anthropic_routes import anthropic_routes
from control_plane.http.backend import Backend
from control_plane.http.document import complete_document
from control_plane.http.doorman import Doorman
from control_plane.http.edge import API_PATHS, UNCOUNTED_PATHS, Edge
from control_plane.http.errors import (
    ErrorResponse,
    HttpFailure,
    HttpRefusal,
    describe_error,
    describe_fault,
)
from control_plane.http.openai_routes import openai_routes
from control_plane.http.operations import operation_routes
from control_plane.http.request_id import current_request_id
from control_plane.metrics.visits import FAULT, note_error
from planes.errors import EngineError
from planes.near_names import did_you_mean

API_VERSION = "v1"

_log = structlog.get_logger(__name__)

_FIELD_NAMES = {
    "/v1/completions": completions.NAMES,
    "/v1/chat/completions": chat.NAMES,
    "/v1/responses": responses.NAMES,
    MESSAGES_PATH: anthropic_messages.NAMES,
    COUNT_TOKENS_PATH: anthropic_messages.NAMES,
    "/tokenize": text_routes.TOKENIZE_NAMES,
    "/detokenize": text_routes.DETOKENIZE_NAMES,
}

_MAX_COMPARED = 64
"""Characters of a path that is unknown: comparing takes time."""

_LIKENESS = 0.8
"""Of an unknown path to the one that was meant: /v1/moderations is none of ours, /health is."""

_REFUSALS = {
    400: "what is asked for is wrong, or not supported",
    401: "the server wants a token, or does not know this one",
    404: "unknown model or path",
    408: "the request did not come in time",
    413: "the body is too large",
    415: "the body is not JSON",
    429: "too many requests wait; see Retry-After",
    431: "path and headers are too large",
    500: "a fault of the server",
    503: "the server starts, drains, has lost its compute plane, or has no connection left",
}


def make_app(
    backend: Backend, keyring: Keyring | None = None, cors_origins: Sequence[str] = ()
) -> ASGIApp:
    """Return the whole application.

    `keyring`: whose tokens it asks for, None: for none. `cors_origins`: of web pages whose browsers
    may use it, `*`: all; they send the token themselves, browsers are not told to.
    """
    handlers: dict[Any, Any] = {
        EngineError: _on_engine_error,
        HttpRefusal: _on_refusal,
        HTTPException: _on_http_exception,
        RequestValidationError: _on_invalid_path,
        ClientDisconnect: _on_client_gone,
        Exception: _on_fault,
    }
    app = FastAPI(
        title="Hetero-Paged-Infer",
        description="OpenAI- and Anthropic-compatible inference.",
        version=API_VERSION,
        docs_url=None,  # they would load their scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers=handlers,
        responses=_refusals(ErrorResponse),
    )
    app.include_router(openai_routes(backend))
    app.include_router(anthropic_routes(backend), responses=_refusals(MessageErrorResponse))
    app.include_router(text_routes.text_routes(backend))
    app.include_router(operation_routes(backend))
    complete_document(app, needs_token=keyring is not None)
    guarded: ASGIApp = app if keyring is None else Doorman(app, keyring)
    if cors_origins:  # outside of the door: a browser asks first, without a token
        guarded = CORSMiddleware(
            guarded,
            allow_origins=cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "request-id", "retry-after"),
        )
    return Edge(guarded, backend.visits)


def _refusals(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": model, "description": text} for status, text in _REFUSALS.items()}


async def _on_engine_error(request: Request, error: EngineError) -> Response:
    failure = describe_error(error, _FIELD_NAMES.get(request.url.path))
    note_error(failure.reason)  # in the word that the client reads
    if failure.status == HTTPStatus.INTERNAL_SERVER_ERROR:
        message = failure.error["message"]
        _log.error("http request refused", **failure.log_facts, error=message)
    else:
        _log.info("http request refused", **failure.log_facts)
    return _told(request, failure)


async def _on_refusal(request: Request, error: HttpRefusal) -> Response:
    note_error(error.failure.reason)
    _log.info("http request refused", **error.failure.log_facts)
    return _told(request, error.failure)


async def _on_http_exception(request: Request, error: HTTPException) -> Response:
    """Answer for an unknown path, and for a method that a path does not have."""
    asked = f"{request.method} {request.url.path}"
    message = {
        HTTPStatus.NOT_FOUND: f"Invalid URL ({asked}){_where_it_is(request)}",
        HTTPStatus.METHOD_NOT_ALLOWED: f"Method not allowed ({asked}).",
    }.get(HTTPStatus(error.status_code), str(error.detail))
    code = HTTPStatus(error.status_code).name.lower()
    refusal = HttpRefusal(error.status_code, message, code=code, headers=error.headers)
    note_error(refusal.failure.reason)
    return _told(request, refusal.failure)


def _where_it_is(request: Request) -> str:
    """Return the end of the answer for an unknown path: the one that is nearly it, or the list.

    Most often /v1 is missing, or there twice.
    """
    path = request.url.path
    paths = () if len(path) > _MAX_COMPARED else API_PATHS | UNCOUNTED_PATHS
    return did_you_mean(path, paths, _LIKENESS) or ". The routes are listed at /openapi.json."


async def _on_invalid_path(request: Request, error: Exception) -> Response:
    """Answer for what FastAPI itself finds wrong, which is no body."""
    refusal = HttpRefusal(HTTPStatus.BAD_REQUEST, str(error), code="invalid_value")
    note_error(refusal.failure.reason)
    return _told(request, refusal.failure)


async def _on_client_gone(_request: Request, _error: ClientDisconnect) -> None:
    """Answer nothing: who left while his body was read is no fault of ours, and hears nothing."""


async def _on_fault(request: Request, _error: Exception) -> Response:
    """Answer for a fault of ours; `Edge` logs it."""
    note_error(FAULT)
    return _told(request, describe_fault(current_request_id()))


def _told(request: Request, failure: HttpFailure) -> Response:
    return failure_response(failure, request.scope["path"])
