"""Bounded reading of the JSON and text files beside a model's weights."""

from __future__ import annotations

import json
import math
from pathlib import Path

from compute_plane.model.errors import ModelFileError, printable, system_fault
from compute_plane.model.mapped_file import open_regular
from planes.json_members import RepeatedKeyError, members_once

MAX_CONFIG_BYTES = 1 << 20
MAX_INTEGER = (1 << 63) - 1


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """Return a file's bytes. Raises ModelFileError if it cannot be read or is too large."""
    with open_regular(path) as file:
        try:
            content = file.read(max_bytes + 1)
        except OSError as error:
            raise ModelFileError(path, system_fault(error)) from None
    if len(content) > max_bytes:
        raise ModelFileError(path, f"larger than {max_bytes} bytes")
    return content


def read_text(path: Path, max_bytes: int) -> str:
    """Return a UTF-8 file's text."""
    try:
        return read_bounded(path, max_bytes).decode("utf-8")
    except UnicodeDecodeError:
        raise ModelFileError(path, "not UTF-8 text") from None


def parse_object(path: Path, content: bytes) -> dict[str, object]:
    """Return a JSON object without repeated keys. Raises ModelFileError naming file and fault."""
    try:
        document = json.loads(content.decode("utf-8"), object_pairs_hook=members_once)
        json.dumps(document, ensure_ascii=False).encode("utf-8")
    except RepeatedKeyError as error:
        raise ModelFileError(path, f"key {printable(error.key)} appears twice") from None
    except UnicodeDecodeError:
        raise ModelFileError(path, "not UTF-8 text") from None
    except UnicodeEncodeError:
        raise ModelFileError(path, "an escape stands for half a character") from None
    except (ValueError, RecursionError) as error:
        raise ModelFileError(path, f"not valid JSON: {printable(str(error))}") from None
    if not isinstance(document, dict):
        raise ModelFileError(path, f"expected a JSON object, got {type(document).__name__}")
    return document


class JsonObject:
    """A JSON object whose members are read with their type; `where` names it in messages."""

    def __init__(self, path: Path, members: dict[str, object], where: str = "") -> None:
        self.path = path
        self._members = members
        self._where = where

    @classmethod
    def read(cls, path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> JsonObject:
        """Read a file that must hold one JSON object."""
        return cls(path, parse_object(path, read_bounded(path, max_bytes)))

    def raw(self, key: str) -> object:
        """Return a member as it is; None also if it is not there."""
        return self._members.get(key)

    def has(self, key: str) -> bool:
        """Tell whether there is such a member, be it null."""
        return key in self._members

    def changed(self, members: dict[str, object]) -> JsonObject:
        """Return the same object with some members replaced."""
        return JsonObject(self.path, self._members | members, self._where)

    def over(self, members: dict[str, object]) -> JsonObject:
        """Return the same object with members that it has not, or that are null in it."""
        own = {key: value for key, value in self._members.items() if value is not None}
        return JsonObject(self.path, self._members | members | own, self._where)

    @property
    def keys(self) -> tuple[str, ...]:
        """The members' keys, in the file's order."""
        return tuple(self._members)

    def name(self, key: str) -> str:
        """Return a member's name as messages have it, with those of the objects around it."""
        return printable(f"{self._where}{key}")

    def integer(self, key: str, default: int | None = None) -> int:
        """Return an integer. Without a default it must be there."""
        value = self.optional_integer(key)
        if value is None:
            value = default
        if value is None:
            raise ModelFileError(self.path, f"{self.name(key)} is missing")
        return value

    def optional_integer(self, key: str) -> int | None:
        """Return an integer, or None if it is null or not there."""
        value = self._members.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise self._wrong(key, "an integer", value)
        if value is not None and abs(value) > MAX_INTEGER:
            raise self._wrong(key, f"an integer of at most {MAX_INTEGER}", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number. Without a default it must be there."""
        value = self._members.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelFileError(self.path, f"{self.name(key)} is missing")
        return self._finite(key, value)

    def numbers(self, key: str, max_count: int) -> tuple[float, ...]:
        """Return a list of finite numbers, `max_count` at most, which must be there."""
        value = self._members.get(key)
        if value is None:
            raise ModelFileError(self.path, f"{self.name(key)} is missing")
        if not isinstance(value, list) or len(value) > max_count:
            raise self._wrong(key, f"a list of at most {max_count} numbers", value)
        return tuple(self._finite(f"{key}[{place}]", each) for place, each in enumerate(value))

    def boolean(self, key: str) -> bool | None:
        """Return a truth value, or None if it is null or not there."""
        value = self._members.get(key)
        if value is not None and not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def text(self, key: str) -> str | None:
        """Return a string, or None if it is null or not there."""
        value = self._members.get(key)
        if value is not None and not isinstance(value, str):
            raise self._wrong(key, "a string", value)
        return value

    def member(self, key: str) -> JsonObject | None:
        """Return a nested object, or None if it is null or not there."""
        value = self._members.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong(key, "an object", value)
        return JsonObject(self.path, value, f"{self.name(key)}.")

    def _finite(self, key: str, value: object) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong(key, "a number", value)
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self._wrong(key, "a finite number", value)
        return number

    def _wrong(self, key: str, expected: str, value: object) -> ModelFileError:
        shown = printable(repr(value), limit=60)
        return ModelFileError(self.path, f"{self.name(key)} must be {expected}, got {shown}")
