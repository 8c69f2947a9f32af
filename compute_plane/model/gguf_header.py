"""A strict reader of the GGUF container: everything is checked before anything is believed.

    magic "GGUF" | version u32 | tensor count u64 | key count u64          little-endian
    keys:     name (u64 length, UTF-8) | type u32 | value
    tensors:  name | dimension count u32 | dimensions u64…, innermost first | type u32 | offset u64
    padding to the alignment
    data:     each tensor at its offset from here

The file is mapped, and the header pass stores only where things lie: lengths and counts are held
against the bytes that are left before they are used, so no declared size can cause an allocation
or a read beyond the file. Source: the GGUF specification in the ggml project, versions 2 and 3.
"""

from __future__ import annotations

import itertools
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from compute_plane.model.errors import ModelFileError, UnsupportedModelError, printable
from compute_plane.model.mapped_file import map_file
from compute_plane.model.tensor import TensorFormat

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
ALIGNMENT_KEY = "general.alignment"
MAX_NAME_BYTES = 65535
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_DIMENSIONS = 4
MAX_STRINGS = 1 << 22  # elements of one array: each is looked at

STRING = 8
ARRAY = 9
# Type code → struct format of the fixed-size types.
SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
TYPE_NAMES = {
    0: "uint8",
    1: "int8",
    2: "uint16",
    3: "int16",
    4: "uint32",
    5: "int32",
    6: "float32",
    7: "bool",
    STRING: "string",
    ARRAY: "array",
    10: "uint64",
    11: "int64",
    12: "float64",
}
TENSOR_FORMATS = {
    0: TensorFormat.F32,
    1: TensorFormat.F16,
    2: TensorFormat.Q4_0,
    3: TensorFormat.Q4_1,
    6: TensorFormat.Q5_0,
    7: TensorFormat.Q5_1,
    8: TensorFormat.Q8_0,
    10: TensorFormat.Q2_K,
    11: TensorFormat.Q3_K,
    12: TensorFormat.Q4_K,
    13: TensorFormat.Q5_K,
    14: TensorFormat.Q6_K,
    20: TensorFormat.IQ4_NL,
    23: TensorFormat.IQ4_XS,
    30: TensorFormat.BF16,
    39: TensorFormat.MXFP4,
}

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Value:
    """Where a key's value lies.

    `type`: code of the value, or of the elements if `is_array`. `offset`: first byte of the number,
    of the string's text, or of the first element. `count`: 1, bytes of the text, or elements.
    """

    type: int
    is_array: bool
    offset: int
    count: int


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies; `shape` outermost first, `offset` from the start of the file.

    `path`, `buffer`: of that file.
    """

    format: TensorFormat
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    path: Path
    buffer: mmap.mmap


@dataclass(frozen=True, slots=True, eq=False)
class GgufFile:
    """A checked GGUF file, mapped read-only. `tensors`: also those of its other parts."""

    path: Path
    buffer: mmap.mmap
    version: int
    values: Mapping[str, Value]
    tensors: Mapping[str, TensorEntry]


def open_gguf(path: Path) -> GgufFile:
    """Map a GGUF file and check its whole header.

    Raises ModelFileError naming the file and its first fault, UnsupportedModelError for tensor
    types this package does not read.
    """
    cursor = _Cursor(path, map_file(path))
    magic = cursor.take(4, "magic")
    if magic != MAGIC:
        raise ModelFileError(path, f"not a GGUF file: starts with {magic!r}")
    version = cursor.u32("version")
    if version not in VERSIONS:
        if version & 0xFFFF == 0 and version:
            raise UnsupportedModelError(path, "big-endian GGUF files are not supported")
        raise UnsupportedModelError(path, f"GGUF version must be 2 or 3, got {version}")
    num_tensors = cursor.count("tensor count", smallest=32, limit=MAX_TENSORS)
    num_keys = cursor.count("key count", smallest=13, limit=MAX_KEYS)

    values: dict[str, Value] = {}
    for index in range(num_keys):
        key = cursor.name(f"key {index}")
        if key in values:
            raise ModelFileError(path, f"key {printable(key)} appears twice")
        values[key] = _value(cursor, key)

    entries = [_tensor_entry(cursor, index) for index in range(num_tensors)]
    alignment = _alignment(cursor, values)
    data_start = -(-cursor.offset // alignment) * alignment
    tensors: dict[str, TensorEntry] = {}
    for name, entry in entries:
        if name in tensors:
            raise ModelFileError(path, f"tensor {printable(name)} appears twice")
        tensors[name] = _placed(cursor, name, entry, data_start, alignment)
    _check_overlaps(path, tensors)
    return GgufFile(path, cursor.buffer, version, values, tensors)


class _Cursor:
    """A position in the header; every step is checked against the end of the file."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path = path
        self.buffer = buffer
        self.size = len(buffer)
        self.offset = 0

    def skip(self, num_bytes: int, what: str) -> int:
        """Step over bytes that must exist; returns where they start."""
        start = self.offset
        if num_bytes > self.size - start:
            raise ModelFileError(
                self.path,
                f"{what} at byte {start} needs {num_bytes} bytes, the file has "
                f"{self.size - start} left",
            )
        self.offset = start + num_bytes
        return start

    def take(self, num_bytes: int, what: str) -> bytes:
        start = self.skip(num_bytes, what)
        return self.buffer[start : self.offset]

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.buffer, self.skip(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.buffer, self.skip(8, what))[0])

    def count(self, what: str, *, smallest: int, limit: int) -> int:
        """Read a count of things that take at least `smallest` bytes each."""
        number = self.u64(what)
        if number > limit:
            raise ModelFileError(self.path, f"{what} must be at most {limit}, got {number}")
        if number * smallest > self.size - self.offset:
            raise ModelFileError(
                self.path,
                f"{what} is {number}, more than the {self.size - self.offset} bytes left can hold",
            )
        return number

    def name(self, what: str) -> str:
        length = self.u64(f"length of {what}")
        if length > MAX_NAME_BYTES:
            raise ModelFileError(
                self.path, f"name of {what} must be at most {MAX_NAME_BYTES} bytes, got {length}"
            )
        try:
            return self.take(length, f"name of {what}").decode("utf-8")
        except UnicodeDecodeError:
            raise ModelFileError(self.path, f"name of {what} is not UTF-8") from None


