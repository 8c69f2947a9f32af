"""Bodies of requests: bounded before they are read, parsed once, refused as OpenAI refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any

import pydantic
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from control_plane.http.errors import HttpRefusal, describe_problems

MAX_BODY_BYTES = 8 << 20
MAX_INLINE_BYTES = 32 << 10
"""Longer bodies are parsed on another thread: the event loop must not wait milliseconds."""

BODY_PATIENCE_S = 60.0
"""A body comes within this time, or not at all."""

_Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class JsonRoute(APIRoute):
    """A route whose body, where it has one, is read and checked here and not by FastAPI.

    FastAPI's own reading knows no bound, takes text for numbers, and lets lone surrogates in; its
    part is the schema in `/openapi.json`.
    """

    def get_route_handler(self) -> _Handler:
        """Return the handler, which gets a request that has its body already."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        model: type[BaseModel] = self.body_field.field_info.annotation  # type: ignore[assignment]

        async def read_and_handle(request: Request) -> Response:
            data = await read_body(request)
            return await handle(_ParsedRequest(request, data, await parse_body(model, data)))

        return read_and_handle


class _ParsedRequest(Request):
    """A request whose JSON is a model already; FastAPI takes an instance as it is."""

    def __init__(self, request: Request, data: bytes, parsed: BaseModel) -> None:
        super().__init__(request.scope, request.receive)
        self._body = data
        self._parsed = parsed

    async def json(self) -> BaseModel:
        """Return the model."""
        return self._parsed


async def read_body(request: Request) -> bytes:
    """Return the body. Raises HttpRefusal for one that is too large, of another kind, or late."""
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
    if declared is not None and int(declared) > MAX_BODY_BYTES:  # the HTTP parser lets digits in
        raise _too_large(declared)
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_PATIENCE_S):
            async for chunk in request.stream():
                data += chunk
                if len(data) > MAX_BODY_BYTES:
                    raise _too_large("more")
    except TimeoutError:
        raise HttpRefusal(
            HTTPStatus.REQUEST_TIMEOUT,
            f"The body did not come within {BODY_PATIENCE_S:g} s.",
            code="request_timeout",
            headers={"Connection": "close"},
        ) from None
    return bytes(data)


async def parse_body(model: type[BaseModel], data: bytes) -> BaseModel:
    """Return the body as its model. Raises HttpRefusal."""
    try:
        if len(data) <= MAX_INLINE_BYTES:
            return model.model_validate_json(data)
        return await asyncio.to_thread(model.model_validate_json, data)
    except pydantic.ValidationError as error:
        raise describe_problems(error) from None


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


def _too_large(size: str) -> HttpRefusal:
    return HttpRefusal(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"The body has at most {MAX_BODY_BYTES} bytes, got {size}.",
        code="request_too_large",
    )
