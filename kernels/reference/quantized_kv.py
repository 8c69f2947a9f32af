"""Keys and values in eight bits: a row of D numbers becomes D bytes and one scale.

    scale = largest magnitude of the row / LARGEST[dtype]          (float32)
    byte  = the row's number · (LARGEST[dtype] / largest magnitude), rounded to the nearest code

The row is what one token has for one kv head, of its key or of its value. No calibration is needed
and nothing saturates, whatever the model.

    int8     a signed integer, −127 … 127; ties to even
    float8   "e4m3": s eeee mmm, (8 + m) · 2^(e − 10), for e = 0  m · 2^−9; up to 448; ties to even.
             There are no infinities; s 1111 111 is NaN, which is never written.

float8 could do without scales (values of most models are far below 448), but then an outlier would
saturate and small rows lose digits: with the same scale as int8 there is one layout, and the
kernels differ in one instruction.

A row of zeros has scale 0 and bytes 0. A row with a NaN or an infinity has the scale NaN: all of it
reads as NaN, and its bytes mean nothing.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from kernels.interface import Float32Array

UInt8Array = npt.NDArray[np.uint8]

LARGEST: Final = {"int8": 127.0, "float8": 448.0}
"""Largest magnitude of a byte, by dtype."""

_SMALLEST_NORMAL = np.float32(2.0**-6)  # of float8
_SUBNORMAL_STEPS = np.float32(2.0**9)


def quantize_rows(dtype: str, rows: Float32Array) -> tuple[UInt8Array, Float32Array]:
    """Return the bytes [..., D] of `rows` [..., D], and the scales [...]."""
    limit = np.float32(LARGEST[dtype])
    is_finite = np.all(np.isfinite(rows), axis=-1, keepdims=True)
    numbers = np.where(is_finite, rows, np.float32(0)).astype(np.float32)
    largest = np.abs(numbers).max(axis=-1, keepdims=True)
    with np.errstate(over="ignore", invalid="ignore"):  # of rows near float32's smallest numbers
        inverse = limit / np.where(largest > 0, largest, np.float32(1))
        scaled = np.clip(np.nan_to_num(numbers * inverse), -limit, limit).astype(np.float32)
    codes = np.rint(scaled).astype(np.int8).view(np.uint8) if dtype == "int8" else to_float8(scaled)
    return codes, np.where(is_finite, largest / limit, np.float32(np.nan))[..., 0]


def dequantize_rows(dtype: str, codes: UInt8Array, scales: Float32Array) -> Float32Array:
    """Return what bytes [..., D] with scales [...] stand for, [..., D]."""
    numbers = codes.view(np.int8).astype(np.float32) if dtype == "int8" else from_float8(codes)
    return numbers * scales[..., None]


def to_float8(numbers: Float32Array) -> UInt8Array:
    """Return finite float32, up to 448 in magnitude, rounded to float8."""
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    magnitude = bits & np.uint32(0x7FFF_FFFF)
    # The exponent's bias falls from 127 to 7, 20 bits of the fraction go; a carry raises it.
    odd = magnitude >> np.uint32(20) & np.uint32(1)
    normal = (magnitude + np.uint32(0x7_FFFF) + odd >> np.uint32(20)) - np.uint32(120 << 3)
    # Below, codes are equally far apart; eight steps are the smallest normal number.
    size = np.abs(np.asarray(numbers, np.float32))
    small = np.rint(np.minimum(size, _SMALLEST_NORMAL) * _SUBNORMAL_STEPS).astype(np.uint32)
    code = np.where(size < _SMALLEST_NORMAL, small, normal)
    return np.asarray(code | bits >> np.uint32(24) & np.uint32(0x80), np.uint8)


def from_float8(codes: UInt8Array) -> Float32Array:
    """Return float8 as float32, exactly."""
    exponent = (codes >> 3 & 15).astype(np.int32)
    fraction = (codes & 7).astype(np.float32)
    size = np.where(
        exponent == 0, fraction * 2.0**-9, np.ldexp(fraction + 8, np.maximum(exponent, 1) - 10)
    )
    size = np.where(codes & 0x7F == 0x7F, np.nan, size)
    return np.copysign(size, np.where(codes & 0x80, -1.0, 1.0)).astype(np.float32)
