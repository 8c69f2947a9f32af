"""Layered configuration: flag > `HETERO_*` environment > JSON file > default.

A plane declares its configuration once, as a frozen dataclass whose fields are made by `setting`;
flags, environment names, JSON keys, ranges and help all follow from it. Every problem of every
layer is found before anything starts and reported in one ConfigError.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import types
import typing
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from planes.default_int import DefaultInt
from planes.errors import ConfigError
from planes.json_members import RepeatedKeyError, members_once
from planes.setting_values import check_value

ENV_PREFIX = "HETERO_"
MAX_CONFIG_FILE_BYTES = 1 << 20

LARGEST_PLAIN_POWER = 1 << 16
"""Beyond, powers of two are spelled as such."""

ConfigT = TypeVar("ConfigT")

Reader = Callable[[object], object]

_RULE = "hetero_rule"


@dataclass(frozen=True, slots=True)
class Rule:
    """What a value must satisfy. `above` excludes its bound, `minimum` and `maximum` include it.

    `words`: may stand in place of a number. `pattern`: of legal texts, where the last of `choices`
    only shows how they are spelled. `read`: makes the value of what is given, where it is no plain
    number, text or truth: a list of texts from flags, one text from the environment, anything from
    JSON. Raises ValueError that says what it must be. `metavar`: what stands for such a value in
    the help.
    """

    help: str
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    choices: tuple[str, ...] | None = None
    read: Reader | None = None
    metavar: str | None = None
    words: tuple[str, ...] = ()
    pattern: str | None = None

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


def setting(  # noqa: PLR0913 - each has a name, and a default
    default: Any,  # noqa: ANN401 - a dataclass field takes any type
    *,
    help: str,  # noqa: A002 - the word argparse uses
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    choices: tuple[str, ...] | None = None,
    read: Reader | None = None,
    metavar: str | None = None,
    words: tuple[str, ...] = (),
    pattern: str | None = None,
) -> Any:  # noqa: ANN401 - like dataclasses.field
    """Declare one field of a configuration: its default, its range and one line of help."""
    rule = Rule(help, minimum, maximum, above, choices, read, metavar, words, pattern)
    return dataclasses.field(default=default, metadata={_RULE: rule})


def as_in(cls: type, name: str) -> Any:  # noqa: ANN401 - like dataclasses.field
    """Declare a field exactly as `cls` declares it: default, range and help."""
    for field in dataclasses.fields(cls):
        if field.name == name:
            return dataclasses.field(default=field.default, metadata=field.metadata)
    raise AttributeError(f"{cls.__name__} has no field {name!r}")


@dataclass(frozen=True, slots=True)
class Setting:
    """One declared field: its type and whether None is legal.

    The type is int, float, str or bool, or what the rule's `read` makes; flags of such a one may be
    given several times. Of a number that may be a word the type is that of the number.
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


def settings_of(cls: type) -> tuple[Setting, ...]:
    """Every field of a configuration class that was declared with `setting`, in order."""
    return _settings_of(cls)


@functools.cache  # a command line asks hundreds of times while it is put together
def _settings_of(cls: type) -> tuple[Setting, ...]:
    hints = typing.get_type_hints(cls)
    found = []
    for field in dataclasses.fields(cls):
        rule = field.metadata.get(_RULE)
        if rule is None:
            continue
        hint = hints[field.name]
        optional = False
        if typing.get_origin(hint) in (typing.Union, types.UnionType):
            members = typing.get_args(hint)
            optional = type(None) in members
            hint = next(member for member in members if member is not type(None))
        hint = typing.get_origin(hint) or hint
        found.append(Setting(field.name, hint, optional, field.default, rule))
    return tuple(found)


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
        values = json.loads(text, object_pairs_hook=members_once)
    except RepeatedKeyError as error:
        raise ConfigError(f"config file {path}: {error}", field=error.key) from None
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
            value, origin, is_text = flag, item.flag, True
        elif layers.environ.get(item.env):
            value, origin, is_text = layers.environ[item.env], item.env, True
        elif item.name in layers.file:
            value, origin, is_text = layers.file[item.name], layers.file_name, False
        else:
            continue
        try:
            values[item.name] = check_value(item, value, origin, is_text=is_text)
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
        if isinstance(value, str) and item.kind is not str and value not in item.rule.words:
            problems.append(
                ConfigError(f"{item.name} must not be a string, got {value!r}", field=item.name)
            )
            continue
        try:
            check_value(item, value, type(config).__name__, is_text=False)
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
        is_left_out = names is not None and item.name not in names
        if is_left_out or value is None or isinstance(value, DefaultInt):
            continue
        if item.kind is bool:
            flags.append(item.flag if value else item.flag.replace("--", "--no-", 1))
        else:
            flags.append(f"{item.flag}={value}")
    return flags
