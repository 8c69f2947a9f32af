"""The W3C trace context that a request comes with: https://www.w3.org/TR/trace-context/."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"

MAX_STATE_CHARACTERS = 512
"""The least that everybody must pass on; a longer one is dropped."""

_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The caller's span, in lower-case hex. `state`: what vendors add, passed on as it is."""

    trace_id: str
    parent_id: str
    is_sampled: bool
    state: str = ""


def read_trace(headers: Iterable[tuple[str, str | bytes]]) -> TraceContext | None:
    """Return the trace context among headers with lower-case names; None without a valid one.

    One that is not valid is ignored, as the recommendation wants it; nothing is refused for it.
    """
    parents: list[str] = []
    states: list[str] = []
    for name, value in headers:
        if name in (TRACEPARENT, TRACESTATE):
            text = value if isinstance(value, str) else value.decode("latin-1")
            (parents if name == TRACEPARENT else states).append(text.strip())
    if len(parents) != 1:
        return None
    match = _FORM.fullmatch(parents[0])
    if match is None:
        return None
    version, trace_id, parent_id, flags, more = match.groups()
    is_valid = version != "ff" and (version != "00" or more is None)
    if not is_valid or trace_id == "0" * 32 or parent_id == "0" * 16:
        return None
    state = ",".join(states)
    if len(state) > MAX_STATE_CHARACTERS or not state.isascii() or not state.isprintable():
        state = ""
    return TraceContext(trace_id, parent_id, bool(int(flags, 16) & 1), state)


_trace: ContextVar[TraceContext | None] = ContextVar("trace", default=None)


def enter_trace(trace: TraceContext | None) -> None:
    """Let what this task does, and tasks made by it, belong to a trace, or to none."""
    _trace.set(trace)


def current_trace() -> TraceContext | None:
    """Return the trace that this task works for."""
    return _trace.get()
