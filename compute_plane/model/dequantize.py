"""Decoding of stored rows to float32.

A block of GGUF's holds 32 consecutive elements of a row:

    Q8_0  34 bytes   d: float16 | 32 x int8 q                 value = q · d
    Q4_0  18 bytes   d: float16 | 16 bytes of nibbles         value = (q - 8) · d
    Q4_1  20 bytes   d: float16 | m: float16 | 16 bytes       value = q · d + m

Byte k of the nibbles holds element k in its low half and element k + 16 in its high half. The
formats of five and six bits and those of 256 elements are `compute_plane.model.k_quants`, those
that not every device reads `compute_plane.model.read_only_quants` and `compute_plane.model.mxfp4`,
those of group-wise quantised checkpoints `compute_plane.model.group_blocks`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from compute_plane.model import group_blocks, mxfp4, read_only_quants
from compute_plane.model.errors import ModelFileError, printable
from kernels.reference import k_quants
from kernels.reference.k_quants import float16_column

UInt8Array = npt.NDArray[np.uint8]
Float32Array = npt.NDArray[np.float32]

# Elements decoded at a time: the temporaries stay in cache and small beside the result.
CHUNK_ELEMENTS = 1 << 16

_BLOCK = 32
_HALF = 16


def decode_rows(
    rows: UInt8Array, format_label: str, out: Float32Array, *, path: Path, name: str
) -> None:
    """Decode raw rows [R, bytes of a row] into `out`, float32 [R, C].

    Raises ModelFileError, naming file and tensor, if a value is infinite or not a number.
    """
    decode = _DECODERS[format_label]
    step = max(1, CHUNK_ELEMENTS // max(1, out.shape[1]))
    for first in range(0, len(out), step):
        chunk = out[first : first + step]
        # inf · 0 and signalling NaNs warn; what they leave behind is found just below.
        with np.errstate(all="ignore"):
            decode(np.ascontiguousarray(rows[first : first + step]), chunk)
        if not np.isfinite(chunk).all():
            row, column = np.argwhere(~np.isfinite(chunk))[0]
            raise ModelFileError(
                path,
                f"tensor {printable(name)} holds {chunk[row, column]} "
                f"at row {first + row}, column {column}",
            )


def _f32(rows: UInt8Array, out: Float32Array) -> None:
    out[:] = rows.view("<f4")


def _f16(rows: UInt8Array, out: Float32Array) -> None:
    out[:] = rows.view("<f2")


def _bf16(rows: UInt8Array, out: Float32Array) -> None:
    # A bfloat16 is the upper half of a float32.
    bits = out.view(np.uint32)
    bits[:] = rows.view("<u2")
    bits <<= 16


def _q8_0(rows: UInt8Array, out: Float32Array) -> None:
    blocks = rows.reshape(-1, 34)
    values = out.reshape(-1, _BLOCK)
    np.multiply(blocks[:, 2:].view(np.int8), float16_column(blocks, 0), out=values)


def _q4_0(rows: UInt8Array, out: Float32Array) -> None:
    blocks = rows.reshape(-1, 18)
    scale = float16_column(blocks, 0)
    nibbles = blocks[:, 2:]
    values = out.reshape(-1, _BLOCK)
    np.multiply((nibbles & 15).view(np.int8) - np.int8(8), scale, out=values[:, :_HALF])
    np.multiply((nibbles >> 4).view(np.int8) - np.int8(8), scale, out=values[:, _HALF:])


def _q4_1(rows: UInt8Array, out: Float32Array) -> None:
    blocks = rows.reshape(-1, 20)
    scale = float16_column(blocks, 0)
    nibbles = blocks[:, 4:]
    values = out.reshape(-1, _BLOCK)
    np.multiply(nibbles & 15, scale, out=values[:, :_HALF])
    np.multiply(nibbles >> 4, scale, out=values[:, _HALF:])
    values += float16_column(blocks, 2)


_DECODERS: dict[str, Callable[[UInt8Array, Float32Array], None]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    **k_quants.DECODERS,
    **read_only_quants.DECODERS,
    "MXFP4": mxfp4.decode_mxfp4,
    "Q4_F": mxfp4.decode_q4_f,
    "INT4": group_blocks.decode_int4,
    "UINT4": group_blocks.decode_uint4,
    "INT8": group_blocks.decode_int8,
    "UINT8": group_blocks.decode_uint8,
    "FP8": group_blocks.decode_fp8,
    "Q4_Z": group_blocks.decode_q4_z,
    "Q8_Z": group_blocks.decode_q8_z,
}
