"""Who may come in over HTTP: everybody to the checks of the service itself, others with a token."""

from __future__ import annotations

import structlog
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from control_plane.access.keyring import Keyring
from control_plane.access.principal import Principal, acting_as
from control_plane.errors import TokenMissingError
from control_plane.http.anthropic_errors import failure_response, is_anthropic, takes_api_key
from control_plane.http.errors import describe_error
from control_plane.metrics.visits import note_error
from planes.errors import EngineError

OPEN_PATHS = frozenset({"/health", "/healthz", "/readyz", "/openapi.json"})
"""Load balancers and orchestrators have no token, and these tell nobody's secrets."""

API_KEY = "x-api-key"
"""The header in which Anthropic's clients show a token, without a scheme."""

_log = structlog.get_logger(__name__)


class Doorman:
    """Lets requests with a token of the keyring through, each in the name of its token."""

    def __init__(self, app: ASGIApp, keyring: Keyring) -> None:
        self._app = app
        self._keyring = keyring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or answer 401 before its body is read."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        try:
            principal = self._authenticate(Headers(scope=scope), scope["path"])
        except EngineError as error:
            note_error(error.reason)
            _log.info("http request refused", reason=error.reason, error=error.message)
            failure = describe_error(error)
            response = failure_response(failure, scope["path"])
            response.headers["www-authenticate"] = "Bearer"
            await response(scope, receive, send)
            return
        with (
            structlog.contextvars.bound_contextvars(token_name=principal.name),
            acting_as(principal),
        ):
            await self._app(scope, receive, send)

    def _authenticate(self, headers: Headers, path: str) -> Principal:
        """Return who asks. Where there is an `Authorization` it counts, and not the other header.

        Raises TokenMissingError, TokenUnknownError.
        """
        shown = headers.getlist("authorization")
        keys = headers.getlist(API_KEY) if takes_api_key(path) else []
        if len(keys) == 1 and not shown:
            return self._keyring.holder_of(keys[0])
        if is_anthropic(path) and not shown:
            raise TokenMissingError(
                f"this server wants a token: {API_KEY}: TOKEN, once, or Authorization: Bearer TOKEN"
            )
        return self._keyring.authenticate(shown[0] if len(shown) == 1 else None)
