"""Token embedding: rows of a table."""

from __future__ import annotations

import numpy as np

from kernels.interface import Float32Array, Int32Array


def embedding(table: Float32Array, token_ids: Int32Array, out: Float32Array) -> None:
    """Write row `token_ids[t]` of `table` to `out[t]`.

    `table`: [V, E]. `token_ids`: [T], each in 0 to V − 1 (IndexError otherwise). `out`: [T, E].
    """
    np.take(table, token_ids, axis=0, out=out)
