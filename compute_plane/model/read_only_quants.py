"""Formats that not every device reads: taken apart, decoded, and turned into ones that run.

    Q2_K     84 bytes    16 bytes of scales | 64 bytes of quants | d: float16 | dmin: float16
             256 elements in 16 groups of 16:   value = q · (d · s) - dmin · n
             A byte of scales holds s in its low half, n in its high half. Elements
             128 i + 32 j + k (i < 2, j < 4, k < 32) have their q, 0 to 3, in bits 2 j and 2 j + 1
             of byte 32 i + k.

    Q3_K     110 bytes   32 bytes h | 64 bytes of quants, as in Q2_K | 12 bytes of scales | d
             value = (q - 4) · (d · (s - 32)), q of three bits: bit 4 i + j of byte k of h is the
             third. Scales have 6 bits: byte b < 8 holds the low four of s of group b (low half) and
             of group b + 8 (high half), byte 8 + b (b < 4) the upper two of groups b, b + 4, b + 8
             and b + 12, from its lowest bits on.

    IQ4_NL   18 bytes    d: float16 | 16 bytes of nibbles as in Q4_0, 32 elements
             value = CODES[q] · d
    IQ4_XS   136 bytes   d: float16 | h: 16 bits | 4 bytes l | 128 bytes of nibbles
             256 elements in 8 groups of 32, each with nibbles as in Q4_0:
             value = CODES[q] · (d · (s - 32)), s of 6 bits: group g has the low four of them in
             half g mod 2 of byte g / 2 of l, the upper two in bits 2 g and 2 g + 1 of h.

No kernel reads Q2_K and Q3_K, and none of a GPU IQ4_NL and IQ4_XS.

What they become:  IQ4_NL → Q8_0, exactly: d, and CODES[q]
                   IQ4_XS → Q8_0, nearly: d · (s - 32) is rounded to float16
                   Q3_K → Q6_K, exactly: d, s - 32, q + 28

Source: ggml's `ggml-common.h` and `ggml-quants.c`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from kernels.reference import uneven_nibbles
from kernels.reference.k_quants import (
    GROUP,
    GROUPS,
    SUPER_BLOCK,
    THREE,
    float16_column,
    pack_6_bits,
)

UInt8Array = npt.NDArray[np.uint8]
Int8Array = npt.NDArray[np.int8]
Float32Array = npt.NDArray[np.float32]

CODES: Final = np.array(uneven_nibbles.CODES, np.int8)
"""What the nibbles of IQ4_NL and IQ4_XS stand for."""
PAIRS: Final = np.array([0, 2, 4, 6], np.uint8)
"""Where in a byte its pairs of bits begin."""
HALVES: Final = np.array([0, 4], np.uint8)


def decode_q2_k(rows: UInt8Array, out: Float32Array) -> None:
    """Decode rows of Q2_K blocks."""
    blocks = rows.reshape(-1, 84)
    scales = float16_column(blocks, 80) * (blocks[:, :16] & 15)
    minima = float16_column(blocks, 82) * (blocks[:, :16] >> 4)
    values = out.reshape(-1, 16, 16)
    np.multiply(_pairs(blocks[:, 16:80]).reshape(-1, 16, 16), scales[:, :, None], out=values)
    values -= minima[:, :, None]


def decode_q3_k(rows: UInt8Array, out: Float32Array) -> None:
    """Decode rows of Q3_K blocks."""
    blocks = rows.reshape(-1, 110)
    q = _quants_of_q3_k(blocks).view(np.int8) - np.int8(4)
    scales = float16_column(blocks, 108) * _scales_of_q3_k(blocks)
    np.multiply(q.reshape(-1, 16, 16), scales[:, :, None], out=out.reshape(-1, 16, 16))


def decode_iq4_nl(rows: UInt8Array, out: Float32Array) -> None:
    """Decode rows of IQ4_NL blocks."""
    blocks = rows.reshape(-1, 18)
    np.multiply(_codes(blocks[:, 2:]), float16_column(blocks, 0), out=out.reshape(-1, GROUP))


def decode_iq4_xs(rows: UInt8Array, out: Float32Array) -> None:
    """Decode rows of IQ4_XS blocks."""
    blocks = rows.reshape(-1, 136)
    scales = _scales_of_iq4_xs(blocks).reshape(-1, 1)
    np.multiply(_codes(blocks[:, 8:]), scales, out=out.reshape(-1, GROUP))


def iq4_nl_to_q8_0(rows: UInt8Array, out: UInt8Array) -> None:
    """Turn rows of IQ4_NL into rows of Q8_0."""
    blocks, target = rows.reshape(-1, 18), out.reshape(-1, 34)
    target[:, :2] = blocks[:, :2]
    target[:, 2:] = _codes(blocks[:, 2:]).view(np.uint8)


def iq4_xs_to_q8_0(rows: UInt8Array, out: UInt8Array) -> None:
    """Turn rows of IQ4_XS into rows of Q8_0."""
    blocks, target = rows.reshape(-1, 136), out.reshape(-1, 34)
    scales = _scales_of_iq4_xs(blocks).astype(np.float16)
    target[:, :2] = scales.reshape(-1, 1).view(np.uint8)
    target[:, 2:] = _codes(blocks[:, 8:]).view(np.uint8)


def q3_k_to_q6_k(rows: UInt8Array, out: UInt8Array) -> None:
    """Turn rows of Q3_K into rows of Q6_K."""
    blocks, target = rows.reshape(-1, 110), out.reshape(-1, 210)
    target[:, :192] = pack_6_bits(_quants_of_q3_k(blocks) + np.uint8(32 - 4))
    target[:, 192:208] = _scales_of_q3_k(blocks).view(np.uint8)
    target[:, 208:] = blocks[:, 108:]


def _pairs(stored: UInt8Array) -> UInt8Array:
    """Return what 64 bytes hold in two bits each, uint8 [blocks, 256]."""
    pairs: UInt8Array = stored.reshape(-1, 2, 1, GROUP) >> PAIRS[:, None] & THREE
    return pairs.reshape(-1, SUPER_BLOCK)


def _quants_of_q3_k(blocks: UInt8Array) -> UInt8Array:
    """Return q of Q3_K blocks, 0 to 7, uint8 [blocks, 256]."""
    thirds = np.unpackbits(blocks[:, None, :32], axis=1, bitorder="little")  # [blocks, 8, 32]
    return _pairs(blocks[:, 32:96]) | thirds.reshape(-1, SUPER_BLOCK) << np.uint8(2)


def _scales_of_q3_k(blocks: UInt8Array) -> Int8Array:
    """Return s - 32 of Q3_K blocks, int8 [blocks, 16]."""
    low, upper = blocks[:, 96:104], blocks[:, 104:108]
    fours = np.concatenate((low & 15, low >> 4), axis=1)
    twos = (upper[:, None, :] >> PAIRS[:, None] & THREE).reshape(-1, 16)
    scales: Int8Array = (fours | twos << np.uint8(4)).view(np.int8) - np.int8(32)
    return scales


def _codes(nibbles: UInt8Array) -> Int8Array:
    """Return what nibbles stand for, int8 [groups, 32]."""
    halves = nibbles.reshape(-1, GROUP // 2)
    return CODES[np.concatenate((halves & 15, halves >> 4), axis=1)]


def _scales_of_iq4_xs(blocks: UInt8Array) -> Float32Array:
    """Return d · (s - 32) of IQ4_XS blocks, exactly, float32 [blocks, 8]."""
    upper = (blocks[:, 2:4, None] >> PAIRS & THREE).reshape(-1, GROUPS)
    low = (blocks[:, 4:8, None] >> HALVES & 15).reshape(-1, GROUPS)
    s = (low | upper << np.uint8(4)).view(np.int8) - np.int8(32)
    scales: Float32Array = float16_column(blocks, 0) * s
    return scales


DECODERS: Final[Mapping[str, Callable[[UInt8Array, Float32Array], None]]] = {
    "Q2_K": decode_q2_k,
    "Q3_K": decode_q3_k,
    "IQ4_NL": decode_iq4_nl,
    "IQ4_XS": decode_iq4_xs,
}
"""By the format's name: rows [R, bytes of a row], C-contiguous, into float32 [R, C]."""