def _value(cursor: _Cursor, key: str) -> Value:
    """Step over one value, however it is typed."""
    what = f"value of {printable(key)}"
    code = cursor.u32(f"type of {printable(key)}")
    if code == STRING:
        length = cursor.u64(f"length of {printable(key)}")
        return Value(STRING, is_array=False, offset=cursor.skip(length, what), count=length)
    if code != ARRAY:
        _check_scalar(cursor, code, what)
        start = cursor.skip(struct.calcsize(SCALARS[code]), what)
        return Value(code, is_array=False, offset=start, count=1)
    element = cursor.u32(f"element type of {printable(key)}")
    if element == ARRAY:
        raise UnsupportedModelError(cursor.path, f"{what} is an array of arrays")
    count = cursor.u64(f"length of {printable(key)}")
    if element == STRING:
        return Value(STRING, is_array=True, offset=_skip_strings(cursor, count, what), count=count)
    _check_scalar(cursor, element, what)
    start = cursor.skip(count * struct.calcsize(SCALARS[element]), what)
    return Value(element, is_array=True, offset=start, count=count)


def _check_scalar(cursor: _Cursor, code: int, what: str) -> None:
    if code not in SCALARS:
        raise ModelFileError(cursor.path, f"{what} has unknown type {code}")


def _skip_strings(cursor: _Cursor, count: int, what: str) -> int:
    """Step over `count` strings; returns where the first one's length lies."""
    if count > MAX_STRINGS:
        raise ModelFileError(
            cursor.path, f"{what} must have at most {MAX_STRINGS} elements, got {count}"
        )
    if count * 8 > cursor.size - cursor.offset:
        raise ModelFileError(
            cursor.path,
            f"{what} has {count} elements, more than the {cursor.size - cursor.offset} bytes left "
            f"can hold",
        )
    # Vocabularies have a hundred thousand strings: no call but one per element.
    buffer, size, unpack = cursor.buffer, cursor.size, _U64.unpack_from
    start = offset = cursor.offset
    for index in range(count):
        if offset + 8 > size:
            raise ModelFileError(cursor.path, f"{what}: the file ends before element {index}")
        offset += 8 + unpack(buffer, offset)[0]
        if offset > size:
            raise ModelFileError(cursor.path, f"{what}: the file ends within element {index}")
    cursor.offset = offset
    return start


