"""Models in safetensors files, one or several.

    header size u64 | header: JSON, name → {dtype, shape, data_offsets} | data      little-endian

The files are mapped and their headers checked against the file's size before anything is used: the
tensors must fill the data without gap or overlap, as the format demands.
"""

from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from compute_plane.model import layout, nemotron_layout, recurrence_layout, stored_names
from compute_plane.model.architectures import ARCHITECTURES
from compute_plane.model.errors import ModelFileError, UnsupportedModelError, printable
from compute_plane.model.float8_config import Float8Quantization
from compute_plane.model.float8_matrices import take_float8_matrices
from compute_plane.model.group_config import GroupQuantization
from compute_plane.model.group_parts import take_group_matrices
from compute_plane.model.hf_text_part import is_of_text, text_tensors
from compute_plane.model.json_file import JsonObject, parse_object
from compute_plane.model.layout_checks import check_layout, check_numbers
from compute_plane.model.layout_parts import parts_of_files, stored_shapes
from compute_plane.model.mapped_file import forget_pages, map_file
from compute_plane.model.spec import ModelSpec
from compute_plane.model.stacked_experts import (
    CODES,
    has_stacked_experts,
    take_stacked_experts,
)
from compute_plane.model.stored_tensor import ARRAY_TYPES, FLOATS, StoredTensor
from compute_plane.model.tensor import RawTensor
from compute_plane.model.tensor_factors import factor_of

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Python objects take some twenty times the bytes of the JSON they came from.
# Those of a quantised mixture have 70 000 tensors and more.
MAX_HEADER_BYTES = 32 << 20
MAX_INDEX_BYTES = 32 << 20
MAX_DIMENSIONS = 4
MAX_SIZE = 1 << 48
# Buffers that old checkpoints stored beside their weights; they follow from the configuration.
DERIVED_SUFFIX = ".rotary_emb.inv_freq"


class SafetensorsSource:
    """The tensors of a checked Hugging Face directory by canonical name; a `TensorSource`.

    `buffers`: the mapped files they lie in.
    """

    def __init__(
        self, tensors: Mapping[str, RawTensor], spec: ModelSpec, buffers: Sequence[mmap.mmap]
    ) -> None:
        self._tensors = tensors
        self._spec = spec
        self._parts = parts_of_files(spec, in_gguf=False)
        self._head_orders = layout.head_orders(
            spec,
            turns_neighbours=ARCHITECTURES[spec.architecture].turns_neighbours == "always",
        )
        self._names = tuple(layout.tensor_shapes(spec))
        self._buffers = buffers

    @property
    def names(self) -> Sequence[str]:
        """Canonical names of all tensors, in the order of use."""
        return self._names

    def tensor(self, name: str) -> RawTensor:
        """Return one tensor; its bytes are in the mapped file."""
        part = self._parts.get(name)
        stored_name = stored_names.directory_name(self._spec, name if part is None else part.stored)
        tensor = self._tensors[stored_name]
        if part is not None:
            tensor = part.part_of(tensor, name)
        if stored_names.begins_at_one(self._spec, name):
            tensor = dataclasses.replace(tensor, added=1.0)
        if stored_name.endswith(f".{recurrence_layout.LOGARITHMS}"):
            tensor = dataclasses.replace(tensor, holds_logarithms=True)
        order, factor = self._head_orders.get(name), factor_of(self._spec, name)
        return dataclasses.replace(tensor, head_order=order, factor=factor)

    def forget_pages(self) -> None:
        """Give back the memory that what was read of the files takes."""
        for buffer in self._buffers:
            forget_pages(buffer)


