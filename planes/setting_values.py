"""One value of a setting: read from text, and checked against what was declared of it."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from planes.errors import ConfigError

if TYPE_CHECKING:
    from planes.settings import Rule, Setting

_INTEGER = re.compile(r"[+-]?[0-9]{1,100}")
"""More digits are beyond every range here, and `int` itself refuses more than 4300."""
_NUMBER = re.compile(
    r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?|[+-]?(nan|inf|infinity)", re.I
)
"""What `float` reads, without its underscores and non-ASCII digits."""


def check_value(item: Setting, value: object, origin: str, *, is_text: bool) -> Any:  # noqa: ANN401 - the field's type
    """Return `value` as the setting's type.

    `is_text`: it is from a flag or the environment, and text is parsed; what is already typed
    (from JSON or Python) must have the type. Raises ConfigError naming key, origin and value.
    """
    where = f"{item.name} (from {origin})"
    if value is None:
        if item.optional:
            return None
        raise ConfigError(f"{where} must not be null", field=item.name)
    given = value
    rule = item.rule
    if rule.read is not None:
        try:
            return rule.read(given)
        except ValueError as error:
            raise ConfigError(f"{where} must be {error}", field=item.name) from None
    if isinstance(given, str) and given in rule.words:
        return given
    value = _to_kind(item, given, where, is_text=is_text)
    if rule.choices is not None and not _is_choice(rule, value):
        raise ConfigError(
            f"{where} must be one of {', '.join(rule.choices)}, got {value!r}", field=item.name
        )
    if isinstance(value, int | float) and not isinstance(value, bool):
        if rule.minimum is not None and value < rule.minimum:
            raise ConfigError(
                f"{where} must be at least {rule.minimum}, got {given}", field=item.name
            )
        if rule.above is not None and value <= rule.above:
            raise ConfigError(
                f"{where} must be greater than {rule.above}, got {given}", field=item.name
            )
        if rule.maximum is not None and value > rule.maximum:
            raise ConfigError(
                f"{where} must be at most {rule.maximum}, got {given}", field=item.name
            )
    return value


def _is_choice(rule: Rule, value: object) -> bool:
    if rule.choices is None or rule.pattern is None:
        return rule.choices is None or value in rule.choices
    *words, _ = rule.choices
    return value in words or re.fullmatch(rule.pattern, str(value)) is not None


def _to_kind(item: Setting, value: object, where: str, *, is_text: bool) -> object:
    """Convert text where it is to be read, and refuse every other type than the declared one."""
    is_read = is_text or not isinstance(value, str)
    if item.kind is bool:
        truth = _to_bool(value) if is_read else None
        if truth is None:
            raise ConfigError(f"{where} must be true or false, got {value!r}", field=item.name)
        return truth
    if item.kind is int:
        if is_text and isinstance(value, str) and _INTEGER.fullmatch(value.strip()):
            return int(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        wanted = " or ".join(("an integer", *item.rule.words))
        raise ConfigError(f"{where} must be {wanted}, got {value!r}", field=item.name)
    if item.kind is float:
        number = _to_float(value) if is_read else None
        if number is None:
            raise ConfigError(f"{where} must be a number, got {value!r}", field=item.name)
        if not math.isfinite(number):
            raise ConfigError(f"{where} must be finite, got {value!r}", field=item.name)
        return number
    if not isinstance(value, str):
        raise ConfigError(f"{where} must be a string, got {value!r}", field=item.name)
    if not value and not item.optional:
        raise ConfigError(f"{where} must not be empty", field=item.name)
    return value or None


def _to_bool(value: object) -> bool | None:
    """Return `value` as a bool, None if it is not one."""
    if isinstance(value, str):
        words = {"1": True, "true": True, "yes": True, "on": True}
        words |= {"0": False, "false": False, "no": False, "off": False}
        return words.get(value.lower())
    return value if isinstance(value, bool) else None


def _to_float(value: object) -> float | None:
    """Return `value` as a float, None if it is not a number."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        return float(value) if _NUMBER.fullmatch(value.strip()) else None
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    return None
