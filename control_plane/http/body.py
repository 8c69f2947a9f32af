"""Bodies of requests: bounded before they are read, parsed once, refused as OpenAI refuses."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any

import pydantic
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from control_plane.apart import run_apart
from control_plane.http.backend import Backend
from control_plane.http.body_size import check_elements
from control_plane.http.errors import HttpRefusal, describe_problems
from control_plane.http.wire import Wire
from control_plane.text.bounds import MAX_INLINE_BYTES

BODY_PATIENCE_S = 60.0
"""A body comes within this time, or not at all."""

_Handler = Callable[[Request], Coroutine[Any, Any, Response]]


def json_route(backend: Backend) -> type[APIRoute]:
    """Return a class of routes whose bodies are read and checked here and not by FastAPI.

    FastAPI's own reading knows no bound, takes text for numbers, and lets lone surrogates in; its
    part is the schema in `/openapi.json`.
    """

    class JsonRoute(APIRoute):
        def get_route_handler(self) -> _Handler:
            """Return the handler, which gets a request that has its body already."""
            handle = super().get_route_handler()
            if self.body_field is None:
                return handle
            model: type[BaseModel] = self.body_field.field_info.annotation  # type: ignore[assignment]

            async def read_and_handle(request: Request) -> Response:
                parsed = await read_body(request, backend, model)
                return await handle(_ParsedRequest(request, parsed))

            return read_and_handle

    return JsonRoute


class _ParsedRequest(Request):
    """A request whose JSON is a model already; FastAPI takes an instance as it is."""

    def __init__(self, request: Request, parsed: BaseModel) -> None:
        super().__init__(request.scope, request.receive)
        self._body = b"{}"  # there was one: that is all that FastAPI wants to know
        self._parsed = parsed

    async def json(self) -> BaseModel:
        """Return the model."""
        return self._parsed


async def read_body(request: Request, backend: Backend, model: type[BaseModel]) -> BaseModel:
    """Return the body as its model.

    Raises HttpRefusal for one that is too large, of another kind, late, or no such model. Raises
    EngineError for a large one while no model is loaded: nobody knows how large it may be.
    """
    _check_kind(request)
    declared = request.headers.get("content-length")
    if declared is not None and "transfer-encoding" in request.headers:
        # Two who read it differently, one behind the other, take one request for two.
        raise HttpRefusal(
            HTTPStatus.BAD_REQUEST,
            "The body has both a Content-Length and a Transfer-Encoding.",
            code="invalid_http",
            headers={"Connection": "close"},
        )
    max_model_len = backend.max_model_len
    most_tokens = model.max_tokens_of_body if issubclass(model, Wire) else 0
    if max_model_len is not None:
        max_model_len = max(max_model_len, most_tokens)
    with backend.held.body(max_model_len) as body:
        try:
            if declared is not None:
                body.check_length(int(declared))  # the HTTP parser lets digits in
            await body.receive(request.stream(), BODY_PATIENCE_S)
        except TimeoutError:
            raise HttpRefusal(
                HTTPStatus.REQUEST_TIMEOUT,
                f"The body did not come within {BODY_PATIENCE_S:g} s.",
                code="request_timeout",
                headers={"Connection": "close"},
            ) from None
        except HttpRefusal:
            if max_model_len is None:
                backend.require_engine()
            raise
        return await parse_body(model, bytes(body.data), max_model_len or 0)


async def parse_body(model: type[BaseModel], data: bytes, max_model_len: int) -> BaseModel:
    """Return the body as its model, ready for use. Raises HttpRefusal."""
    if len(data) <= MAX_INLINE_BYTES:
        return _parse(model, data)
    return await run_apart(_parse_large, model, data, max_model_len)


def _parse_large(model: type[BaseModel], data: bytes, max_model_len: int) -> BaseModel:
    check_elements(data, max_model_len)
    return _parse(model, data)


def _parse(model: type[BaseModel], data: bytes) -> BaseModel:
    try:
        parsed = model.model_validate_json(data)
    except pydantic.ValidationError as error:
        raise describe_problems(error) from None
    if isinstance(parsed, Wire):
        parsed.prepare()
    return parsed


def _check_kind(request: Request) -> None:
    """Refuse what is not said to be plain JSON in UTF-8.

    Browsers send a form or plain text anywhere without asking; JSON they ask about first.
    """
    kind, *parameters = request.headers.get("content-type", "").split(";")
    charset = next(
        (value for name, _, value in map(_split, parameters) if name == "charset"), "utf-8"
    )
    if kind.strip().lower() != "application/json" or charset not in ("utf-8", "utf8"):
        raise HttpRefusal(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            "The body must be sent as Content-Type: application/json (UTF-8), "
            f"got {request.headers.get('content-type', 'none')!r}.",
            code="unsupported_content_type",
        )
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise HttpRefusal(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"The body must not be compressed, got Content-Encoding: {encoding}.",
            code="unsupported_content_encoding",
        )


def _split(parameter: str) -> tuple[str, str, str]:
    name, equals, value = parameter.partition("=")
    return name.strip().lower(), equals, value.strip().strip('"').lower()
