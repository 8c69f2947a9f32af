"""How large a body may be, in bytes and in what they spell, and how much of bodies is held at once.

Bytes are counted as they come, values before they are parsed: an object takes many times its bytes,
and parsing holds the interpreter from the first byte to the last.
"""

from __future__ import annotations

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
    from control_plane.http.errors import HttpRefusal

MAX_HELD_BYTES: Final = 64 << 20
"""Of all bodies that are being read or parsed, beyond the first `MAX_INLINE_BYTES` of each."""

RETRY_AFTER_S: Final = 1

_TOO_LARGE: Final = "request_too_large"


def _refusal(
    status: int, message: str, *, code: str, headers: dict[str, str] | None = None
) -> HttpRefusal:
    # Imported here: a control plane without an HTTP port has no pydantic, and has this module.
    from control_plane.http.errors import HttpRefusal

    return HttpRefusal(status, message, code=code, headers=headers)


# Possessive, and matched where a text begins, not searched: nothing is looked at twice where it
# does not end.
_TEXT: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


class Held:
    """The bytes of bodies that are held, of all requests of one application together."""

    def __init__(self, limit: int = MAX_HELD_BYTES) -> None:
        self._limit = limit
        self.num_bytes = 0

    def body(self, max_model_len: int | None) -> IncomingBody:
        """Return an empty body. `max_model_len`: of the loaded model; None: there is none."""
        return IncomingBody(self, max_body_bytes(max_model_len or 0))

    def take(self, num_bytes: int) -> bool:
        """Count some more; False, and nothing is counted, where that is too many."""
        if self.num_bytes + num_bytes > self._limit:
            return False
        self.num_bytes += num_bytes
        return True


class IncomingBody:
    """One body as it comes; it must be left through its `with`. Raises HttpRefusal."""

    def __init__(self, held: Held, max_bytes: int) -> None:
        self._held = held
        self._num_counted = 0
        self.max_bytes = max_bytes
        self.data = bytearray()

    def __enter__(self) -> IncomingBody:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.num_bytes -= self._num_counted
        self.data = bytearray()

    def add(self, chunk: bytes) -> None:
        """Take some more of it."""
        self.check_length(len(self.data) + len(chunk), "more")
        more = max(0, len(self.data) + len(chunk) - MAX_INLINE_BYTES) - self._num_counted
        if more > 0:
            if not self._held.take(more):
                raise _refusal(
                    HTTPStatus.SERVICE_UNAVAILABLE,
                    "The server reads as many large bodies as it can.",
                    code="too_many_large_requests",
                    headers={"Retry-After": str(RETRY_AFTER_S)},
                )
            self._num_counted += more
        self.data += chunk

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
