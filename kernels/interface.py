"""The array types of kernels, and the letters for their shapes.

`kernels.reference` holds the specification of each operation, one file an operation, as functions
of arrays that write a caller-provided `out`. The other folders agree with it: exactly for integers,
within rounding for floats. They keep one law: the result of a row (a token, a sample) is computed
in an order fixed by that row alone, so it is the same bits whoever else is there and however the
rows are cut into calls, chunks or threads.

Array letters: T tokens, S sequences, H query heads, G kv heads, D head size, N blocks, L layers,
B block size, M table width, E hidden size, F feed-forward size, K samples, R logits rows,
V vocabulary.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]
UInt8Array = npt.NDArray[np.uint8]
BoolArray = npt.NDArray[np.bool_]
