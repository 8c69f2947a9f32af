"""Matrices of float8, E4M3, that share scales: found among a checkpoint's tensors, made into rows.

Where a plain checkpoint has `<module>.weight`, [N outputs, K inputs], these have

    weight             float8 [N, K]
    weight_scale       [], [1], [1, 1], [N], [N, 1] or one of each block, [⌈N / n⌉, ⌈K / k⌉]
    weight_scale_inv   the same by another name: it is multiplied by, too
    input_scale        what inputs would be divided by, were they rounded (transformers:
                       activation_scale); input_scale_ub: at most. Not used here

    weight[o, i] = code[o, i] · scale[o / n, i / k]

A matrix that is not quantised has a plain weight of 16 or 32 bits. The rows that are handed on are
blocks of 32 inputs, each with its scale (`group_blocks`), made a run of rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from compute_plane.model import layout
from compute_plane.model.errors import ModelFileError, UnsupportedModelError, printable
from compute_plane.model.float8_config import Float8Quantization
from compute_plane.model.group_blocks import BLOCK, block_type
from compute_plane.model.stored_tensor import FLOATS, StoredTensor
from compute_plane.model.tensor import Float32Array, RawTensor, Rows, TensorFormat, UInt8Array

FLOAT8: Final = "F8_E4M3"
SCALES: Final = ("weight_scale", "weight_scale_inv")
UNUSED: Final = ("input_scale", "input_scale_ub", "activation_scale")
CHUNK_ROWS: Final = 64


@dataclass(frozen=True, slots=True, eq=False)
class Float8Matrix:
    """A matrix [N, K] of codes, which gives blocks; the `stored` of a `RawTensor`.

    `codes`: uint8 [N, K]. `scales`: float32, one of each block of `block` (outputs, inputs).
    """

    codes: UInt8Array
    scales: Float32Array
    block: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        """[rows, bytes of a row]."""
        num_rows, num_inputs = self.codes.shape
        return num_rows, TensorFormat.FP8.row_bytes(num_inputs)

    @property
    def scale_group(self) -> int:
        """How many neighbouring inputs have one scale wherever one looks, from input 0 on."""
        return math.gcd(self.block[1], self.codes.shape[1])

    def __getitem__(self, which: Rows, /) -> UInt8Array:
        """Return some rows, uint8 [R, bytes of a row]."""
        num_rows, num_inputs = self.codes.shape
        numbers = np.arange(num_rows)[which]
        blocks = np.arange(0, num_inputs, BLOCK)
        out = np.empty((len(numbers), len(blocks)), block_type(8, has_zeros=False))
        of_rows, of_columns = numbers // self.block[0], blocks // self.block[1]
        for first in range(0, len(numbers), CHUNK_ROWS):
            part = slice(first, first + CHUNK_ROWS)
            rows = slice(int(numbers[first]), int(numbers[part][-1]) + 1)
            is_run = isinstance(which, slice) and rows.stop - rows.start == len(numbers[part])
            codes = self.codes[rows if is_run else numbers[part]]
            out["q"][part] = codes.reshape(len(codes), -1, BLOCK)
            out["s"][part] = self.scales[of_rows[part, None], of_columns]
        return out.view(np.uint8).reshape(len(numbers), -1)


def take_float8_matrices(
    tensors: dict[str, StoredTensor],
    quantization: Float8Quantization,
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, RawTensor]:
    """Take the matrices of float8 out of a checkpoint's tensors, by canonical name.

    `shapes`: of what the model has, by the same. Raises ModelFileError naming the tensor at fault.
    """
    matrices = {}
    for name in [name for name, stored in tensors.items() if stored.dtype == FLOAT8]:
        codes = tensors.pop(name)
        shown = f"tensor {printable(codes.name)}"
        module, _, part = name.rpartition(".")
        if name == layout.EMBEDDING:
            raise UnsupportedModelError(codes.path, f"{shown}: an embedding is not read so")
        if part != layout.WEIGHT or len(shapes.get(name, ())) != 2:
            raise ModelFileError(codes.path, f"{shown} is of no single matrix of the model")
        if codes.shape != shapes[name]:
            raise ModelFileError(
                codes.path,
                f"{shown} has shape {list(codes.shape)}, must be {list(shapes[name])}",
            )
        if codes.shape[1] % BLOCK:
            raise UnsupportedModelError(
                codes.path,
                f"{shown} has {codes.shape[1]} inputs; multiples of {BLOCK} are read",
            )
        scale_name = next((s for s in SCALES if f"{module}.{s}" in tensors), SCALES[0])
        scale_name = f"{module}.{scale_name}"
        if scale_name not in tensors:
            raise ModelFileError(codes.path, f"tensor {printable(scale_name)} is missing")
        for unused in UNUSED:
            tensors.pop(f"{module}.{unused}", None)
        matrix = _matrix(codes, tensors.pop(scale_name), quantization)
        matrices[name] = RawTensor(
            name=name,
            stored_name=codes.name,
            path=codes.path,
            format=TensorFormat.FP8,
            shape=codes.shape,
            stored=matrix,
            scale_group=matrix.scale_group,
        )
    return matrices


def _matrix(
    codes: StoredTensor, stored: StoredTensor, quantization: Float8Quantization
) -> Float8Matrix:
    """Put a matrix together; `stored`: its scales."""
    name = stored.name
    num_outputs, num_inputs = codes.shape
    outputs, inputs = quantization.block
    block = (outputs or num_outputs, inputs or num_inputs)
    expected = -(-num_outputs // block[0]), -(-num_inputs // block[1])
    allowed: set[tuple[int, ...]] = {expected}
    if expected[1] == 1:
        allowed.add(expected[:1])
    if stored.dtype not in FLOATS:
        raise ModelFileError(
            stored.path,
            f"tensor {printable(name)} has type {stored.dtype}, must be {' or '.join(FLOATS)}",
        )
    if stored.shape not in allowed:
        raise ModelFileError(
            stored.path,
            f"tensor {printable(name)} has shape {list(stored.shape)}, must be {list(expected)}",
        )
    scales = RawTensor(
        name, name, stored.path, FLOATS[stored.dtype], (1, int(np.prod(expected))),
        stored.bytes().reshape(1, -1),
    )  # fmt: skip
    return Float8Matrix(codes.array(), scales.to_float32().reshape(expected), block)
