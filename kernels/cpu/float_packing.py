"""How matrices of floating-point weights lie in memory: panels of 16 columns, k running down.

A matrix has N output columns (rows of the file) of K inputs. Sixteen columns are a *panel*, and a
panel holds its weights in the order in which a tile reads them: one vector of 16 columns for each
k, so a product reads a panel from front to back and nothing else.

    F32, F16    k = 0     │ c0 │ c1 │ c2 │ … │ c15 │       16 elements: 64 or 32 bytes
                k = 1     │ c0 │ c1 │ c2 │ … │ c15 │
                …
                k = K − 1

    BF16        k = 0, 1  │ c0: k 0, k 1 │ c1: k 0, k 1 │ … │ c15: k 0, k 1 │     64 bytes
                k = 2, 3  │ c0: k 2, k 3 │ …
                …         up to the next multiple of 32 above K, zero from K on

bfloat16 lie in pairs since that is what the processors' bfloat16 dot products want: a vector of
pairs is an operand of VDPBF16PS, and 16 such vectors, 32 k's, are a tile of AMX. Taken apart, the
pair's halves are two vectors of float32: a shift and a mask.

The last panel of a matrix whose N is no multiple of 16 is filled with zeros. No bit of a weight is
changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

UInt8Array = npt.NDArray[np.uint8]
AnyArray = npt.NDArray[Any]

PANEL_COLUMNS: Final = 16
AMX_DEPTH: Final = 32
"""k's of one AMX tile of bfloat16 weights; BF16 panels are filled up to a multiple of it."""
VECTOR_OF_PAIRS_BYTES: Final = 64

FLOAT_TYPES: Final[Mapping[str, np.dtype[Any]]] = {
    "F32": np.dtype("<u4"),
    "F16": np.dtype("<u2"),
    "BF16": np.dtype("<u2"),
}
"""The elements of each format, as bits."""

PACKED_AT_ONCE: Final = 1 << 18
"""Elements turned at a time: source and result stay in the processor's cache."""


def panel_bytes(label: str, k: int) -> int:
    """Return the bytes of a panel of `k` inputs; `label` is F32, F16 or BF16."""
    if label == "BF16":
        return -(-k // AMX_DEPTH) * (AMX_DEPTH // 2) * VECTOR_OF_PAIRS_BYTES
    return k * PANEL_COLUMNS * FLOAT_TYPES[label].itemsize


def packed_float_bytes(label: str, n: int, k: int) -> int:
    """Return the bytes of a packed matrix [n, k]."""
    return -(-n // PANEL_COLUMNS) * panel_bytes(label, k)


def pack_float_rows(label: str, rows: UInt8Array, k: int, out: UInt8Array) -> None:
    """Pack rows of stored weights, uint8 [n, bytes of k elements], into `out`.

    `out`: uint8 [packed_float_bytes(label, n, k)]; all of it is written.
    """
    bits = np.ascontiguousarray(rows).view(FLOAT_TYPES[label])
    n = len(bits)
    num_panels = -(-n // PANEL_COLUMNS)
    panels = out.reshape(num_panels, panel_bytes(label, k))
    step = max(1, PACKED_AT_ONCE // max(1, PANEL_COLUMNS * k))
    for first in range(0, num_panels, step):
        columns = bits[first * PANEL_COLUMNS : (first + step) * PANEL_COLUMNS]
        _turn(label, _filled_up(label, columns), panels[first : first + step])


def _filled_up(label: str, columns: AnyArray) -> AnyArray:
    """Return columns [n, k] with zero columns up to a whole panel, and BF16 up to whole tiles."""
    n, k = columns.shape
    missing_k = -k % AMX_DEPTH if label == "BF16" else 0
    missing_n = -n % PANEL_COLUMNS
    if not missing_n and not missing_k:
        return columns
    return np.pad(columns, ((0, missing_n), (0, missing_k)))


def _turn(label: str, columns: AnyArray, panels: UInt8Array) -> None:
    """Write whole panels of columns [16 · p, k]; bfloat16 move in pairs, as one uint32."""
    lanes = columns.view("<u4") if label == "BF16" else columns
    depth = lanes.shape[1]
    source = lanes.reshape(-1, PANEL_COLUMNS, depth)
    panels.view(lanes.dtype).reshape(-1, depth, PANEL_COLUMNS)[:] = source.swapaxes(1, 2)
