"""Typed access to the keys of a GGUF file."""

from __future__ import annotations

import math
import struct
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from compute_plane.model.errors import ModelFileError, printable
from compute_plane.model.gguf_header import SCALARS, STRING, TYPE_NAMES, GgufFile, Value

_U64 = struct.Struct("<Q")
_INTEGERS = frozenset((0, 1, 2, 3, 4, 5, 10, 11))
_FLOATS = frozenset((6, 12))
_BOOL = 7

ValueT = TypeVar("ValueT")


class GgufMetadata:
    """The keys of a file, read when asked for.

    Each reader returns None for a key that is not there, and raises ModelFileError, naming file and
    key, for a value of another type or beyond the given bound.
    """

    def __init__(self, file: GgufFile) -> None:
        self._file = file

    def require_integer(self, key: str) -> int:
        """Return an integer that must be there."""
        return _required(self._file, key, self.integer(key))

    def require_number(self, key: str) -> float:
        """Return a number that must be there."""
        return _required(self._file, key, self.number(key))

    def require_text(self, key: str, max_bytes: int = 1024) -> str:
        """Return a string that must be there."""
        return _required(self._file, key, self.text(key, max_bytes))

    def has(self, key: str) -> bool:
        """Tell whether the file has a key."""
        return key in self._file.values

    def integer(self, key: str) -> int | None:
        """Return an integer."""
        value = self._value(key, _INTEGERS, "an integer", is_array=False)
        return None if value is None else int(self._scalar(value))

    def number(self, key: str) -> float | None:
        """Return a finite number, integer or not."""
        value = self._value(key, _FLOATS | _INTEGERS, "a number", is_array=False)
        if value is None:
            return None
        number = float(self._scalar(value))
        if not math.isfinite(number):
            raise ModelFileError(self._file.path, f"{key} must be finite, got {number}")
        return number

    def boolean(self, key: str) -> bool | None:
        """Return a truth value."""
        value = self._value(key, frozenset((_BOOL,)), "a bool", is_array=False)
        if value is None:
            return None
        byte = self._file.buffer[value.offset]
        if byte > 1:
            raise ModelFileError(self._file.path, f"{key} must be a bool of 0 or 1, got {byte}")
        return bool(byte)

    def is_array(self, key: str) -> bool:
        """Tell whether a key that the file has is an array."""
        return self._file.values[key].is_array

    def booleans(self, key: str, max_count: int) -> list[bool] | None:
        """Return an array of truth values."""
        value = self._value(key, frozenset((_BOOL,)), "an array of bools", is_array=True)
        if value is None:
            return None
        self._check_count(key, value, max_count)
        stored = self._file.buffer[value.offset : value.offset + value.count]
        wrong = next((byte for byte in stored if byte > 1), None)
        if wrong is not None:
            raise ModelFileError(self._file.path, f"{key} must be bools of 0 or 1, got {wrong}")
        return [bool(byte) for byte in stored]

    def text(self, key: str, max_bytes: int = 1024) -> str | None:
        """Return a string of at most `max_bytes` bytes of UTF-8."""
        value = self._value(key, frozenset((STRING,)), "a string", is_array=False)
        if value is None:
            return None
        if value.count > max_bytes:
            raise ModelFileError(
                self._file.path, f"{key} must be at most {max_bytes} bytes, got {value.count}"
            )
        return self._decode(key, value.offset, value.count)

    def integers(self, key: str, max_count: int) -> npt.NDArray[np.int64] | None:
        """Return an array of integers."""
        value = self._value(key, _INTEGERS, "an array of integers", is_array=True)
        if value is None:
            return None
        self._check_count(key, value, max_count)
        stored = np.dtype(SCALARS[value.type])
        return np.frombuffer(self._file.buffer, stored, value.count, value.offset).astype(np.int64)

    def numbers(self, key: str, max_count: int) -> npt.NDArray[np.float64] | None:
        """Return an array of finite numbers that are no integers."""
        value = self._value(key, _FLOATS, "an array of numbers", is_array=True)
        if value is None:
            return None
        self._check_count(key, value, max_count)
        stored = np.dtype(SCALARS[value.type])
        numbers = np.frombuffer(self._file.buffer, stored, value.count, value.offset)
        wrong = np.flatnonzero(~np.isfinite(numbers))
        if wrong.size:
            index = int(wrong[0])
            raise ModelFileError(
                self._file.path, f"{key}: element {index} must be finite, got {numbers[index]}"
            )
        return numbers.astype(np.float64)

    def texts(self, key: str, max_count: int) -> list[str] | None:
        """Return an array of strings."""
        value = self._value(key, frozenset((STRING,)), "an array of strings", is_array=True)
        if value is None:
            return None
        self._check_count(key, value, max_count)
        buffer, unpack = self._file.buffer, _U64.unpack_from
        texts = []
        offset = value.offset
        try:
            for _ in range(value.count):
                start = offset + 8
                offset = start + unpack(buffer, offset)[0]
                texts.append(buffer[start:offset].decode("utf-8"))
        except UnicodeDecodeError:
            raise ModelFileError(
                self._file.path, f"{key}: element {len(texts)} is not UTF-8"
            ) from None
        return texts

    def _value(
        self, key: str, types: frozenset[int], expected: str, *, is_array: bool
    ) -> Value | None:
        value = self._file.values.get(key)
        if value is None:
            return None
        if value.type not in types or value.is_array != is_array:
            actual = TYPE_NAMES[value.type]
            shown = f"an array of {actual}" if value.is_array else f"of type {actual}"
            raise ModelFileError(
                self._file.path, f"{printable(key)} must be {expected}, but it is {shown}"
            )
        return value

    def _scalar(self, value: Value) -> int | float:
        number: int | float = struct.unpack_from(
            SCALARS[value.type], self._file.buffer, value.offset
        )[0]
        return number

    def _check_count(self, key: str, value: Value, max_count: int) -> None:
        if value.count > max_count:
            raise ModelFileError(
                self._file.path, f"{key} must have at most {max_count} elements, got {value.count}"
            )

    def _decode(self, key: str, offset: int, num_bytes: int) -> str:
        try:
            return self._file.buffer[offset : offset + num_bytes].decode("utf-8")
        except UnicodeDecodeError:
            raise ModelFileError(self._file.path, f"{key} is not UTF-8") from None


def _required(file: GgufFile, key: str, value: ValueT | None) -> ValueT:
    if value is None:
        raise ModelFileError(file.path, f"key {key} is missing")
    return value
