"""The FastAPI application: routes, errors in OpenAI's shape, `/openapi.json`."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import structlog
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from control_plane.access.keyring import Keyring
from control_plane.http import chat, completions, responses, text_routes
from control_plane.http.backend import Backend
from control_plane.http.chat_schema import ChatChunk
from control_plane.http.completion_schema import CompletionChunk
from control_plane.http.doorman import Doorman
from control_plane.http.edge import Edge, current_request_id
from control_plane.http.errors import (
    ErrorResponse,
    HttpRefusal,
    describe_error,
    describe_fault,
)
from control_plane.http.openai_routes import openai_routes
from control_plane.http.operations import operation_routes
from control_plane.http.responses_schema import ResponseEvent
from control_plane.metrics.visits import FAULT, note_error
from planes.errors import EngineError

API_VERSION = "v1"

_log = structlog.get_logger(__name__)

_FIELD_NAMES = {
    "/v1/completions": completions.NAMES,
    "/v1/chat/completions": chat.NAMES,
    "/v1/responses": responses.NAMES,
    "/tokenize": text_routes.TOKENIZE_NAMES,
    "/detokenize": text_routes.DETOKENIZE_NAMES,
}

_STREAMED: tuple[type[BaseModel], ...] = (CompletionChunk, ChatChunk, ResponseEvent)

_REFUSALS = {
    400: "what is asked for is wrong, or not supported",
    401: "the server wants a token, or does not know this one",
    404: "unknown model or path",
    408: "the body did not come in time",
    413: "the body is too large",
    415: "the body is not JSON",
    429: "too many requests wait; see Retry-After",
    500: "a fault of the server",
    503: "the server starts, drains, or has lost its compute plane",
}


def make_app(backend: Backend, keyring: Keyring | None = None) -> ASGIApp:
    """Return the whole application; `keyring`: whose tokens it asks for, None: for none."""
    handlers: dict[Any, Any] = {
        EngineError: _on_engine_error,
        HttpRefusal: _on_refusal,
        HTTPException: _on_http_exception,
        RequestValidationError: _on_invalid_path,
        Exception: _on_fault,
    }
    app = FastAPI(
        title="Hetero-Paged-Infer",
        description="OpenAI-compatible inference.",
        version=API_VERSION,
        docs_url=None,  # they would load their scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers=handlers,
        responses={
            status: {"model": ErrorResponse, "description": text}
            for status, text in _REFUSALS.items()
        },
    )
    app.include_router(openai_routes(backend))
    app.include_router(text_routes.text_routes(backend))
    app.include_router(operation_routes(backend))
    _describe_events(app)
    return Edge(app if keyring is None else Doorman(app, keyring), backend.visits)


def _describe_events(app: FastAPI) -> None:
    """Add the schemas of streamed events to `/openapi.json`, where FastAPI knows none of them."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = generate()
            _, events = models_json_schema(
                [(model, "serialization") for model in _STREAMED],
                ref_template="#/components/schemas/{model}",
            )
            known = schema["components"]["schemas"]
            for name, definition in events["$defs"].items():
                known.setdefault(name, definition)
            for operations in schema["paths"].values():
                for operation in operations.values():
                    # FastAPI's own answer to what is invalid: here that is a 400.
                    operation["responses"].pop("422", None)
            for name in ("HTTPValidationError", "ValidationError"):
                known.pop(name, None)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign] # FastAPI's documented way


async def _on_engine_error(request: Request, error: EngineError) -> Response:
    failure = describe_error(error, _FIELD_NAMES.get(request.url.path))
    note_error(error.reason)
    is_ours = failure.status == HTTPStatus.INTERNAL_SERVER_ERROR
    tell = _log.error if is_ours else _log.info
    tell("http request refused", reason=error.reason, error=failure.error["message"])
    return failure.to_response()


async def _on_refusal(_: Request, error: HttpRefusal) -> Response:
    note_error(error.failure.reason)
    _log.info("http request refused", error=error.failure.error["message"])
    return error.failure.to_response()


async def _on_http_exception(request: Request, error: HTTPException) -> Response:
    """Answer for an unknown path, and for a method that a path does not have."""
    asked = f"{request.method} {request.url.path}"
    message = {
        HTTPStatus.NOT_FOUND: f"Invalid URL ({asked}).",
        HTTPStatus.METHOD_NOT_ALLOWED: f"Method not allowed ({asked}).",
    }.get(HTTPStatus(error.status_code), str(error.detail))
    code = HTTPStatus(error.status_code).name.lower()
    refusal = HttpRefusal(error.status_code, message, code=code, headers=error.headers)
    note_error(refusal.failure.reason)
    return refusal.failure.to_response()


async def _on_invalid_path(_: Request, error: Exception) -> Response:
    """Answer for what FastAPI itself finds wrong, which is no body."""
    refusal = HttpRefusal(HTTPStatus.BAD_REQUEST, str(error), code="invalid_value")
    note_error(refusal.failure.reason)
    return refusal.failure.to_response()


async def _on_fault(_request: Request, _error: Exception) -> Response:
    """Answer for a fault of ours; `Edge` logs it."""
    note_error(FAULT)
    return describe_fault(current_request_id()).to_response()
