"""The tokens a server takes, kept as fresh as their file."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import structlog

from control_plane.access.limits import Meter
from control_plane.access.principal import Principal
from control_plane.access.token_file import hash_of, read_tokens
from control_plane.errors import TokenMissingError, TokenUnknownError, UnreadableTokensError
from planes.errors import ConfigError
from planes.pem import stamp

MAX_HEADER_CHARACTERS = 512
"""Of an `Authorization` header; ours has 54."""

SCHEME = "bearer"

_log = structlog.get_logger(__name__)


class Keyring:
    """Says who a token's holder is; lives on the event loop.

    Looks at the file's times, size and inode before every answer: a revoked token is refused from
    the next request on, while requests under way go on. A file that cannot be used, or is gone,
    changes nothing, is named in the log once, and is not parsed again before it changes.

    Raises ConfigError for a file that cannot be used at the start.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._meters: dict[str, Meter] = {}
        self._principals: dict[str, Principal] = {}
        self._complained_of: object = None
        self._useless: object = None
        self._stamp = stamp(str(path))
        self._read()

    def __len__(self) -> int:
        return len(self._principals)

    def authenticate(self, header: str | None) -> Principal:
        """Return whose token an `Authorization` header has.

        The token is looked up by its hash: how long that takes says nothing about any token of the
        file, since nobody can choose a hash. Raises TokenMissingError, TokenUnknownError.
        """
        if not header:
            raise TokenMissingError("this server wants a token: Authorization: Bearer TOKEN")
        scheme, _, token = header.partition(" ")
        if scheme.lower() != SCHEME or not token.strip() or len(header) > MAX_HEADER_CHARACTERS:
            raise TokenMissingError("the Authorization header must be: Bearer TOKEN")
        return self.holder_of(token)

    def holder_of(self, token: str) -> Principal:
        """Return whose token it is, however it was shown. Raises as `authenticate` does."""
        self.refresh()
        token = token.strip()
        if not token or len(token) > MAX_HEADER_CHARACTERS:
            raise TokenMissingError(
                f"a token has 1 to {MAX_HEADER_CHARACTERS} characters, got {len(token)}"
            )
        principal = self._principals.get(hash_of(token))
        if principal is None:
            raise TokenUnknownError("the server does not know this token")
        return principal

    def refresh(self) -> None:
        """Read the file again if it has changed."""
        found = stamp(str(self._path))
        if found in (self._stamp, self._useless):
            return
        try:
            self._read()
        except ConfigError as error:
            # What kept it from being read (too many open files, say) may pass, and costs little.
            if not isinstance(error, UnreadableTokensError):
                self._useless = found
            if found != self._complained_of:
                self._complained_of = found
                _log.error("the changed file of tokens is not used", error=error.message)
            return
        self._stamp, self._useless = found, None
        _log.info("file of tokens read again", num_tokens=len(self))

    def _read(self) -> None:
        now = self._clock()
        entries = read_tokens(self._path)
        before, self._meters = self._meters, {}
        for name, meter in before.items():
            if meter.num_requests:
                self._meters[name] = meter  # a token that comes back finds what still runs
        self._principals = {}
        for entry in entries:
            meter = before.get(entry.name) or Meter(entry.limits, now)
            meter.set_limits(entry.limits, now)
            self._meters[entry.name] = meter
            self._principals[entry.sha256] = Principal(
                entry.name,
                meter,
                self._clock,
                is_admin=entry.admin,
                shares_cache=entry.shares_cache,
            )
