"""Whoever holds a token, and what a request of theirs holds while it runs."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from control_plane.access.limits import Meter
from control_plane.core.request_options import RequestOptions
from control_plane.errors import AdminTokenRequiredError, TokenMissingError


class Lease:
    """One request under way, counted against its token's limits until `release`."""

    __slots__ = ("_clock", "_is_released", "_meter")

    def __init__(self, meter: Meter, clock: Callable[[], float]) -> None:
        self._meter = meter
        self._clock = clock
        self._is_released = False
        meter.begin(clock())

    def book(self, num_tokens: int) -> None:
        """Count tokens: of the prompt when it is taken, of the answer as they come."""
        if num_tokens > 0:
            self._meter.book(num_tokens, self._clock())

    def release(self) -> None:
        """Count the request no more; harmless when done before."""
        if not self._is_released:
            self._is_released = True
            self._meter.end()

    def share(self) -> LeaseShare:
        """Return what a part of the request holds: its tokens count here, it ends nothing."""
        return LeaseShare(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class LeaseShare(Lease):
    """A part of a request under way, whose lease others hold."""

    __slots__ = ("_whole",)

    def __init__(self, whole: Lease) -> None:
        self._whole = whole

    def book(self, num_tokens: int) -> None:
        """Count tokens, as those of the whole."""
        self._whole.book(num_tokens)

    def release(self) -> None:
        """Do nothing: the whole goes on."""


@dataclass(frozen=True, slots=True)
class Principal:
    """Who asks: a token's name, and what it may do.

    `shares_cache`: whether its prompts may meet those of others in the prefix cache, namely of
    tokens that share theirs, too.
    """

    name: str
    meter: Meter
    clock: Callable[[], float]
    is_admin: bool = False
    shares_cache: bool = False

    def check(self, num_requests: int) -> None:
        """Raise the error of the limit that so many requests more would break; none is begun."""
        self.meter.check(self.clock(), num_requests)

    def lease(self) -> Lease:
        """Return what a request holds while it runs.

        Raises TooManyConcurrentRequestsError, TokenRateError.
        """
        return Lease(self.meter, self.clock)

    def require_admin(self) -> None:
        """Raise AdminTokenRequiredError unless the token is an operator's."""
        if not self.is_admin:
            raise AdminTokenRequiredError(f"token {self.name!r} is not one with `admin`")

    def scope(self, options: RequestOptions) -> RequestOptions:
        """Return the options with the cache salt in this token's own namespace.

        Salts of all tokens are hashed together with whose they are: no client can spell another's.
        Raises ValidationError for options that are wrong before.
        """
        options.validate()
        if self.shares_cache:
            if not options.cache_salt:
                return options
            owner = b"shared"
        else:
            owner = b"token\0" + self.name.encode()
        digest = hashlib.sha256(owner + b"\0" + options.cache_salt.encode())
        return replace(options, cache_salt=digest.hexdigest())


_principal: ContextVar[Principal] = ContextVar("principal")


@contextlib.contextmanager
def acting_as(principal: Principal) -> Iterator[None]:
    """Let what this task does, and tasks made within, be done in a principal's name."""
    token = _principal.set(principal)
    try:
        yield
    finally:
        _principal.reset(token)


def current_principal() -> Principal:
    """Return in whose name this task acts. Raises TokenMissingError if in nobody's."""
    principal = _principal.get(None)
    if principal is None:
        raise TokenMissingError("this server wants a token: Authorization: Bearer TOKEN")
    return principal