def open_safetensors(
    directory: Path,
    spec: ModelSpec,
    quantization: GroupQuantization | Float8Quantization | None = None,
    *,
    is_text_part: bool = False,
) -> tuple[ModelSpec, SafetensorsSource]:
    """Open the weights of a directory and check them against its configuration.

    Returns the completed spec and the source. The output matrix is tied to the embedding if the
    configuration says so and the files hold no other. `quantization`: of the matrices that have
    no plain weight. `is_text_part`: of a model with others. Raises ModelFileError.
    """
    stored: dict[str, StoredTensor] = {}
    files = _files(directory)
    dtypes = tuple(FLOATS if quantization is None else ARRAY_TYPES)
    if spec.has_all_biases:
        dtypes = *FLOATS, CODES
    is_read = is_of_text if is_text_part else _every_tensor
    for path in files:
        for name, entry in read_header(path, dtypes, is_read).items():
            if name in stored:
                raise ModelFileError(
                    path, f"tensor {printable(name)} is also in {stored[name].path.name}"
                )
            if not name.endswith(DERIVED_SUFFIX):
                stored[name] = entry
    if is_text_part:
        stored = text_tensors(stored)
    stored = {
        name: entry
        for name, entry in stored.items()
        if not stored_names.is_left_out(spec, name, in_gguf=False)
    }
    if spec.architecture == nemotron_layout.ARCHITECTURE:
        stored = nemotron_layout.canonical_names(stored, spec)
    stored = {_with_prefix(name, stored): entry for name, entry in stored.items()}
    buffers = list({id(entry.buffer): entry.buffer for entry in stored.values()}.values())
    where = files[0] if len(files) == 1 else directory
    tensors = {}
    if quantization is None and has_stacked_experts(stored, spec):
        check_numbers(where, spec, len(stored))
        tensors = take_stacked_experts(where, stored, spec)
    elif quantization is not None:
        check_numbers(where, spec, len(stored))
        # Whether the output matrix is tied, or one of its own is stored, is not known yet.
        untied = dataclasses.replace(spec, tie_embeddings=False)
        shapes_of = stored_shapes(untied, in_gguf=False)
        named = {
            stored_names.directory_name(spec, name): shape for name, shape in shapes_of.items()
        }
        if isinstance(quantization, Float8Quantization):
            tensors = take_float8_matrices(stored, quantization, named)
        else:
            tensors = take_group_matrices(stored, quantization, named)
    tensors |= {name: _plain(name, entry) for name, entry in stored.items()}
    spec = dataclasses.replace(spec, tie_embeddings=_is_tied(tensors, spec))
    if spec.tie_embeddings:
        tensors.pop(layout.LM_HEAD, None)
    shapes = {name: (tensor.format, tensor.shape) for name, tensor in tensors.items()}
    name_of = partial(stored_names.directory_name, spec)
    spec = check_layout(where, spec, shapes, name_of, in_gguf=False)
    return spec, SafetensorsSource(tensors, spec, buffers)


def _plain(name: str, stored: StoredTensor) -> RawTensor:
    """Return a tensor that is stored as it is."""
    if stored.dtype not in FLOATS:
        raise _unsupported_type(stored.path, stored.name, stored.dtype, tuple(FLOATS))
    fmt = FLOATS[stored.dtype]
    return RawTensor(
        name=name,
        stored_name=stored.name,
        path=stored.path,
        format=fmt,
        shape=recurrence_layout.directory_shape(name, stored.shape),
        stored=stored.bytes().reshape(-1, fmt.row_bytes(stored.shape[-1])),
    )


def _every_tensor(_name: str) -> bool:
    return True


def read_header(
    path: Path,
    dtypes: Sequence[str] = tuple(FLOATS),
    is_read: Callable[[str], bool] = _every_tensor,
) -> dict[str, StoredTensor]:
    """Map one safetensors file and return its tensors by name, all checked.

    `is_read`: of others only where they lie is looked at. `dtypes`: the types they may have. A
    tensor without dimensions has one of size 1.
    """
    buffer = map_file(path)
    size = len(buffer)
    if size < 8:
        raise ModelFileError(path, f"truncated: {size} bytes, the header size alone takes 8")
    header_bytes = int.from_bytes(buffer[:8], "little")
    if header_bytes > min(MAX_HEADER_BYTES, size - 8):
        raise ModelFileError(
            path,
            f"the header must be at most {min(MAX_HEADER_BYTES, size - 8)} bytes, "
            f"it declares {header_bytes}",
        )
    data_start = 8 + header_bytes
    header = parse_object(path, buffer[8:data_start])
    header.pop("__metadata__", None)
    tensors = {}
    spans = []
    for name, entry in header.items():
        members, span = _span(path, name, entry, size - data_start)
        spans.append((*span, name))
        if is_read(name):
            tensors[name] = _entry(path, buffer, name, members, span, data_start, dtypes)
    _check_spans(path, sorted(spans), size - data_start)
    return tensors


def _span(
    path: Path, name: str, entry: object, data_bytes: int
) -> tuple[dict[str, object], tuple[int, int]]:
    """Return what a header says of a tensor, and the first and last byte of its data."""
    shown = printable(name)
    if not isinstance(entry, dict):
        raise ModelFileError(path, f"tensor {shown} is not described by an object")
    offsets = entry.get("data_offsets")
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or any(type(offset) is not int for offset in offsets)
        or not 0 <= offsets[0] <= offsets[1] <= data_bytes
    ):
        raise ModelFileError(
            path,
            f"tensor {shown} has data_offsets {printable(repr(offsets))}, "
            f"the file has {data_bytes} bytes of data",
        )
    return entry, (offsets[0], offsets[1])


