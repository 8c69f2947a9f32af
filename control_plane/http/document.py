"""`/openapi.json`: what FastAPI cannot know is added, what it takes for granted is taken out."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from control_plane.http.chat_answer_schema import ChatChunk
from control_plane.http.completion_schema import CompletionChunk
from control_plane.http.doorman import OPEN_PATHS
from control_plane.http.responses_answer_schema import ResponseEvent

_STREAMED: tuple[type[BaseModel], ...] = (CompletionChunk, ChatChunk, ResponseEvent)

_OF_BODIES = ("413", "415")
_OF_THE_MODEL = ("404", "429")
"""Answers of routes that work with the model; `/metrics` may be missing, too."""

_SECURITY = "token"

_REQUEST_ID = {
    "description": "the request's name in the server's log",
    "schema": {"type": "string"},
}
_RETRY_AFTER = {
    "description": "seconds after which trying again makes sense",
    "schema": {"type": "integer", "minimum": 0},
}
_AUTHENTICATE = {"description": "how to authenticate", "schema": {"type": "string"}}


def complete_document(app: FastAPI, *, needs_token: bool) -> None:
    """Let the application's document say everything; `needs_token`: of its clients."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = generate()
            _add_events(document["components"]["schemas"])
            if needs_token:
                scheme = {"type": "http", "scheme": "bearer"}
                document["components"]["securitySchemes"] = {_SECURITY: scheme}
            for path, operations in document["paths"].items():
                for operation in operations.values():
                    _complete(path, operation, needs_token=needs_token and path not in OPEN_PATHS)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign] # FastAPI's documented way


def _add_events(schemas: dict[str, Any]) -> None:
    """Add the schemas of streamed events; take out those of FastAPI's own refusals."""
    _, events = models_json_schema(
        [(model, "serialization") for model in _STREAMED],
        ref_template="#/components/schemas/{model}",
    )
    for name, definition in events["$defs"].items():
        schemas.setdefault(name, definition)
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)


def _complete(path: str, operation: dict[str, Any], *, needs_token: bool) -> None:
    responses = operation["responses"]
    # FastAPI's own answer to what is invalid: here that is a 400.
    unheard_of = {"422"}
    if "requestBody" not in operation:
        unheard_of.update(_OF_BODIES)
    if "operations" in operation.get("tags", ()):
        unheard_of.update(_OF_THE_MODEL)
    if path == "/metrics":
        unheard_of.discard("404")
    if path in OPEN_PATHS:
        unheard_of.add("401")
    for status in unheard_of:
        responses.pop(status, None)
    for status, response in responses.items():
        headers = response.setdefault("headers", {})
        headers["X-Request-Id"] = _REQUEST_ID
        if int(status) in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
            headers["Retry-After"] = _RETRY_AFTER
        if int(status) == HTTPStatus.UNAUTHORIZED:
            headers["WWW-Authenticate"] = _AUTHENTICATE
    if needs_token:
        operation["security"] = [{_SECURITY: []}]
