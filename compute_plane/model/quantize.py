"""Stored rows turned from one format into another, where kernels run fewer than files hold.

Exact:              IQ4_NL → Q8_0, Q3_K → Q6_K: `compute_plane.model.read_only_quants`
                    MXFP4 → Q4_F: `compute_plane.model.mxfp4`, but for scales beyond float16
Nearly exact:       IQ4_XS → Q8_0  d · s of each group, rounded to float16
                    INT4 → Q4_0, UINT4 → Q4_1 or Q4_Z, INT8 → Q8_0, UINT8 → Q8_Z:
                    `compute_plane.model.group_blocks`
With a loss:        anything → Q8_0, through float32: d = largest magnitude / 127 in float16, q to
                    nearest; anything → BF16, F16, to nearest, ties to even
Exact, but larger:  anything → F32
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from compute_plane.model.dequantize import decode_rows
from compute_plane.model.errors import ModelFileError, printable
from compute_plane.model.group_blocks import (
    are_fp8_finite,
    int4_to_q4_0,
    int8_to_q8_0,
    uint4_to_q4_1,
    uint4_to_q4_z,
    uint8_to_q8_z,
)
from compute_plane.model.mxfp4 import LARGEST_EXPONENT, mxfp4_to_q4_f
from compute_plane.model.read_only_quants import iq4_nl_to_q8_0, iq4_xs_to_q8_0, q3_k_to_q6_k
from compute_plane.model.tensor import ALL_ROWS, RawTensor, Rows, TensorFormat, in_model_order

UInt8Array = npt.NDArray[np.uint8]
Float32Array = npt.NDArray[np.float32]
RowConversion: TypeAlias = Callable[[UInt8Array, UInt8Array], None]
"""From rows of one format to `out`, rows of another, both uint8 [R, bytes of a row]."""

BLOCK: Final = 32
LARGEST_Q8: Final = 127
CHUNK_ELEMENTS: Final = 1 << 16
"""Elements converted at a time: the temporaries stay in cache."""


def converted_tensor(tensor: RawTensor, target: TensorFormat, which: Rows = ALL_ROWS) -> UInt8Array:
    """Return a tensor's rows, or some of them, in a format, uint8 [R, bytes of a row].

    `which`: in the model's row order. A view of the file where it has them so. Formats without
    blocks have the columns in the model's order, those with blocks keep the tensor's `input_order`.
    Raises ModelFileError if a weight is not finite or too large for the format.
    """
    path, name = tensor.path, tensor.stored_name
    stored, of_stored = tensor.rows(which), tensor.format
    if tensor.is_stored_otherwise:  # in float32, whatever it is stored and wanted in
        values = tensor.to_float32().reshape(tensor.stored.shape[0], -1)
        stored, of_stored = values[which].view(np.uint8), TensorFormat.F32
    elif tensor.is_multiplied:
        stored, of_stored = _multiplied(tensor, stored, tensor.factors(which))
    try:
        rows = convert_rows(stored, of_stored, target, path=path, name=name)
    except ModelFileError:
        tensor.to_float32()  # raises the same, with the row counted from the tensor's first
        raise
    if not are_finite(rows, target):
        tensor.to_float32()
        raise ModelFileError(
            path, f"tensor {printable(name)} has weights too large for {target.label}"
        )
    if tensor.input_order is None or target.block_elements > 1:
        return rows
    elements = rows.view(f"<u{target.block_bytes}")
    return in_model_order(elements, tensor.input_order).view(np.uint8)


def _multiplied(
    tensor: RawTensor, stored: UInt8Array, factors: Float32Array
) -> tuple[UInt8Array, TensorFormat]:
    """Return stored rows times `factors`, float32 [R or 1, 1], and the format they are in then.

    Where blocks have a scale in float32 that is multiplied, and nothing is lost; other rows become
    float32, to be rounded to what is wanted once.
    """
    if tensor.format in SCALED_BY_FLOAT32:
        blocks = stored.reshape(len(stored), -1, tensor.format.block_bytes).copy()
        scales = np.ascontiguousarray(blocks[:, :, :4]).view("<f4")
        blocks[:, :, :4] = (scales * factors[:, :, None]).view(np.uint8)
        return blocks.reshape(stored.shape), tensor.format
    path, name, f32 = tensor.path, tensor.stored_name, TensorFormat.F32
    values = convert_rows(stored, tensor.format, f32, path=path, name=name).view("<f4") * factors
    return values.view(np.uint8), f32


def convert_rows(
    rows: UInt8Array, stored: TensorFormat, target: TensorFormat, *, path: Path, name: str
) -> UInt8Array:
    """Return rows [R, bytes of a row] of one format in another, uint8 [R, bytes of a row].

    `path`, `name`: of the tensor, for errors. Raises ModelFileError if a weight is not finite;
    scales that overflow in the new format are left for `are_finite` to find.
    """
    if stored is target:
        return rows
    elements = rows.shape[1] // stored.block_bytes * stored.block_elements
    out = np.empty((len(rows), target.row_bytes(elements)), np.uint8)
    step = max(1, CHUNK_ELEMENTS // elements)
    with np.errstate(over="ignore", invalid="ignore"):
        for first in range(0, len(rows), step):
            part = np.ascontiguousarray(rows[first : first + step])
            target_part = out[first : first + step]
            convert = _CONVERSIONS.get((stored, target))
            if convert is not None:
                convert(part, target_part)
            else:
                values = np.empty((len(part), elements), np.float32)
                decode_rows(part, stored.label, values, path=path, name=name)
                _encode(values, target, target_part)
    return out


def are_finite(rows: UInt8Array, stored: TensorFormat) -> bool:
    """Tell whether all weights of rows are finite; of quantised formats it looks at the scales.

    A scale that is not finite makes its weights so, and 4 to 8 bits times a finite one cannot; but
    codes of FP8 may be none.
    """
    if stored is TensorFormat.FP8:
        return are_fp8_finite(rows)
    if stored is TensorFormat.F32:
        return bool(np.isfinite(np.ascontiguousarray(rows).view("<f4")).all())
    if stored in (TensorFormat.F16, TensorFormat.BF16):
        bits, exponent = np.ascontiguousarray(rows).view("<u2"), EXPONENT_BITS[stored]
        return not np.equal(bits & exponent, exponent).any()
    exponent = EXPONENT_BITS[TensorFormat.F16]
    blocks = rows.reshape(-1, stored.block_bytes)
    if stored is TensorFormat.MXFP4:
        return not np.greater(blocks[:, 0], LARGEST_EXPONENT).any()
    first, end = SCALES_AT.get(stored, (0, 2))
    scales = np.ascontiguousarray(blocks[:, first:end]).view("<u2")
    return not np.equal(scales & exponent, exponent).any()


SCALED_BY_FLOAT32: Final = (
    TensorFormat.INT4,
    TensorFormat.UINT4,
    TensorFormat.INT8,
    TensorFormat.UINT8,
    TensorFormat.FP8,
)
"""Formats whose blocks begin with a scale in float32 (`compute_plane.model.group_blocks`)."""
SCALES_AT: Final = {
    TensorFormat.Q4_1: (0, 4),
    TensorFormat.Q5_1: (0, 4),
    TensorFormat.Q4_K: (0, 4),
    TensorFormat.Q5_K: (0, 4),
    TensorFormat.Q6_K: (208, 210),
    TensorFormat.Q2_K: (80, 84),
    TensorFormat.Q3_K: (108, 110),
}
"""The bytes of a block with float16 of their own: d, and m or dmin; of the others the first two."""


EXPONENT_BITS: Final = {
    TensorFormat.F16: np.uint16(0x7C00),
    TensorFormat.BF16: np.uint16(0x7F80),
}


def round_to_bf16(values: Float32Array) -> npt.NDArray[np.uint16]:
    """Return finite float32 values rounded to bfloat16, to nearest, ties to even, as uint16 bits.

    A value above the largest bfloat16 becomes infinite, as IEEE 754 has it.
    """
    bits = values.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + (odd + np.uint32(0x7FFF))) >> np.uint32(16)).astype(np.uint16)


def _encode(values: Float32Array, target: TensorFormat, out: UInt8Array) -> None:
    """Write float32 values [R, C] as rows of F32, F16, BF16 or Q8_0."""
    if target is TensorFormat.F32:
        out.view("<f4")[:] = values
    elif target is TensorFormat.F16:
        out.view("<f2")[:] = values
    elif target is TensorFormat.BF16:
        out.view("<u2")[:] = round_to_bf16(values)
    elif target is TensorFormat.Q8_0:
        _to_q8_0(values, out)
    else:
        raise ValueError(f"there is no conversion to {target.label}")


def _to_q8_0(values: Float32Array, out: UInt8Array) -> None:
    groups = values.reshape(-1, BLOCK)
    largest = np.abs(groups).max(axis=1, keepdims=True)
    scales = (largest / np.float32(LARGEST_Q8)).astype(np.float16)
    # The scale as it is stored: the error of its rounding does not add up over the group.
    divisors = scales.astype(np.float32)
    np.copyto(divisors, 1, where=divisors == 0)
    q = np.clip(np.rint(groups / divisors), -LARGEST_Q8, LARGEST_Q8)
    q[scales[:, 0] == 0] = 0
    _write_blocks(out, 34, [scales], q.astype(np.int8).view(np.uint8))


def _write_blocks(
    out: UInt8Array, block_bytes: int, numbers: list[npt.NDArray[np.float16]], q: UInt8Array
) -> None:
    """Write blocks of float16 numbers, [blocks, 1] each, and bytes of quants."""
    target = out.reshape(-1, block_bytes)
    for index, number in enumerate(numbers):
        target[:, 2 * index : 2 * index + 2] = number.view(np.uint8).reshape(-1, 2)
    target[:, 2 * len(numbers) :] = q


_CONVERSIONS: Final[Mapping[tuple[TensorFormat, TensorFormat], RowConversion]] = {
    (TensorFormat.IQ4_NL, TensorFormat.Q8_0): iq4_nl_to_q8_0,
    (TensorFormat.IQ4_XS, TensorFormat.Q8_0): iq4_xs_to_q8_0,
    (TensorFormat.Q3_K, TensorFormat.Q6_K): q3_k_to_q6_k,
    (TensorFormat.MXFP4, TensorFormat.Q4_F): mxfp4_to_q4_f,
    (TensorFormat.INT4, TensorFormat.Q4_0): int4_to_q4_0,
    (TensorFormat.UINT4, TensorFormat.Q4_1): uint4_to_q4_1,
    (TensorFormat.INT8, TensorFormat.Q8_0): int8_to_q8_0,
    (TensorFormat.UINT4, TensorFormat.Q4_Z): uint4_to_q4_z,
    (TensorFormat.UINT8, TensorFormat.Q8_Z): uint8_to_q8_z,
}
"""Those that go by the quants, not through float32."""
