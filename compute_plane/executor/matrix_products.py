"""Matrix products in float32 through NumPy's BLAS, on a given number of threads.

OpenBLAS could use threads itself, but they wait for each other many times within one product, and
spin while they do: as soon as another process has one of the cores, everyone waits for it. Measured
with OpenBLAS 0.3.31 on 2 cores with AVX-512, milliseconds for the four products of one layer of the
135M-parameter model:

| rows | OpenBLAS's threads | … with a busy neighbour | cut by columns | … with a busy neighbour |
|---|---|---|---|---|
| 32 | 2.7 | 42–79 | 2.9 | 5.0 |
| 512 | 14.2 | 32–38 | 15.0 | 29 |

So BLAS gets one thread, and a product is cut by output columns into one part a thread.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Final

import numpy as np

from compute_plane.executor.blas_threads import find_blas_thread_setter
from compute_plane.executor.interface import Float32Array
from compute_plane.executor.worker_threads import WorkerThreads

MATRIX_VECTOR_ROWS: Final = 4
"""Up to here one matrix-vector product a row is faster than a matrix product: both are bound by
memory, but OpenBLAS first packs the operands of the latter."""

PARALLEL_BYTES: Final = 3 << 20
"""Rows times bytes of the weights below which a product takes less time than waking a thread."""


class MatrixProducts:
    """Computes x·weightᵀ. Its BLAS (that of the whole process) is set to one thread."""

    def __init__(self, workers: WorkerThreads) -> None:
        self._workers = workers
        set_blas_threads = find_blas_thread_setter()
        self._is_cut = set_blas_threads is not None and workers.num_threads > 1
        if set_blas_threads is not None:
            set_blas_threads(1)

    def linear(self, x: Float32Array, weight: Float32Array, out: Float32Array) -> None:
        """Write x·weightᵀ to `out`. `x`: [T, in]. `weight`: [out, in]. `out`: [T, out]."""
        if not self._is_cut or len(x) * weight.nbytes < PARALLEL_BYTES:
            _multiply(x, weight, out)
            return
        num_parts = self._workers.num_threads
        bounds = [len(weight) * i // num_parts for i in range(num_parts + 1)]
        self._workers.run(
            [partial(_multiply, x, weight[a:b], out[:, a:b]) for a, b in pairwise(bounds)]
        )


def _multiply(x: Float32Array, weight: Float32Array, out: Float32Array) -> None:
    """Write x·weightᵀ to `out` on this thread."""
    if len(x) <= MATRIX_VECTOR_ROWS:
        for t in range(len(x)):
            np.dot(weight, x[t], out=out[t])
    else:
        np.matmul(x, weight.T, out=out)
