"""Layered configuration: flag > `HETERO_*` environment > JSON file > default.

A plane declares its configuration once, as a frozen dataclass whose fields are made by `setting`;
flags, environment names, JSON keys, ranges and help all follow from it. Every problem of every
layer is found before anything starts and reported in one ConfigError.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import types
import typing
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from planes.errors import ConfigError

ENV_PREFIX = "HETERO_"
MAX_CONFIG_FILE_BYTES = 1 << 20

LARGEST_PLAIN_POWER = 1 << 16
"""Beyond, powers of two are spelled as such."""

ConfigT = TypeVar("ConfigT")

Reader = Callable[[object], object]

_RULE = "hetero_rule"
_INTEGER = re.compile(r"[+-]?[0-9]{1,100}")
"""More digits are beyond every range here, and `int` itself refuses more than 4300."""
_NUMBER = re.compile(
    r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?|[+-]?(nan|inf|infinity)", re.I
)
"""What `float` reads, without its underscores and non-ASCII digits."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What a value must satisfy. `above` excludes its bound, `minimum` and `maximum` include it.

    `read`: makes the value of what is given, where it is no plain number, text or truth: a list of
    texts from flags, one text from the environment, anything from JSON. Raises ValueError that says
    what it must be. `metavar`: what stands for such a value in the help.
    """

    help: str
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    choices: tuple[str, ...] | None = None
    read: Reader | None = None
    metavar: str | None = None

    @property
    def range_text(self) -> str | None:
        """The range in words for a line of help; None without one."""
        least, most = self.minimum, self.maximum
        if self.above is not None:
            text = f"greater than {spell(self.above)}"
            return text if most is None else f"{text}, at most {spell(most)}"
        if least is not None and most is not None:
            return f"{spell(least)} to {spell(most)}"
        if least is not None:
            return f"at least {spell(least)}"
        return None if most is None else f"at most {spell(most)}"


def spell(bound: float) -> str:
    """Return a bound as people write it: 1000000 and 2.5, but 2^20, 2^64 - 1 and -2^31."""
    if bound == int(bound):
        size, sign = abs(int(bound)), "-" if bound < 0 else ""
        for offset, suffix in ((0, ""), (1, " - 1")):
            power = size + offset
            if power.bit_count() == 1 and power > LARGEST_PLAIN_POWER and not (sign and offset):
                return f"{sign}2^{power.bit_length() - 1}{suffix}"
        return f"{sign}{size}"
    return f"{bound:g}"


def setting(
    default: Any,  # noqa: ANN401 - a dataclass field takes any type
    *,
    help: str,  # noqa: A002 - the word argparse uses
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    choices: tuple[str, ...] | None = None,
    read: Reader | None = None,
    metavar: str | None = None,
) -> Any:  # noqa: ANN401 - like dataclasses.field
    """Declare one field of a configuration: its default, its range and one line of help."""
    rule = Rule(help, minimum, maximum, above, choices, read, metavar)
    return dataclasses.field(default=default, metadata={_RULE: rule})


@dataclass(frozen=True, slots=True)
class Setting:
    """One declared field: its type and whether None is legal.

    The type is int, float, str or bool, or what the rule's `read` makes; flags of such a one may be
    given several times.
    """

    name: str
    kind: type
    optional: bool
    default: object
    rule: Rule

    @property
    def flag(self) -> str:
        """The command-line spelling."""
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        """The environment spelling."""
        return ENV_PREFIX + self.name.upper()


def settings_of(cls: type) -> Iterator[Setting]:
    """Every field of a configuration class that was declared with `setting`, in order."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        rule = field.metadata.get(_RULE)
        if rule is None:
            continue
        hint = hints[field.name]
        optional = False
        if typing.get_origin(hint) in (typing.Union, types.UnionType):
            members = [member for member in typing.get_args(hint) if member is not type(None)]
            optional = True
            (hint,) = members
        hint = typing.get_origin(hint) or hint
        yield Setting(field.name, hint, optional, field.default, rule)


