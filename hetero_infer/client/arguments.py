"""Arguments of a wrong class, refused by name before anything is made of them.

protobuf takes bytes for text, and a sequence of numbers is what it makes of them elsewhere; what it
does refuse, it refuses with a TypeError that names no argument.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Set
from typing import Any, NoReturn

from planes.errors import ValidationError

MAX_SHOWN_CHARACTERS = 60


def check_text(value: object, field: str) -> None:
    """Raise ValidationError for what is no text."""
    if not isinstance(value, str):
        refuse(value, field, "text")


def check_flag(value: object, field: str) -> None:
    """Raise ValidationError for what is neither true nor false."""
    if not isinstance(value, bool):
        refuse(value, field, "true or false")


def check_seconds(value: object, field: str) -> None:
    """Raise ValidationError for what is no number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or value != value:  # NaN
        refuse(value, field, "a number of seconds")


def object_of(given: object, field: str) -> dict[str, Any]:
    """Return a JSON object; None is an empty one. Raises ValidationError for what is none."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        refuse(given, field, "an object whose keys are texts")
    try:
        json.dumps(found := dict(given), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValidationError(f"{field} must be JSON values: {error}", field=field) from None
    return found


def tokens_of(given: object, field: str, expected: str = "token ids") -> tuple[int, ...]:
    """Return token ids in their order. Raises ValidationError for what cannot be any.

    Numbers out of range, and what is no number, are found when the message is made.
    """
    is_other = isinstance(given, str | bytes | bytearray | memoryview | Mapping | Set)
    if is_other or not isinstance(given, Iterable):
        refuse(given, field, expected)
    return tuple(given)


def refuse(value: object, field: str, expected: str) -> NoReturn:
    """Raise the ValidationError that says what an argument must be."""
    shown = repr(value)
    if len(shown) > MAX_SHOWN_CHARACTERS:
        shown = shown[:MAX_SHOWN_CHARACTERS] + "…"
    raise ValidationError(
        f"{field} must be {expected}, got {type(value).__name__} {shown}", field=field
    )
