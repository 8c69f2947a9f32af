"""Rows rounded to blocks of GGUF's formats, plainly: not as well as llama.cpp does it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from compute_plane.model.read_only_quants import CODES

Float32Array = npt.NDArray[np.float32]
UInt8Array = npt.NDArray[np.uint8]


def k_blocks(label: str, rows: Float32Array) -> UInt8Array:
    """Return rows [R, K], K a multiple of 256, as a GGUF file stores them in a format of these."""
    values = rows.reshape(-1, 256).astype(np.float64)
    return ENCODERS[label](values).reshape(len(rows), -1)


def _float16(numbers: npt.NDArray[np.float64]) -> tuple[UInt8Array, npt.NDArray[np.float64]]:
    """Return numbers as float16, uint8 [blocks, 2], and what they are then, [blocks, 1]."""
    halves = numbers.astype("<f2").reshape(-1, 1)
    return halves.view(np.uint8), np.maximum(halves.astype(np.float64), 1e-9)


def _with_minima(values: npt.NDArray[np.float64], bits: int) -> UInt8Array:
    groups = values.reshape(-1, 8, 32)
    lowest = np.minimum(groups.min(axis=2), 0)
    steps = (groups.max(axis=2) - lowest) / (2**bits - 1)
    stored_d, d = _float16(steps.max(axis=1) / 63)
    stored_dmin, dmin = _float16((-lowest).max(axis=1) / 63)
    s = np.clip(np.rint(steps / d), 1, 63).astype(np.uint8)
    n = np.clip(np.rint(-lowest / dmin), 0, 63).astype(np.uint8)
    shifted = (groups + (n * dmin)[..., None]) / (s * d)[..., None]
    q = np.clip(np.rint(shifted), 0, 2**bits - 1).astype(np.uint8)
    scales = np.concatenate(
        [
            s[:, :4] | s[:, 4:] >> 4 << 6,
            n[:, :4] | n[:, 4:] >> 4 << 6,
            s[:, 4:] & 15 | n[:, 4:] << 4,
        ],
        axis=1,
    )
    low = q & 15
    nibbles = (low[:, ::2] | low[:, 1::2] << 4).reshape(-1, 128)
    parts = [stored_d, stored_dmin, scales]
    if bits == 5:
        turns = np.arange(8, dtype=np.uint8)[:, None]
        parts.append(np.bitwise_or.reduce(q >> 4 << turns, axis=1))
    return np.concatenate([*parts, nibbles], axis=1)


def _q6_k(values: npt.NDArray[np.float64]) -> UInt8Array:
    groups = values.reshape(-1, 16, 16)
    steps = np.abs(groups).max(axis=2) / 31
    stored_d, d = _float16(steps.max(axis=1) / 127)
    s = np.clip(np.rint(steps / d), 1, 127).astype(np.int8)
    q = np.clip(np.rint(groups / (s * d)[..., None]), -32, 31) + 32
    fours = q.astype(np.uint8).reshape(-1, 2, 4, 32)
    low, high = fours & 15, fours >> 4
    nibbles = (low[:, :, :2] | low[:, :, 2:] << 4).reshape(-1, 128)
    turns = np.array([0, 2, 4, 6], np.uint8)[:, None]
    upper = np.bitwise_or.reduce(high << turns, axis=2).reshape(-1, 64)
    return np.concatenate([nibbles, upper, s.view(np.uint8), stored_d], axis=1)


def _twos(q: UInt8Array) -> UInt8Array:
    """Return quants of two bits, [blocks, 256], as Q2_K and Q3_K pack them."""
    turns = np.array([0, 2, 4, 6], np.uint8)[:, None]
    packed: UInt8Array = np.bitwise_or.reduce(q.reshape(-1, 2, 4, 32) << turns, axis=2)
    return packed.reshape(-1, 64)


def _q2_k(values: npt.NDArray[np.float64]) -> UInt8Array:
    groups = values.reshape(-1, 16, 16)
    lowest = np.minimum(groups.min(axis=2), 0)
    steps = (groups.max(axis=2) - lowest) / 3
    stored_d, d = _float16(steps.max(axis=1) / 15)
    stored_dmin, dmin = _float16((-lowest).max(axis=1) / 15)
    s = np.clip(np.rint(steps / d), 1, 15).astype(np.uint8)
    n = np.clip(np.rint(-lowest / dmin), 0, 15).astype(np.uint8)
    shifted = (groups + (n * dmin)[..., None]) / (s * d)[..., None]
    q = np.clip(np.rint(shifted), 0, 3).astype(np.uint8)
    return np.concatenate([s | n << 4, _twos(q), stored_d, stored_dmin], axis=1)


def _q3_k(values: npt.NDArray[np.float64]) -> UInt8Array:
    groups = values.reshape(-1, 16, 16)
    steps = np.abs(groups).max(axis=2) / 4
    stored_d, d = _float16(steps.max(axis=1) / 31)
    s = np.clip(np.rint(steps / d), 1, 31).astype(np.uint8)
    q = (np.clip(np.rint(groups / (s * d)[..., None]), -4, 3) + 4).astype(np.uint8)
    thirds = np.packbits(q.reshape(-1, 8, 32) >> 2, axis=1, bitorder="little").reshape(-1, 32)
    stored = s + np.uint8(32)
    upper = (stored >> 4).reshape(-1, 4, 4) << np.array([0, 2, 4, 6], np.uint8)[:, None]
    scales = [stored[:, :8] & 15 | stored[:, 8:] << 4, np.bitwise_or.reduce(upper, axis=1)]
    return np.concatenate([thirds, _twos(q & 3), *scales, stored_d], axis=1)


def _codes(scaled: npt.NDArray[np.float64]) -> UInt8Array:
    """Return the nibbles of the nearest codes, [groups, 16], of numbers [groups, 32]."""
    q = np.abs(scaled[..., None] - CODES.astype(np.float64)).argmin(axis=-1).astype(np.uint8)
    nibbles: UInt8Array = q[:, :16] | q[:, 16:] << 4
    return nibbles


def _iq4_nl(values: npt.NDArray[np.float64]) -> UInt8Array:
    groups = values.reshape(-1, 32)
    stored_d, d = _float16(np.abs(groups).max(axis=1) / 120)
    return np.concatenate([stored_d, _codes(groups / d)], axis=1)


def _iq4_xs(values: npt.NDArray[np.float64]) -> UInt8Array:
    groups = values.reshape(-1, 8, 32)
    steps = np.abs(groups).max(axis=2) / 120
    stored_d, d = _float16(steps.max(axis=1) / 31)
    s = np.clip(np.rint(steps / d), 1, 31).astype(np.uint8)
    nibbles = _codes((groups / (s * d)[..., None]).reshape(-1, 32)).reshape(-1, 128)
    stored = s + np.uint8(32)
    low = stored[:, ::2] & 15 | stored[:, 1::2] << 4
    turns = np.array([0, 2, 4, 6], np.uint8)
    upper = np.bitwise_or.reduce((stored >> 4).reshape(-1, 2, 4) << turns, axis=2)
    return np.concatenate([stored_d, upper, low, nibbles], axis=1)


ENCODERS: Final[Mapping[str, Callable[[npt.NDArray[np.float64]], UInt8Array]]] = {
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": partial(_with_minima, bits=4),
    "Q5_K": partial(_with_minima, bits=5),
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
