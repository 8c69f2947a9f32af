"""Log lines of the planes this process starts, in the form in which people read them."""

from __future__ import annotations

import json

_NOT_SHOWN = frozenset({"plane", "event", "level", "timestamp", "exception"})


def readable(line: str) -> str | None:
    """Return a JSON log line of `planes.logs` as people read it; None for any other line.

    `hetero-infer: compute plane: compiled (kernel: sampling.sample, seconds: 10.3)`; the frames of
    an exception follow, each on a line of its own.
    """
    try:
        record = json.loads(line) if line.startswith("{") else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or "event" not in record or "plane" not in record:
        return None
    facts = ", ".join(f"{k}: {_said(v)}" for k, v in record.items() if k not in _NOT_SHOWN)
    text = f"hetero-infer: {record['plane']} plane: {record['event']}"
    text += f" ({facts})" if facts else ""
    return "\n".join([text, *_frames(record.get("exception"))])


def _said(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _frames(exceptions: object) -> list[str]:
    """Return the frames of structlog's `dict_tracebacks`, innermost last, and what was raised."""
    lines = []
    for exception in exceptions if isinstance(exceptions, list) else []:
        lines += [
            f'  File "{frame.get("filename")}", line {frame.get("lineno")}, in {frame.get("name")}'
            for frame in exception.get("frames", ())
        ]
        lines.append(f"{exception.get('exc_type')}: {exception.get('exc_value')}")
    return lines
