"""`/openapi.json`: what FastAPI cannot know is added, what it takes for granted is taken out."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from control_plane.http.anthropic_answer_schema import MessageEvent
from control_plane.http.anthropic_errors import is_anthropic, takes_api_key
from control_plane.http.chat_answer_schema import ChatChunk
from control_plane.http.completion_schema import CompletionChunk
from control_plane.http.doorman import API_KEY, OPEN_PATHS
from control_plane.http.errors import ErrorResponse
from control_plane.http.responses_answer_schema import ResponseEvent

_STREAMED: tuple[type[BaseModel], ...] = (
    CompletionChunk,
    ChatChunk,
    ResponseEvent,
    MessageEvent,
)

_OF_BODIES = ("413", "415")
_OF_THE_MODEL = ("404", "429")
"""Answers of routes that work with the model; `/metrics` may be missing, too."""

_SECURITY = "token"
_KEY_SECURITY = "api_key"
_SCHEMES = {
    _SECURITY: {"type": "http", "scheme": "bearer"},
    _KEY_SECURITY: {"type": "apiKey", "in": "header", "name": API_KEY},
}
_REF = "#/components/schemas/"

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
                document["components"]["securitySchemes"] = _SCHEMES
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
        ref_template=f"{_REF}{{model}}",
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
        if is_anthropic(path):
            headers["Request-Id"] = _REQUEST_ID
        if int(status) in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
            headers["Retry-After"] = _RETRY_AFTER
        if int(status) == HTTPStatus.UNAUTHORIZED:
            headers["WWW-Authenticate"] = _AUTHENTICATE
    if needs_token:
        operation["security"] = [{_SECURITY: []}]
        if takes_api_key(path):
            operation["security"].append({_KEY_SECURITY: []})


def declared_answers(
    whole: type[BaseModel], event: type[BaseModel], *, is_typed: bool = False
) -> dict[str, Any]:
    """Declare an answer that is one object, or with `stream` server-sent events, for a route.

    `is_typed`: events have names, and their errors are among them.
    """
    if is_typed:
        said, named = _json_of(event), ["event", "data"]
    else:
        said = {"anyOf": [{"const": "[DONE]"}, _json_of(event), _json_of(ErrorResponse)]}
        named = ["data"]
    # Of each event: the document's version has no other place for it.
    fields = {"event": {"type": "string"}, "data": said}
    stream = {"schema": {"type": "object", "properties": fields, "required": named}}
    return {
        "response_model": whole,
        "responses": {HTTPStatus.OK.value: {"content": {"text/event-stream": stream}}},
    }


def _json_of(model: type[BaseModel]) -> dict[str, Any]:
    """Declare a text that is JSON."""
    schema = {"$ref": _REF + model.__name__}
    return {"type": "string", "contentMediaType": "application/json", "contentSchema": schema}
