"""Models in several GGUF files: the first has the keys, each has some of the tensors.

    NAME-00001-of-00003.gguf    split.no 0, split.count 3, split.tensors.count of all, every other key
    NAME-00002-of-00003.gguf    split.no 1, split.count 3
    NAME-00003-of-00003.gguf    split.no 2, split.count 3

Source: gguf-split of the llama.cpp project.
"""  # noqa: E501 - a table

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Final

from compute_plane.model.errors import ModelFileError, printable
from compute_plane.model.gguf_header import MAX_TENSORS, GgufFile, open_gguf
from compute_plane.model.gguf_metadata import GgufMetadata

COUNT: Final = "split.count"
NUMBER: Final = "split.no"
NUM_TENSORS: Final = "split.tensors.count"
MAX_PARTS: Final = 1024
_NAME: Final = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf")


def names_of_parts(name: str) -> list[str]:
    """Return what all parts of a model are called one of which has this name; else it alone."""
    found = _NAME.fullmatch(name)
    count = 0 if found is None else int(found["count"])
    if found is None or not 1 <= count <= MAX_PARTS:
        return [name]
    return [f"{found['stem']}-{part:05}-of-{count:05}.gguf" for part in range(1, count + 1)]


def open_parts(path: Path) -> GgufFile:
    """Open a GGUF file, with those that have the rest of its tensors if it is the first of several.

    Raises ModelFileError, UnsupportedModelError.
    """
    first = open_gguf(path)
    keys = GgufMetadata(first)
    count = keys.integer(COUNT)
    if count is None or count == 1:
        return first
    names = names_of_parts(path.name)
    if not 1 <= count <= MAX_PARTS or len(names) != count:
        raise ModelFileError(
            path,
            f"{COUNT} is {count}: the first of so many files, {MAX_PARTS} at most, must be called "
            f"NAME-00001-of-{min(max(count, 1), MAX_PARTS):05}.gguf",
        )
    if keys.integer(NUMBER) != 0 or path.name != names[0]:
        raise ModelFileError(
            path, f"one of {count} files of a model; name the first one, {printable(names[0])}"
        )
    tensors = dict(first.tensors)
    for number, name in enumerate(names[1:], 1):
        part = open_gguf(path.with_name(name))
        _check_part(part, number, count)
        for tensor, entry in part.tensors.items():
            other = tensors.setdefault(tensor, entry)
            if other is not entry:
                raise ModelFileError(
                    part.path, f"tensor {printable(tensor)} is also in {printable(other.path.name)}"
                )
        if len(tensors) > MAX_TENSORS:
            raise ModelFileError(part.path, f"all files must have at most {MAX_TENSORS} tensors")
    declared = keys.integer(NUM_TENSORS)
    if declared not in (None, len(tensors)):
        raise ModelFileError(path, f"{NUM_TENSORS} is {declared}, the files have {len(tensors)}")
    return dataclasses.replace(first, tensors=tensors)


def _check_part(part: GgufFile, number: int, count: int) -> None:
    """Check that a file is the part that its name says."""
    keys = GgufMetadata(part)
    for key, expected in ((NUMBER, number), (COUNT, count)):
        given = keys.integer(key)
        if given != expected:
            raise ModelFileError(part.path, f"{key} must be {expected}, got {given}")
