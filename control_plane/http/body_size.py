"""How large a body may be, in bytes and in what they spell, and how much of bodies is held at once.

Bytes are counted as they come, values before they are parsed: an object takes many times its bytes,
and parsing holds the interpreter from the first byte to the last.
"""

from __future__ import annotations

import asyncio
import re
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from control_plane.text.bounds import (
    MAX_ELEMENTS,
    MAX_INLINE_BYTES,
    MAX_NUMBERS,
    max_body_bytes,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterable

    from control_plane.http.errors import HttpRefusal

MAX_HELD_BYTES: Final = 64 << 20
"""Of all bodies that are being read or parsed, beyond the first `MAX_INLINE_BYTES` of each."""

GRACE_S: Final = 1.0
"""A body that takes longer gives way to others where all is held: slow ones keep nobody out."""

RETRY_AFTER_S: Final = 1

_TOO_LARGE: Final = "request_too_large"


def _refusal(
    status: int, message: str, *, code: str, headers: dict[str, str] | None = None
) -> HttpRefusal:
    # Imported here: a control plane without an HTTP port has no pydantic, and has this module.
    from control_plane.http.errors import HttpRefusal

    return HttpRefusal(status, message, code=code, headers=headers)


def _too_many() -> HttpRefusal:
    return _refusal(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "The server reads as many large bodies as it can.",
        code="too_many_large_requests",
        headers={"Retry-After": str(RETRY_AFTER_S)},
    )


# Possessive, and matched where a text begins, not searched: nothing is looked at twice where it
# does not end.
_TEXT: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


class Held:
    """The bytes of bodies that are held, of all requests of one application together."""

    def __init__(self, limit: int = MAX_HELD_BYTES) -> None:
        self._limit = limit
        self._incoming: dict[IncomingBody, None] = {}  # the longest here first
        self.num_bytes = 0

    def body(self, max_model_len: int | None) -> IncomingBody:
        """Return an empty body. `max_model_len`: of the loaded model; None: there is none."""
        return IncomingBody(self, max_body_bytes(max_model_len or 0))

    def begin(self, body: IncomingBody) -> None:
        """Note that a body comes; while it does, it may have to give way."""
        self._incoming[body] = None

    def end(self, body: IncomingBody) -> None:
        """Note that a body comes no more."""
        self._incoming.pop(body, None)

    def take(self, num_bytes: int, body: IncomingBody) -> bool:
        """Count some more of a body; False, and nothing is counted, where that is too many."""
        while self.num_bytes + num_bytes > self._limit:
            if not self._send_away_one(body):
                return False
        self.num_bytes += num_bytes
        return True

    def _send_away_one(self, other: IncomingBody) -> bool:
        """Let the longest here give way, if it is slow; whether there was one."""
        body = next(iter(self._incoming), other)
        if body is other or not body.is_slow:
            return False
        del self._incoming[body]
        body.send_away()
        return True


class IncomingBody:
    """One body as it comes; it must be left through its `with`. Raises HttpRefusal."""

    def __init__(self, held: Held, max_bytes: int) -> None:
        self._held = held
        self._num_counted = 0
        self._since: float | None = None
        self._patience: asyncio.Timeout | None = None
        self._is_away = False
        self.max_bytes = max_bytes
        self.data = bytearray()

    def __enter__(self) -> IncomingBody:
        return self

    def __exit__(self, *_: object) -> None:
        self._drop()

    @property
    def is_slow(self) -> bool:
        """Whether the rest of it could have been here by now."""
        now = asyncio.get_running_loop().time()
        return self._since is not None and now - self._since >= GRACE_S

    async def receive(self, chunks: AsyncIterable[bytes], patience_s: float) -> None:
        """Take all of it. Raises TimeoutError when it does not come in time."""
        self._since = asyncio.get_running_loop().time()
        self._held.begin(self)
        try:
            async with asyncio.timeout(patience_s) as self._patience:
                async for chunk in chunks:
                    self.add(chunk)
        except TimeoutError:
            if self._is_away:
                raise _too_many() from None
            raise
        finally:
            self._held.end(self)

    def add(self, chunk: bytes) -> None:
        """Take some more of it."""
        if self._is_away:
            raise _too_many()
        self.check_length(len(self.data) + len(chunk), "more")
        more = max(0, len(self.data) + len(chunk) - MAX_INLINE_BYTES) - self._num_counted
        if more > 0:
            if not self._held.take(more, self):
                raise _too_many()
            self._num_counted += more
        self.data += chunk

    def send_away(self) -> None:
        """Let others have its place."""
        self._is_away = True
        self._drop()
        if self._patience is not None:
            self._patience.reschedule(asyncio.get_running_loop().time())

    def _drop(self) -> None:
        self._held.num_bytes -= self._num_counted
        self._num_counted = 0
        self.data = bytearray()

    def check_length(self, size: int, said: str | None = None) -> None:
        """Refuse one that is, or is said to be, too long."""
        if size > self.max_bytes:
            raise _refusal(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"The body has at most {self.max_bytes} bytes, got {said or size}.",
                code=_TOO_LARGE,
            )


def check_elements(data: bytes, max_model_len: int) -> None:
    """Refuse JSON of too many values. It may be no JSON at all: its parser says so.

    Raises HttpRefusal. Takes at most 10 ms for each 8 MiB, and 20 ms for all the texts.
    """
    num_elements = num_commas = at = 0
    max_commas = MAX_NUMBERS + MAX_ELEMENTS + max_model_len
    while num_elements <= MAX_ELEMENTS and num_commas <= max_commas:
        start = data.find(b'"', at)
        found = None if start < 0 else _TEXT.match(data, start)
        end = len(data) if found is None else start
        num_elements += data.count(b"[", at, end) + data.count(b"{", at, end)
        num_commas += data.count(b",", at, end)
        if found is None:
            break
        num_elements += 1
        at = found.end()
    for name, count, limit in (
        ("texts, lists and objects", num_elements, MAX_ELEMENTS),
        ("members of lists and objects", num_commas, max_commas),
    ):
        if count > limit:
            raise _refusal(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"The body has at most {limit} {name}, got more.",
                code=_TOO_LARGE,
            )
