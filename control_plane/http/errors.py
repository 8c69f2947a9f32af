"""Errors as OpenAI clients know them: `{"error": {message, type, param, code}}`.

An `EngineError` gets its status from the one table (`control_plane.api.status`); what HTTP alone
can get wrong (path, method, size, kind and spelling of a body) is an `HttpRefusal`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus

import pydantic
from pydantic import BaseModel
from pydantic_core import ErrorDetails
from starlette.responses import JSONResponse

from control_plane.api.status import http_status, shorten
from planes.errors import EngineError

MAX_PROBLEMS_READ = 64
"""A body may have a million mistakes; nobody is told of more than these."""

INVALID_REQUEST = "invalid_request_error"

_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}

_CODES = {"INVALID_REQUEST": "invalid_value", "TOKENIZATION_FAILED": "invalid_value"}
"""Reasons that have another name in OpenAI's API; the others go in lower case."""

RENAMED = ("max_tokens", "token_ids")
"""Fields that OpenAI's endpoints have other names for, and messages begin with."""

_FREE_KEYS = ("logit_bias", "metadata", "chat_template_kwargs")
"""Fields whose own keys are a caller's."""

PARAM = "param"
"""In the context of a problem: the field that it is about, below the place of the problem."""

THREAD_UNSUPPORTED = "thread_unsupported_request"
"""Anthropic's code, upon which its packages go on without a thread."""

_PROBLEM_CODES = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "json_invalid": "invalid_json",
    THREAD_UNSUPPORTED: THREAD_UNSUPPORTED,
}


class ErrorBody(BaseModel):
    """What went wrong. `param` names the field, `code` is a stable word for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """The body of every answer that is no success."""

    error: ErrorBody


@dataclass(frozen=True, slots=True)
class HttpFailure:
    """An answer that is no success: status, the inner error object, headers.

    `place`: as far as it is the server's own word, the `param`; a caller's own may be anything.
    """

    status: int
    error: dict[str, str | None]
    headers: dict[str, str] = field(default_factory=dict)
    place: str | None = None

    @property
    def reason(self) -> str:
        """What is told, in the spelling of an `EngineError`'s reason."""
        return (self.error["code"] or INVALID_REQUEST).upper()

    @property
    def log_facts(self) -> dict[str, str | None]:
        """What the log is told: nothing that quotes the request, as the message may."""
        return {"code": self.error["code"], "param": self.place}

    def to_response(self) -> JSONResponse:
        """Return the response that says so."""
        return JSONResponse({"error": self.error}, int(self.status), self.headers)


class HttpRefusal(Exception):
    """A request that is refused before it means anything to the engine.

    No EngineError: gRPC has nothing like it.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        place: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.failure = HttpFailure(
            status,
            error_object(status, message, param=param, code=code),
            dict(headers or {}),
            place,
        )


def error_object(
    status: int, message: str, *, code: str | None, param: str | None = None
) -> dict[str, str | None]:
    """Return the object under `error`."""
    fallback = INVALID_REQUEST if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
    kind = _TYPES.get(HTTPStatus(status), fallback)
    return {"message": shorten(message), "type": kind, "param": param, "code": code}


def describe_error(error: EngineError, field_names: Mapping[str, str] | None = None) -> HttpFailure:
    """Return what a client is told about an error; `field_names`: ours → those of the endpoint."""
    status = http_status(error)
    param = error.field
    if param is not None and field_names is not None:
        param = field_names.get(param, param)
    code = _CODES.get(error.reason, error.reason.lower())
    retry_after_s: float | None = getattr(error, "retry_after_s", None)
    headers = {} if retry_after_s is None else {"Retry-After": str(math.ceil(retry_after_s))}
    message = error.message
    if param is not None and error.field in RENAMED and message.startswith(error.field):
        message = f"{param}{message.removeprefix(error.field)}"  # as its caller calls it
    told = error_object(status, message, param=param, code=code)
    return HttpFailure(status, told, headers, place=param)


def describe_fault(request_id: str) -> HttpFailure:
    """Return what a client is told about a fault of ours: where to find it in the log, no more."""
    message = f"internal error; the server's log has it under request {request_id}"
    status = HTTPStatus.INTERNAL_SERVER_ERROR
    return HttpFailure(status, error_object(status, message, code="internal_error"))


def describe_problems(error: pydantic.ValidationError) -> HttpRefusal:
    """Return the refusal of a body that does not fit its model: its first problem, in one line."""
    count = error.error_count()
    if count > MAX_PROBLEMS_READ:
        return HttpRefusal(
            HTTPStatus.BAD_REQUEST, f"the body has {count} invalid fields", code="invalid_value"
        )
    problem = error.errors(include_url=False)[0]
    location = problem["loc"]
    if PARAM in problem.get("ctx", {}):
        location = (*location, problem["ctx"][PARAM])
    param = field_path(location)
    code = _PROBLEM_CODES.get(problem["type"], "invalid_value")
    return HttpRefusal(
        HTTPStatus.BAD_REQUEST,
        _say(problem, param),
        code=code,
        param=param or None,
        place=field_path(_own_part(location, problem["type"])) or None,
    )


def field_path(location: Sequence[str | int]) -> str:
    """Spell where a problem is, as in `messages[0].content`; tags of unions begin with `~`."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith("~"):
            path += f".{part}" if path else part
    return path


def _own_part(location: tuple[str | int, ...], kind: str) -> Sequence[str | int]:
    """Return a place without the names that only the caller knows."""
    if kind == "extra_forbidden":
        location = location[:-1]
    for index, part in enumerate(location):
        if part in _FREE_KEYS:
            return location[: index + 1]
    return location


def _say(problem: ErrorDetails, param: str) -> str:
    kind, message = problem["type"], problem["msg"]
    if kind == "missing":
        return f"Missing required parameter: '{param}'."
    if kind == "extra_forbidden":
        return f"Unknown or unsupported parameter: '{param}'."
    if kind == "json_invalid":
        return f"The body is not valid JSON: {message.removeprefix('Invalid JSON: ')}."
    message = message.removeprefix("Value error, ").replace(" after validation", "")
    for spelled in ("True", "False"):  # Python's, where JSON is spoken
        message = message.replace(f"should be {spelled}", f"should be {spelled.lower()}")
    given = problem["input"]
    if isinstance(given, str | int | float | bool) and kind not in ("value_error", "wrong"):
        said = str(given).lower() if isinstance(given, bool) else repr(given)
        message += f", got {shorten(said, 60)}"
    return f"Invalid '{param}': {message}." if param else f"Invalid body: {message}."