def _tensor_entry(cursor: _Cursor, index: int) -> tuple[str, TensorEntry]:
    """Read one line of the tensor table; `offset` is still relative to the data."""
    name = cursor.name(f"tensor {index}")
    shown = printable(name)
    num_dimensions = cursor.u32(f"dimension count of tensor {shown}")
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise ModelFileError(
            cursor.path,
            f"tensor {shown} must have 1 to {MAX_DIMENSIONS} dimensions, got {num_dimensions}",
        )
    sizes = [cursor.u64(f"dimensions of tensor {shown}") for _ in range(num_dimensions)]
    if 0 in sizes:
        raise ModelFileError(cursor.path, f"tensor {shown} has an empty dimension: {sizes[::-1]}")
    code = cursor.u32(f"type of tensor {shown}")
    tensor_format = TENSOR_FORMATS.get(code)
    if tensor_format is None:
        raise UnsupportedModelError(
            cursor.path,
            f"tensor {shown} has type {_tensor_type_name(code)}; supported are "
            f"{', '.join(known.label for known in TENSOR_FORMATS.values())}",
        )
    offset = cursor.u64(f"offset of tensor {shown}")
    if sizes[0] % tensor_format.block_elements:
        raise ModelFileError(
            cursor.path,
            f"tensor {shown} has rows of {sizes[0]} elements, {tensor_format.label} needs a "
            f"multiple of {tensor_format.block_elements}",
        )
    num_bytes = tensor_format.row_bytes(sizes[0])
    for size in sizes[1:]:
        num_bytes *= size
    shape = tuple(reversed(sizes))
    return name, TensorEntry(tensor_format, shape, offset, num_bytes, cursor.path, cursor.buffer)


def _tensor_type_name(code: int) -> str:
    """Return what the gguf package calls a tensor type that this package does not read."""
    from gguf.constants import GGMLQuantizationType  # an error path only: the import takes 0.2 s

    try:
        return str(GGMLQuantizationType(code).name)
    except ValueError:
        return str(code)


def _alignment(cursor: _Cursor, values: Mapping[str, Value]) -> int:
    value = values.get(ALIGNMENT_KEY)
    if value is None:
        return DEFAULT_ALIGNMENT
    if value.is_array or TYPE_NAMES[value.type] != "uint32":
        raise ModelFileError(cursor.path, f"{ALIGNMENT_KEY} must be a uint32")
    alignment = int(_U32.unpack_from(cursor.buffer, value.offset)[0])
    if alignment < 8 or alignment & (alignment - 1):
        raise ModelFileError(
            cursor.path, f"{ALIGNMENT_KEY} must be a power of two and at least 8, got {alignment}"
        )
    return alignment


def _placed(
    cursor: _Cursor, name: str, entry: TensorEntry, data_start: int, alignment: int
) -> TensorEntry:
    """Return the entry with its offset in the file, checked against the file's end."""
    if entry.offset % alignment:
        raise ModelFileError(
            cursor.path,
            f"tensor {printable(name)} starts at {entry.offset}, not a multiple of {alignment}",
        )
    start = data_start + entry.offset
    if start + entry.num_bytes > cursor.size:
        raise ModelFileError(
            cursor.path,
            f"tensor {printable(name)} needs bytes {start} to {start + entry.num_bytes}, "
            f"the file has {cursor.size}",
        )
    return replace(entry, offset=start)


def _check_overlaps(path: Path, tensors: Mapping[str, TensorEntry]) -> None:
    in_order = sorted(tensors.items(), key=lambda item: item[1].offset)
    for (name, entry), (next_name, next_entry) in itertools.pairwise(in_order):
        if entry.offset + entry.num_bytes > next_entry.offset:
            raise ModelFileError(
                path, f"tensors {printable(name)} and {printable(next_name)} overlap"
            )