def check_value(item: Setting, value: object, origin: str) -> Any:  # noqa: ANN401 - the field's type
    """Return `value` as the setting's type.

    Text (from a flag or the environment) is parsed; a value that is already typed (from JSON or
    Python) must have the type. Raises ConfigError naming key, origin and value.
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
    value = _to_kind(item, given, where)
    if rule.choices is not None and value not in rule.choices:
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


def _to_kind(item: Setting, value: object, where: str) -> object:
    """Convert text, and refuse every other type than the declared one."""
    if item.kind is bool:
        truth = _to_bool(value)
        if truth is None:
            raise ConfigError(f"{where} must be true or false, got {value!r}", field=item.name)
        return truth
    if item.kind is int:
        if isinstance(value, str) and _INTEGER.fullmatch(value.strip()):
            return int(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        raise ConfigError(f"{where} must be an integer, got {value!r}", field=item.name)
    if item.kind is float:
        number = _to_float(value)
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


def read_config_file(path: Path) -> dict[str, object]:
    """Read a JSON object of settings. Raises ConfigError naming the file and the fault."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_CONFIG_FILE_BYTES + 1)  # a device file has no size to ask for
        if len(data) > MAX_CONFIG_FILE_BYTES:
            raise ConfigError(
                f"config file {path}: at most {MAX_CONFIG_FILE_BYTES} bytes, got more",
                field="config",
            )
        text = data.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror}", field="config") from None
    except UnicodeDecodeError:
        raise ConfigError(f"config file {path}: not UTF-8 text", field="config") from None
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also an integer of 4301 digits
        raise ConfigError(f"config file {path}: not valid JSON: {error}", field="config") from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"config file {path}: expected a JSON object, got {type(values).__name__}",
            field="config",
        )
    return values


@dataclass(frozen=True, slots=True)
class Layers:
    """Where values come from, strongest first; None in `flags` means not given."""

    flags: Mapping[str, object] = dataclasses.field(default_factory=dict)
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)
    file: Mapping[str, object] = dataclasses.field(default_factory=dict)
    file_name: str = "config file"


def resolve(cls: type[ConfigT], layers: Layers) -> ConfigT:
    """Build a configuration from its layers.

    Raises one ConfigError that lists every problem. Keys of the file that `cls` does not know are
    ignored here; `unknown_keys` finds them.
    """
    values: dict[str, object] = {}
    problems: list[ConfigError] = []
    for item in settings_of(cls):
        flag = layers.flags.get(item.name)
        if flag is not None:
            value, origin = flag, item.flag
        elif layers.environ.get(item.env):
            value, origin = layers.environ[item.env], item.env
        elif item.name in layers.file:
            value, origin = layers.file[item.name], layers.file_name
        else:
            continue
        try:
            values[item.name] = check_value(item, value, origin)
        except ConfigError as problem:
            problems.append(problem)
    _raise_all(problems)
    return cls(**values)


def check(config: object) -> None:
    """Check every declared field of a configuration built in Python.

    Raises one ConfigError that lists every problem.
    """
    problems: list[ConfigError] = []
    for item in settings_of(type(config)):
        value = getattr(config, item.name)
        if isinstance(value, str) and item.kind is not str:
            problems.append(
                ConfigError(f"{item.name} must not be a string, got {value!r}", field=item.name)
            )
            continue
        try:
            check_value(item, value, type(config).__name__)
        except ConfigError as problem:
            problems.append(problem)
    _raise_all(problems)


def _raise_all(problems: list[ConfigError]) -> None:
    if problems:
        raise ConfigError("; ".join(p.message for p in problems), field=problems[0].field)


def unknown_keys(file: Mapping[str, object], *classes: type) -> list[str]:
    """Names of the file's keys that none of the configuration classes declares, sorted."""
    known = {item.name for cls in classes for item in settings_of(cls)}
    return sorted(key for key in file if key not in known)


def add_arguments(parser: argparse.ArgumentParser, cls: type) -> None:
    """Add one option per setting. Values stay text: `resolve` parses and checks them."""
    for item in settings_of(cls):
        facts = [] if item.rule.range_text is None else [item.rule.range_text]
        facts += [] if item.default is None else [f"default {item.default}"]
        text = item.rule.help + (f" ({'; '.join(facts)})" if facts else "")
        text = text.replace("%", "%%")
        if item.kind is bool:
            parser.add_argument(
                item.flag, action=argparse.BooleanOptionalAction, default=None, help=text
            )
        else:
            metavar = (
                "{" + ",".join(item.rule.choices) + "}"
                if item.rule.choices
                else item.kind.__name__.upper()
            )
            parser.add_argument(item.flag, default=None, metavar=metavar, help=text)


def to_flags(config: object, names: Container[str] | None = None) -> list[str]:
    """Spell a configuration, or the settings of it in `names`, as options for a child process."""
    flags = []
    for item in settings_of(type(config)):
        value = getattr(config, item.name)
        if value is None or (names is not None and item.name not in names):
            continue
        if item.kind is bool:
            flags.append(item.flag if value else item.flag.replace("--", "--no-", 1))
        else:
            flags.append(f"{item.flag}={value}")
    return flags
