"""The values that stand in packed panels, read as the drawing of `int8_packing` says."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernels.cpu.int8_packing import INT8_FORMATS, int8_panel_bytes

Float64Array = npt.NDArray[np.float64]
UInt8Array = npt.NDArray[np.uint8]


def values_in_panels(label: str, packed: UInt8Array, n: int, k: int) -> Float64Array:
    """Return the weights of a packed matrix, float64 [n, k], as float32 has them."""
    fmt = INT8_FORMATS[label]
    groups = k // 32
    panels = packed.reshape(-1, int8_panel_bytes(label, k))
    tiles = panels[:, : groups * fmt.tile_bytes].reshape(len(panels), groups, fmt.tile_bytes)
    q = _weights(label, tiles)  # [panels, groups, 32, 16]
    if fmt.is_shared:
        records = panels[:, groups * fmt.tile_bytes :][:, : groups // 8 * fmt.record_bytes]
        scales, minima = _shared(label, records.reshape(len(panels), -1, fmt.record_bytes))
    else:
        scales = _float16(tiles[..., fmt.scales_at :][..., :32])[:, :, None]
        minima = np.zeros_like(scales)
        if fmt.has_minimum:
            minima = -_float16(tiles[..., fmt.minima_at :][..., :32])[:, :, None]
    scales, minima = (np.repeat(x, 32 // x.shape[2], axis=2) for x in (scales, minima))
    values = ((q - fmt.offset) * scales - minima).astype(np.float32)
    columns = np.moveaxis(values, -1, 1).reshape(-1, k)
    return columns[:n].astype(np.float64)


def _weights(label: str, tiles: UInt8Array) -> Float64Array:
    """Return stored weights of tiles, [panels, groups, 32, 16]."""
    fmt = INT8_FORMATS[label]
    vectors = tiles[..., : 64 * fmt.num_vectors].reshape(*tiles.shape[:2], -1, 16, 4)
    if label == "Q8_0":
        return _k_by_column(vectors.view(np.int8))
    low = np.concatenate((vectors[:, :, :4] & 15, vectors[:, :, :4] >> 4), axis=2)
    upper = np.zeros_like(low)
    for v in range(8):
        if fmt.high_bits == 1:
            upper[:, :, v] = vectors[:, :, 4] >> v & 1
        elif fmt.high_bits == 2:
            upper[:, :, v] = vectors[:, :, 4 + v // 4] >> 2 * (v % 4) & 3
    if fmt.codes is not None:
        return _k_by_column(np.array(fmt.codes)[low] + fmt.offset)
    return _k_by_column(low | upper << 4)


def _k_by_column(vectors: npt.NDArray[np.generic]) -> Float64Array:
    """Return [panels, groups, 8 fours, 16 columns, 4 k's] as [panels, groups, 32 k's, 16]."""
    turned = np.swapaxes(vectors, -1, -2)
    return turned.reshape(*turned.shape[:2], 32, 16).astype(np.float64)


def _float16(stored: UInt8Array) -> Float64Array:
    return np.ascontiguousarray(stored).view("<f2").astype(np.float64)


def _shared(label: str, records: UInt8Array) -> tuple[Float64Array, Float64Array]:
    """Return scales and minima of tiles, [panels, groups, parts, 16] each."""
    num_panels = len(records)
    if label == "Q6_K":
        s = np.ascontiguousarray(records[..., :256]).view(np.int8).astype(np.float64)
        d = _float16(records[..., 256:288])
        scales = s.reshape(num_panels, -1, 8, 2, 16) * d[:, :, None, None]
        scales = scales.reshape(num_panels, -1, 2, 16)
        return scales, np.zeros_like(scales)
    if label == "IQ4_XS":
        fours = records[..., :64].reshape(num_panels, -1, 4, 1, 16)
        low = np.concatenate((fours & 15, fours >> 4), axis=3).reshape(num_panels, -1, 8, 16)
        twos = records[..., 64:96].reshape(num_panels, -1, 2, 1, 16)
        upper = np.concatenate([twos >> 2 * turn & 3 for turn in range(4)], axis=3)
        s = (low | upper.reshape(low.shape) << 4).astype(np.float64) - 32
        scales = (s * _float16(records[..., 96:128])[:, :, None]).reshape(num_panels, -1, 1, 16)
        return scales, np.zeros_like(scales)
    low = records[..., :128].reshape(num_panels, -1, 8, 16)
    pairs = records[..., 128:192].reshape(num_panels, -1, 4, 1, 16)
    high = np.concatenate((pairs & 15, pairs >> 4), axis=3).reshape(low.shape)
    d, dmin = (_float16(records[..., at : at + 32])[:, :, None] for at in (192, 224))
    s, n = (low & 15 | (high & 3) << 4), (low >> 4 | (high >> 2) << 4)
    scales, minima = (x.reshape(num_panels, -1, 1, 16) for x in (s * d, n * dmin))
    return scales, minima