def _entry(
    path: Path,
    buffer: mmap.mmap,
    name: str,
    entry: Mapping[str, object],
    span: tuple[int, int],
    data_start: int,
    dtypes: Sequence[str],
) -> StoredTensor:
    """Return one tensor. `span`: the first and last byte of its data."""
    shown = printable(name)
    dtype, shape = entry.get("dtype"), entry.get("shape")
    if not isinstance(dtype, str) or dtype not in dtypes:
        raise _unsupported_type(path, name, dtype, dtypes)
    if (
        not isinstance(shape, list)
        or len(shape) > MAX_DIMENSIONS
        or any(type(size) is not int or not 1 <= size <= MAX_SIZE for size in shape)
    ):
        raise ModelFileError(path, f"tensor {shown} has shape {printable(repr(shape))}")
    begin, end = span
    expected = ARRAY_TYPES[dtype].itemsize
    for size in shape:
        expected *= size
    if end - begin != expected:
        raise ModelFileError(
            path,
            f"tensor {shown} has {end - begin} bytes, shape {shape} as {dtype} needs {expected}",
        )
    sizes = tuple(shape) or (1,)
    return StoredTensor(name, path, buffer, dtype, sizes, data_start + begin, expected)


def _unsupported_type(
    path: Path, name: str, dtype: object, supported: Sequence[str]
) -> UnsupportedModelError:
    return UnsupportedModelError(
        path,
        f"tensor {printable(name)} has type {printable(str(dtype))}; "
        f"supported are {', '.join(supported)}",
    )


def _check_spans(path: Path, spans: list[tuple[int, int, str]], data_bytes: int) -> None:
    """Check that the tensors fill the data exactly; `spans` in order."""
    position = 0
    for begin, end, name in spans:
        if begin < position:
            raise ModelFileError(path, f"tensor {printable(name)} overlaps the one before it")
        if begin > position:
            raise ModelFileError(path, f"{begin - position} unused bytes before {printable(name)}")
        position = end
    if position != data_bytes:
        raise ModelFileError(
            path, f"the tensors take {position} bytes of data, the file has {data_bytes}"
        )


def _files(directory: Path) -> list[Path]:
    """Return the weight files of a directory, in order."""
    index = directory / INDEX
    if index.is_file():
        return _indexed(directory, JsonObject.read(index, MAX_INDEX_BYTES))
    single = directory / SINGLE
    if single.is_file():
        return [single]
    others = sorted(directory.glob("*.safetensors"))
    if len(others) == 1:
        return others
    if others:
        raise ModelFileError(
            directory, f"{len(others)} *.safetensors files, but no {INDEX} that names their parts"
        )
    raise ModelFileError(directory, f"no {SINGLE} (other checkpoint formats are not read)")


def _indexed(directory: Path, index: JsonObject) -> list[Path]:
    weight_map = index.raw("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(index.path, "weight_map must be an object of tensor names")
    names = list(dict.fromkeys(weight_map.values()))
    for name in names:
        # A name is a file of this directory and nothing else: no path leads out of it.
        if not isinstance(name, str) or Path(name).name != name or "\0" in name:
            raise ModelFileError(
                index.path,
                f"weight_map must name files of this directory, got {printable(repr(name))}",
            )
    return [directory / name for name in names]


def _with_prefix(name: str, names: Container[str]) -> str:
    """Return what a tensor of a directory with these names is called in one of a whole model.

    Directories of a model without its head, as embedding models are published, leave a prefix out.
    """
    if name == layout.LM_HEAD or layout.EMBEDDING.removeprefix(layout.PREFIX) not in names:
        return name
    return layout.PREFIX + name


def _is_tied(tensors: Mapping[str, RawTensor], spec: ModelSpec) -> bool:
    """Tell whether the embedding serves as output matrix.

    As in Hugging Face: a configuration that ties yields to a file that holds two different ones.
    """
    embedding, head = tensors.get(layout.EMBEDDING), tensors.get(layout.LM_HEAD)
    if not spec.tie_embeddings or embedding is None:
        return spec.tie_embeddings
    if head is None:
        return True
    if (head.format, head.shape) != (embedding.format, embedding.shape):
        return False
    return np.array_equal(embedding.rows(), head.rows())
