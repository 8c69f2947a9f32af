"""Errors as Anthropic's clients know them, on the routes of its Messages API.

`{"type": "error", "error": {"type", "message", "details"}, "request_id"}`: the message names the
field that is wrong, and `details` have the code and the field of OpenAI's shape, for programs.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Final, Literal

from pydantic import BaseModel
from starlette.responses import JSONResponse

from control_plane.http.errors import INVALID_REQUEST, HttpFailure
from control_plane.http.request_id import current_request_id

MESSAGES_PATH: Final = "/v1/messages"
MODELS_PATH: Final = "/v1/models"
"""Of both APIs: its answer has the fields of either."""
COUNT_TOKENS_PATH: Final = "/v1/messages/count_tokens"

TOO_LONG: Final = "context_length_exceeded"

_TYPES: Final = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}


class MessageErrorDetails(BaseModel):
    """`error_code`: a stable word for programs; `param`: the field."""

    error_code: str | None
    param: str | None


class MessageErrorBody(BaseModel):
    """What went wrong. The message names the field, if there is one, and its limit."""

    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "not_found_error",
        "request_too_large",
        "rate_limit_error",
        "api_error",
        "timeout_error",
        "overloaded_error",
    ]
    message: str
    details: MessageErrorDetails


class MessageErrorResponse(BaseModel):
    """The body of every answer that is no success, and the event that ends a stream early."""

    type: Literal["error"]
    error: MessageErrorBody
    request_id: str


def is_anthropic(path: str) -> bool:
    """Whether a path is one of the Messages API, whether there is such a route or not."""
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")


def takes_api_key(path: str) -> bool:
    """Whether a token may be shown as Anthropic's clients do: of its API, and of models."""
    return is_anthropic(path) or path == MODELS_PATH or path.startswith(f"{MODELS_PATH}/")


def anthropic_error(failure: HttpFailure, request_id: str) -> dict[str, object]:
    """Spell a failure as Anthropic does."""
    fallback = INVALID_REQUEST if failure.status < HTTPStatus.INTERNAL_SERVER_ERROR else "api_error"
    message, param = failure.error["message"] or "", failure.error["param"]
    if failure.error["code"] == TOO_LONG and param != "max_tokens":
        message = f"prompt is too long: {message}"  # upon which its clients shorten it
    elif param is not None and param not in message:
        message = f"{param}: {message}"
    told = {
        "type": _TYPES.get(HTTPStatus(failure.status), fallback),
        "message": message,
        "details": {"error_code": failure.error["code"], "param": param},
    }
    return {"type": "error", "error": told, "request_id": request_id}


def failure_response(failure: HttpFailure, path: str) -> JSONResponse:
    """Return the response that tells a failure in the words of the API that the path is of."""
    if not is_anthropic(path):
        return failure.to_response()
    body = anthropic_error(failure, current_request_id())
    return JSONResponse(body, int(failure.status), failure.headers)
