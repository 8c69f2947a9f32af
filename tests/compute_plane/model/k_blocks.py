"""Rows of numbers rounded to blocks of the K-quants, plainly: not as well as llama.cpp does it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]
UInt8Array = npt.NDArray[np.uint8]


def k_blocks(label: str, rows: Float32Array) -> UInt8Array:
    """Return rows [R, K], K a multiple of 256, as a GGUF file stores them in Q4_K, Q5_K or Q6_K."""
    values = rows.reshape(-1, 256).astype(np.float64)
    blocks = (
        _q6_k(values) if label == "Q6_K" else _with_minima(values, {"Q4_K": 4, "Q5_K": 5}[label])
    )
    return blocks.reshape(len(rows), -1)


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
