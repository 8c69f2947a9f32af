"""MXFP4, the four-bit floats of gpt-oss's experts: decoded, and turned into a format that runs.

    MXFP4    17 bytes    s: one byte | 16 bytes of nibbles as in Q4_0, 32 elements
             value = CODES[q] · 2^(s − 128)        s = 255 stands for NaN

q is a float of one sign bit, two of exponent and one of mantissa: 0, ½, 1, 1½, 2, 3, 4 or 6; CODES
are these doubled. Safetensors files hold codes and scales apart, and the codes of neighbouring
elements in one byte, the first in its low half:

    blocks   uint8 [N, K/32, 16]
    scales   uint8 [N, K/32]

On CUDA it runs as it is. On the CPU it becomes, exactly where d = 2^(s − 128) is a float16, from
2^−24 to 2^15:

    Q4_F     18 bytes    d: float16 | 16 bytes of nibbles as they are    value = CODES[q] · d

Source: Open Compute Project, Microscaling Formats (MX) 1.0; ggml's `ggml-quants.c`.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from kernels.reference.four_bit_floats import DOUBLED, EXPONENT_BIAS, NOT_A_NUMBER
from kernels.reference.k_quants import float16_column

UInt8Array = npt.NDArray[np.uint8]
Float32Array = npt.NDArray[np.float32]

GROUP: Final = 32
GROUP_BYTES: Final = GROUP // 2
"""Of a group's codes."""
BLOCK_BYTES: Final = 1 + GROUP_BYTES
BIAS: Final = EXPONENT_BIAS + 1
"""Of codes doubled."""
LARGEST_EXPONENT: Final = 252
"""With a larger one 6 is no float32 any more."""
CODES: Final = np.array(DOUBLED, np.int8)
"""What the nibbles stand for, doubled."""
HALF: Final = np.uint8(4)
"""The shift that keeps bytes bytes."""


def decode_mxfp4(rows: UInt8Array, out: Float32Array) -> None:
    """Decode rows of MXFP4 blocks, uint8 [R, bytes], C-contiguous, into float32 [R, C]."""
    blocks = rows.reshape(-1, BLOCK_BYTES)
    scales = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - BIAS)
    scales[blocks[:, :1] == NOT_A_NUMBER] = np.nan
    np.multiply(_codes(blocks[:, 1:]), scales, out=out.reshape(-1, GROUP))


def decode_q4_f(rows: UInt8Array, out: Float32Array) -> None:
    """Decode rows of Q4_F blocks."""
    blocks = rows.reshape(-1, 2 + GROUP_BYTES)
    np.multiply(_codes(blocks[:, 2:]), float16_column(blocks, 0), out=out.reshape(-1, GROUP))


def mxfp4_to_q4_f(rows: UInt8Array, out: UInt8Array) -> None:
    """Turn rows of MXFP4 into rows of Q4_F."""
    blocks, target = rows.reshape(-1, BLOCK_BYTES), out.reshape(-1, 2 + GROUP_BYTES)
    target[:, :2] = _scales(blocks)
    target[:, 2:] = blocks[:, 1:]


def _scales(blocks: UInt8Array) -> UInt8Array:
    """Return the scales as float16, uint8 [blocks, 2]; infinite what is too large or no number."""
    scales = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - BIAS).astype(np.float16)
    return scales.view(np.uint8)


def blocks_of(codes: UInt8Array, scales: UInt8Array) -> UInt8Array:
    """Return rows of blocks, uint8 [R, bytes of a row], of rows as safetensors files hold them.

    `codes`: uint8 [R, K/32, 16], `scales`: uint8 [R, K/32].
    """
    out = np.empty((*scales.shape, BLOCK_BYTES), np.uint8)
    out[..., 0] = scales
    each = np.stack((codes & 15, codes >> HALF), axis=-1).reshape(*scales.shape, GROUP)
    out[..., 1:] = each[..., :GROUP_BYTES] | each[..., GROUP_BYTES:] << HALF
    return out.reshape(len(scales), -1)


def _codes(nibbles: UInt8Array) -> npt.NDArray[np.int8]:
    """Return what nibbles stand for, int8 [blocks, 32]."""
    return CODES[np.concatenate((nibbles & 15, nibbles >> HALF), axis=1)]
