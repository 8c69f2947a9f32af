"""Rows of group-wise quantised matrices in blocks of 32, with all bits of the checkpoint kept.

Checkpoints share a scale s, and maybe a zero point z, among a group of 32 · n weights of a row, and
store quants q of 4 or 8 bits: weight = s · (q − z). Turned into blocks, so that the rest of the
package treats such a matrix as it treats one of a GGUF file; nothing stores these bytes:

    INT4    20 bytes   s: float32 | 16 bytes of nibbles            value = (q − 8) · s
    UINT4   22 bytes   s: float32 | z: uint16 | 16 bytes           value = (q − z) · s
    INT8    36 bytes   s: float32 | 32 x int8 q                    value = q · s
    UINT8   38 bytes   s: float32 | z: uint16 | 32 x uint8 q       value = (q − z) · s
    FP8     36 bytes   s: float32 | 32 x E4M3 q                    value = q · s

Nibbles lie as in GGUF (`compute_plane.model.dequantize`). float32 holds scales of 16 bits, and
their products with small integers, exactly.

They run as the formats that have kernels, d being s as float16: exact for scales that float16
holds, as most checkpoints' are. The last two are CUDA's, the others both executors'. FP8 runs on
CUDA as it is:

    INT4  → Q4_0
    UINT4 → Q4_1    m = −s · z as float16: off by 2⁻¹¹ of itself at most, and so by z / 2048 of a
                    step between two quants
    INT8  → Q8_0
    UINT4 → Q4_Z    19 bytes   d: float16 | z: uint8 | 16 bytes of nibbles     value = (q − z) · d
    UINT8 → Q8_Z    35 bytes   d: float16 | z − 128: int8 | 32 x int8 q − 128  value = (q − z) · d
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

UInt8Array = npt.NDArray[np.uint8]
Float32Array = npt.NDArray[np.float32]

BLOCK: Final = 32
_HALF: Final = BLOCK // 2
_WORD: Final = np.dtype("<u8")
_SIGNS: Final = np.uint64(0x8080808080808080)
_SIGN: Final = np.uint8(0x80)
_MAGNITUDE: Final = np.uint8(0x7F)
_LARGEST_SCALE: Final = np.finfo(np.float32).max / 448
"""With a larger one the largest E4M3 is no float32 any more."""
_CHECKED_ROWS: Final = 64


def _e4m3_values() -> Float32Array:
    """Return what the codes of E4M3 stand for: s eeee mmm; no infinities, s 1111 111 is NaN."""
    codes = np.arange(256)
    exponents, fractions = codes >> 3 & 15, codes & 7
    magnitudes = np.where(
        exponents == 0, fractions * 2.0**-9, (8 + fractions) * 2.0 ** (exponents - 10)
    )
    magnitudes[(codes & 127) == 127] = np.nan
    return np.where(codes & 128, -magnitudes, magnitudes).astype(np.float32)


_E4M3: Final = _e4m3_values()


def block_type(bits: int, *, has_zeros: bool) -> np.dtype[Any]:
    """Return a block of so many bits a weight, with fields s, z (if it has zero points) and q."""
    zero = [("z", "<u2")] if has_zeros else []
    return np.dtype([("s", "<f4"), *zero, ("q", "u1", (BLOCK * bits // 8,))])


def write_blocks(
    quants: UInt8Array, scales: Float32Array, zeros: UInt8Array | None, bits: int
) -> UInt8Array:
    """Return rows of blocks, uint8 [R, bytes of a row].

    `quants`: [R, K], as stored, without sign. `scales`, `zeros`: [R, K / 32]; None: 2^(bits - 1)
    everywhere.
    """
    out = np.empty(scales.shape, block_type(bits, has_zeros=zeros is not None))
    out["s"] = scales
    if zeros is not None:
        out["z"] = zeros
    # Eight weights at a time: words of a row, one column of them after the other.
    words, target = quants.view(_WORD).reshape(*scales.shape, -1), out["q"].view(_WORD)
    for place in range(target.shape[-1]):
        if bits == 4:
            target[..., place] = words[..., place] | words[..., place + 2] << np.uint64(4)
        elif zeros is None:
            target[..., place] = words[..., place] ^ _SIGNS  # q - 128 as int8
        else:
            target[..., place] = words[..., place]
    return out.view(np.uint8).reshape(len(quants), -1)


def decode_int4(rows: UInt8Array, out: Float32Array) -> None:
    """Decode rows of INT4 into `out`, float32 [R, C]."""
    _decode_nibbles(rows.view(block_type(4, has_zeros=False)), np.int8(8), out)


def decode_uint4(rows: UInt8Array, out: Float32Array) -> None:
    """Decode rows of UINT4 into `out`, float32 [R, C]."""
    blocks = rows.view(block_type(4, has_zeros=True))
    _decode_nibbles(blocks, blocks["z"].astype(np.int8)[..., None], out)


def decode_int8(rows: UInt8Array, out: Float32Array) -> None:
    """Decode rows of INT8 into `out`, float32 [R, C]."""
    blocks = rows.view(block_type(8, has_zeros=False))
    values = out.reshape(*blocks.shape, BLOCK)
    np.multiply(blocks["q"].view(np.int8), blocks["s"][..., None], out=values)


def decode_uint8(rows: UInt8Array, out: Float32Array) -> None:
    """Decode rows of UINT8 into `out`, float32 [R, C]."""
    blocks = rows.view(block_type(8, has_zeros=True))
    values = out.reshape(*blocks.shape, BLOCK)
    differences = blocks["q"].astype(np.int16) - blocks["z"].astype(np.int16)[..., None]
    np.multiply(differences, blocks["s"][..., None], out=values)


def decode_fp8(rows: UInt8Array, out: Float32Array) -> None:
    """Decode rows of FP8 into `out`, float32 [R, C]. Codes that are NaN stay so."""
    blocks = rows.view(block_type(8, has_zeros=False))
    values = out.reshape(*blocks.shape, BLOCK)
    np.multiply(_E4M3[blocks["q"]], blocks["s"][..., None], out=values)


def are_fp8_finite(rows: UInt8Array) -> bool:
    """Tell whether no code of rows of FP8 is NaN, and every code times its scale a float32."""
    for first in range(0, len(rows), _CHECKED_ROWS):
        part = np.ascontiguousarray(rows[first : first + _CHECKED_ROWS])
        blocks = part.view(block_type(8, has_zeros=False))
        has_nan = (blocks["q"] & _MAGNITUDE).max(initial=0) == _MAGNITUDE
        if has_nan or not (np.abs(blocks["s"]) <= _LARGEST_SCALE).all():
            return False
    return True


def decode_q4_z(rows: UInt8Array, out: Float32Array) -> None:
    """Decode rows of Q4_Z into `out`, float32 [R, C]. A scale that is not finite stays so."""
    blocks = rows.view(_zero_type(4))
    _decode_nibbles(blocks, blocks["z"].view(np.int8)[..., None], out)


def decode_q8_z(rows: UInt8Array, out: Float32Array) -> None:
    """Decode rows of Q8_Z into `out`, float32 [R, C]."""
    blocks = rows.view(_zero_type(8))
    values = out.reshape(*blocks.shape, BLOCK)
    quants, zeros = (blocks[name].view(np.int8).astype(np.int16) for name in ("q", "z"))
    np.multiply(quants - zeros[..., None], blocks["s"][..., None].astype(np.float32), out=values)


def int4_to_q4_0(rows: UInt8Array, out: UInt8Array) -> None:
    """Write rows of INT4 as Q4_0. A scale beyond float16 becomes infinite."""
    _write_scaled(rows.view(block_type(4, has_zeros=False)), out)


def int8_to_q8_0(rows: UInt8Array, out: UInt8Array) -> None:
    """Write rows of INT8 as Q8_0. A scale beyond float16 becomes infinite."""
    _write_scaled(rows.view(block_type(8, has_zeros=False)), out)


def uint4_to_q4_1(rows: UInt8Array, out: UInt8Array) -> None:
    """Write rows of UINT4 as Q4_1. A scale or minimum beyond float16 becomes infinite."""
    blocks = rows.view(block_type(4, has_zeros=True))
    target = out.view(np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "u1", (_HALF,))]))
    target["d"] = blocks["s"]
    # Not from the rounded d: of the scale that was meant, this is the nearest. Zero is not -0.
    target["m"] = 0 - blocks["s"] * blocks["z"]
    target["q"] = blocks["q"]


def uint4_to_q4_z(rows: UInt8Array, out: UInt8Array) -> None:
    """Write rows of UINT4 as Q4_Z. A scale beyond float16 becomes infinite."""
    blocks, target = rows.view(block_type(4, has_zeros=True)), out.view(_zero_type(4))
    for name in ("s", "z", "q"):
        target[name] = blocks[name]


def uint8_to_q8_z(rows: UInt8Array, out: UInt8Array) -> None:
    """Write rows of UINT8 as Q8_Z. A scale beyond float16 becomes infinite."""
    blocks, target = rows.view(block_type(8, has_zeros=True)), out.view(_zero_type(8))
    target["s"] = blocks["s"]
    target["z"] = blocks["z"].astype(np.uint8) ^ _SIGN
    target["q"] = blocks["q"] ^ _SIGN


def _zero_type(bits: int) -> np.dtype[Any]:
    """Return a block of Q4_Z or Q8_Z, by the bits of a weight."""
    return np.dtype([("s", "<f2"), ("z", "u1"), ("q", "u1", (BLOCK * bits // 8,))])


def _write_scaled(blocks: npt.NDArray[Any], out: UInt8Array) -> None:
    target = out.view(np.dtype([("d", "<f2"), ("q", "u1", blocks["q"].shape[-1:])]))
    target["d"] = blocks["s"]
    target["q"] = blocks["q"]


def _decode_nibbles(
    blocks: npt.NDArray[Any], zeros: npt.NDArray[np.int8] | np.int8, out: Float32Array
) -> None:
    """Write (q − zeros) · s; `zeros`: one, or [R, blocks, 1]."""
    values = out.reshape(*blocks.shape, BLOCK)
    scales = blocks["s"][..., None].astype(np.float32, copy=False)
    low, high = blocks["q"] & np.uint8(15), blocks["q"] >> np.uint8(4)
    np.multiply(low.view(np.int8) - zeros, scales, out=values[..., :_HALF])
    np.multiply(high.view(np.int8) - zeros, scales, out=values[..., _HALF:])
