"""The formats with five bits and those with scales of scales ("K-quants"), taken apart and decoded.

    Q5_0   22 bytes    d: float16 | h: 32 bits | 16 bytes of nibbles            32 elements
                       value = (q - 16) · d
    Q5_1   24 bytes    d: float16 | m: float16 | h: 32 bits | 16 bytes
                       value = q · d + m
           Nibbles as in Q4_0; bit k of h is the fifth bit of element k.

    Q4_K   144 bytes   d: float16 | dmin: float16 | 12 bytes of scales | 128 bytes of nibbles
    Q5_K   176 bytes   d | dmin | 12 bytes of scales | 32 bytes h | 128 bytes of nibbles
           256 elements in 8 groups of 32, each with a scale s and a minimum n of 6 bits:
                       value = q · (d · s) - dmin · n
           Of the nibbles, 32 bytes hold two groups, one in the low halves, one in the high ones.
           Bit g of byte k of h is the fifth bit of element k of group g.
           Scales: bytes 0–3 hold s of groups 0–3 in their low 6 bits, bytes 4–7 n of groups 0–3;
           byte 8 + i holds the low 4 bits of s (low half) and n (high half) of group 4 + i, whose
           upper 2 bits are the upper bits of byte i (s) and of byte 4 + i (n).

    Q6_K   210 bytes   128 bytes l | 64 bytes h | 16 x int8 s | d: float16
           256 elements in 16 groups of 16:     value = (q - 32) · (d · s)
           Elements 128 i + 32 j + k (i < 2, j < 4, k < 32) have their lower 4 bits in byte
           64 i + 32 (j mod 2) + k of l, in the low half if j < 2, and their upper 2 bits in bits
           2 j and 2 j + 1 of byte 32 i + k of h.

Source: ggml's `ggml-common.h` and `ggml-quants.c`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

UInt8Array = npt.NDArray[np.uint8]
Float32Array = npt.NDArray[np.float32]

SUPER_BLOCK: Final = 256
GROUP: Final = 32
GROUPS: Final = SUPER_BLOCK // GROUP
ONE, THREE, FOUR = (np.uint8(number) for number in (1, 3, 4))
"""Shifts and masks that keep bytes bytes."""
TURNS: Final = np.array([0, 2, 4, 6], np.uint8)[:, None]
"""Where in a byte its pairs of bits begin."""


def float16_column(blocks: UInt8Array, offset: int) -> Float32Array:
    """Return the float16 at a byte offset of every block as float32 [blocks, 1]."""
    stored = np.ascontiguousarray(blocks[:, offset : offset + 2])
    return stored.view("<f2").astype(np.float32)


def quants_of_5_bits(blocks: UInt8Array, high_at: int) -> UInt8Array:
    """Return q of Q5_0 or Q5_1 blocks, 0 to 31, uint8 [blocks, 32]; h lies at byte `high_at`."""
    high = np.unpackbits(blocks[:, high_at : high_at + 4], axis=1, bitorder="little")
    nibbles = blocks[:, high_at + 4 :]
    q: UInt8Array = np.concatenate((nibbles & 15, nibbles >> 4), axis=1) | high << 4
    return q


def whole_scales_and_minima(blocks: UInt8Array) -> tuple[UInt8Array, UInt8Array]:
    """Return s and n of Q4_K or Q5_K blocks, 0 to 63, uint8 [blocks, 8] each."""
    low, middle, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate((low & 63, rest & 15 | low >> 6 << 4), axis=1)
    minima = np.concatenate((middle & 63, rest >> 4 | middle >> 6 << 4), axis=1)
    return scales, minima


def scales_and_minima(blocks: UInt8Array) -> tuple[Float32Array, Float32Array]:
    """Return d · s and dmin · n of Q4_K or Q5_K blocks, exactly, float32 [blocks, 8] each."""
    scales, minima = whole_scales_and_minima(blocks)
    return float16_column(blocks, 0) * scales, float16_column(blocks, 2) * minima


def quants_of_4_bits_k(blocks: UInt8Array) -> UInt8Array:
    """Return q of Q4_K blocks, 0 to 15, uint8 [blocks, 8, 32]."""
    return _nibble_groups(blocks[:, 16:])


def quants_of_5_bits_k(blocks: UInt8Array) -> UInt8Array:
    """Return q of Q5_K blocks, 0 to 31, uint8 [blocks, 8, 32]."""
    q: UInt8Array = blocks[:, None, 16:48] >> np.arange(GROUPS, dtype=np.uint8)[:, None] & ONE
    q <<= FOUR
    q |= _nibble_groups(blocks[:, 48:])
    return q


def quants_of_6_bits(blocks: UInt8Array) -> UInt8Array:
    """Return q of Q6_K blocks, 0 to 63, uint8 [blocks, 8, 32]."""
    nibbles = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate((nibbles & 15, nibbles >> 4), axis=2).reshape(-1, 2, 4, GROUP)
    q: UInt8Array = blocks[:, 128:192].reshape(-1, 2, 1, GROUP) >> TURNS & THREE
    q <<= FOUR
    q |= low
    return q.reshape(-1, GROUPS, GROUP)


def _nibble_groups(nibbles: UInt8Array) -> UInt8Array:
    """Return the groups of 128 bytes of nibbles, uint8 [blocks, 8, 32]."""
    pairs = nibbles.reshape(-1, GROUPS // 2, 1, GROUP)
    return np.concatenate((pairs & 15, pairs >> 4), axis=2).reshape(-1, GROUPS, GROUP)


def decode_q5_0(rows: UInt8Array, out: Float32Array) -> None:
    """Decode rows of Q5_0 blocks."""
    blocks = rows.reshape(-1, 22)
    q = quants_of_5_bits(blocks, 2).view(np.int8) - np.int8(16)
    np.multiply(q, float16_column(blocks, 0), out=out.reshape(-1, GROUP))


def decode_q5_1(rows: UInt8Array, out: Float32Array) -> None:
    """Decode rows of Q5_1 blocks."""
    blocks = rows.reshape(-1, 24)
    values = out.reshape(-1, GROUP)
    np.multiply(quants_of_5_bits(blocks, 4), float16_column(blocks, 0), out=values)
    values += float16_column(blocks, 2)


def decode_q4_k(rows: UInt8Array, out: Float32Array) -> None:
    """Decode rows of Q4_K blocks."""
    blocks = rows.reshape(-1, 144)
    _decode_groups(blocks, quants_of_4_bits_k(blocks), out)


def decode_q5_k(rows: UInt8Array, out: Float32Array) -> None:
    """Decode rows of Q5_K blocks."""
    blocks = rows.reshape(-1, 176)
    _decode_groups(blocks, quants_of_5_bits_k(blocks), out)


def _decode_groups(blocks: UInt8Array, q: UInt8Array, out: Float32Array) -> None:
    scales, minima = scales_and_minima(blocks)
    values = out.reshape(-1, GROUPS, GROUP)
    np.multiply(q, scales[:, :, None], out=values)
    values -= minima[:, :, None]


def pack_6_bits(q: UInt8Array) -> UInt8Array:
    """Return l and h of Q6_K blocks, uint8 [blocks, 192], from q, 0 to 63, [blocks, 256]."""
    parts = q.reshape(-1, 2, 4, GROUP)
    low, high = parts & 15, parts >> FOUR
    nibbles = (low[:, :, :2] | low[:, :, 2:] << FOUR).reshape(-1, 128)
    upper = np.bitwise_or.reduce(high << TURNS, axis=2).reshape(-1, 64)
    return np.concatenate((nibbles, upper), axis=1)


def decode_q6_k(rows: UInt8Array, out: Float32Array) -> None:
    """Decode rows of Q6_K blocks."""
    blocks = rows.reshape(-1, 210)
    q = quants_of_6_bits(blocks).view(np.int8) - np.int8(32)
    scales = float16_column(blocks, 208) * blocks[:, 192:208].view(np.int8)
    np.multiply(q.reshape(-1, 16, 16), scales[:, :, None], out=out.reshape(-1, 16, 16))


DECODERS: Final[Mapping[str, Callable[[UInt8Array, Float32Array], None]]] = {
    "Q5_0": decode_q5_0,
    "Q5_1": decode_q5_1,
    "Q4_K": decode_q4_k,
    "Q5_K": decode_q5_k,
    "Q6_K": decode_q6_k,
}
"""By the format's name: rows [R, bytes of a row], C-contiguous, into float32 [R, C]."""
