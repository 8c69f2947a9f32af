"""Messages of clients are measured before they are parsed: objects are many times their bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

from control_plane.core.errors import ContextLengthError
from control_plane.text.bounds import MAX_ELEMENTS
from planes.errors import ValidationError

MAX_UNCOUNTED_BYTES = 64 << 10
"""Shorter messages are parsed within 2 ms, whatever they hold."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

_Read = Callable[[bytes], Any]


def careful_reader(deserialize: _Read, max_bytes: int | None) -> _Read:
    """Return what parses a message, or raises EngineError.

    gRPC itself would answer UNKNOWN, and log a caller's mistake as a fault of ours. `max_bytes`:
    of a message; None: any number.
    """
    descriptor = getattr(getattr(deserialize, "__self__", None), "DESCRIPTOR", None)

    def read(data: bytes) -> Any:  # noqa: ANN401 - the method's own message type
        if max_bytes is not None and len(data) > max_bytes:
            raise ContextLengthError(
                f"the message has {len(data)} bytes, at most {max_bytes} are taken"
            )
        if len(data) > MAX_UNCOUNTED_BYTES and isinstance(descriptor, Descriptor):
            _check_fields(data, descriptor)
        try:
            return deserialize(data)
        except DecodeError as error:
            raise ValidationError(f"the message cannot be read: {error}") from None

    return read


def _check_fields(data: bytes, descriptor: Descriptor) -> None:
    """Refuse a message with too many fields, those of its parts included."""
    num_fields = 0
    parts: list[tuple[int, int, Descriptor]] = [(0, len(data), descriptor)]
    try:
        while parts:
            at, end, kind = parts.pop()
            fields = kind.fields_by_number
            while at < end:
                num_fields += 1
                if num_fields > MAX_ELEMENTS:
                    raise ValidationError(
                        f"the message has more than {MAX_ELEMENTS} fields, those of its parts "
                        "included"
                    )
                tag, at = _varint(data, at)
                wire_type = tag & 7
                if wire_type == _VARINT:
                    _, at = _varint(data, at)
                elif wire_type == _BYTES:
                    size, at = _varint(data, at)
                    field = fields.get(tag >> 3) if size else None
                    if field is not None and field.message_type is not None:
                        parts.append((at, min(at + size, end), field.message_type))
                    at += size
                elif wire_type in (_FIXED32, _FIXED64):
                    at += 4 if wire_type == _FIXED32 else 8
                else:  # the ends of groups, which nobody has sent for twenty years
                    raise ValidationError("the message cannot be read: it has groups")
    except IndexError:
        return  # it ends in mid-field: the parser says so


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number and where it ends. Raises IndexError behind the data."""
    byte = data[at]
    at += 1
    if byte < 0x80:
        return byte, at
    number, shift = byte & 0x7F, 7
    while byte >= 0x80:
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        shift += 7
        if shift > 70:
            raise IndexError  # too long; the parser says so
    return number, at
