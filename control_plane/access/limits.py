"""What one token may use: requests at once, and tokens a minute.

Pure: time comes from the caller, in seconds of a clock that never goes back. Everything happens on
the event loop, hence without locks.
"""

from __future__ import annotations

from dataclasses import dataclass

from control_plane.errors import TokenRateError, TooManyConcurrentRequestsError

SECONDS_A_MINUTE = 60.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What is allowed; None: as much as the server can do."""

    max_concurrent_requests: int | None = None
    max_tokens_per_minute: int | None = None


class TokenBucket:
    """Fills at `per_minute` up to that many tokens; may be overdrawn, and is then in debt.

    How many tokens an answer will have is not known before its end. So a request is let in while
    there is at least one token in the bucket, and what it uses is booked as it is used, below zero
    if need be; then nobody is let in until the debt is paid by time.
    """

    __slots__ = ("_at", "_level", "_per_minute")

    def __init__(self, per_minute: int, now: float) -> None:
        self._per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def wait_s(self, now: float) -> float:
        """Return how long it takes until there is a token again; 0: there is one."""
        self._fill(now)
        return max(0.0, (1.0 - self._level) * SECONDS_A_MINUTE / self._per_minute)

    def book(self, num_tokens: int, now: float) -> None:
        """Take tokens out, whether they are there or not."""
        self._fill(now)
        self._level -= num_tokens

    def change(self, per_minute: int, now: float) -> None:
        """Fill at another rate from now on; a debt stays."""
        self._fill(now)
        self._per_minute = per_minute

    def _fill(self, now: float) -> None:
        passed_s = now - self._at
        self._at = now
        gained = passed_s * self._per_minute / SECONDS_A_MINUTE
        self._level = min(float(self._per_minute), self._level + gained)


class Meter:
    """What the requests of one token use. Its counts outlive a change of the limits."""

    __slots__ = ("_bucket", "_limits", "num_requests")

    def __init__(self, limits: Limits, now: float) -> None:
        self.num_requests = 0
        self._limits = Limits()
        self._bucket: TokenBucket | None = None
        self.set_limits(limits, now)

    def set_limits(self, limits: Limits, now: float) -> None:
        """Let other limits hold from now on; requests under way go on."""
        per_minute = limits.max_tokens_per_minute
        if per_minute is None:
            self._bucket = None
        elif self._bucket is None:
            self._bucket = TokenBucket(per_minute, now)
        elif per_minute != self._limits.max_tokens_per_minute:
            self._bucket.change(per_minute, now)
        self._limits = limits

    def begin(self, now: float) -> None:
        """Count one request more. Raises the error of the limit that it would break."""
        self.check(now)
        self.num_requests += 1

    def check(self, now: float, num_requests: int = 1) -> None:
        """Raise the error of the limit that so many requests more would break; none is counted."""
        most = self._limits.max_concurrent_requests
        if most is not None and self.num_requests + num_requests > most:
            more = "" if num_requests == 1 else f"; {num_requests} more are wanted at once"
            raise TooManyConcurrentRequestsError(
                f"max_concurrent_requests of this token is {most}, and {self.num_requests} are "
                f"under way{more}"
            )
        wait_s = 0.0 if self._bucket is None else self._bucket.wait_s(now)
        if wait_s > 0:
            raise TokenRateError(
                f"max_tokens_per_minute of this token, {self._limits.max_tokens_per_minute}, is "
                f"used up; retry in {wait_s:.1f} s",
                retry_after_s=wait_s,
            )

    def book(self, num_tokens: int, now: float) -> None:
        """Count tokens of a prompt or an answer."""
        if self._bucket is not None:
            self._bucket.book(num_tokens, now)

    def end(self) -> None:
        """Count one request less."""
        self.num_requests -= 1
