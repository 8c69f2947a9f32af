"""Who may come in over HTTP: everybody to the checks of the service itself, others with a token."""

from __future__ import annotations

import structlog
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from control_plane.access.keyring import Keyring
from control_plane.access.principal import acting_as
from control_plane.http.errors import describe_error
from control_plane.metrics.visits import note_error
from planes.errors import EngineError

OPEN_PATHS = frozenset({"/health", "/healthz", "/readyz", "/openapi.json"})
"""Load balancers and orchestrators have no token, and these tell nobody's secrets."""

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
        headers = Headers(scope=scope).getlist("authorization")
        try:
            principal = self._keyring.authenticate(headers[0] if len(headers) == 1 else None)
        except EngineError as error:
            note_error(error.reason)
            _log.info("http request refused", reason=error.reason, error=error.message)
            response = describe_error(error).to_response()
            response.headers["www-authenticate"] = "Bearer"
            await response(scope, receive, send)
            return
        with (
            structlog.contextvars.bound_contextvars(token_name=principal.name),
            acting_as(principal),
        ):
            await self._app(scope, receive, send)
