"""Runs the products with floating-point weights on arrays, without an executor.

As a program, `python -m tests.kernels.cpu.float_driver SET`, it prints the digests of results on an
instruction set.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
FIRST_ROW = 2
MARK = np.float32(7.5)
KINDS = {
    "product_f32": ("F32", False),
    "product_f16": ("F16", False),
    "product_bf16": ("BF16", False),
    "product_bf16_rows": ("BF16", True),
}
"""Operation → format of the weights, whether the rows are bfloat16."""


def widen(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bf16(values: Array) -> Array:
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def stored_as(values: Array, label: str) -> tuple[Array, Array]:
    """Return float32 values in a format's bits, and what is left of them as float64."""
    if label == "F32":
        return values, values.astype(np.float64)
    if label == "F16":
        half = values.astype(np.float16)
        return half, half.astype(np.float64)
    bits = to_bf16(values)
    return bits, widen(bits).astype(np.float64)


def aligned(num_bytes: int) -> Array:
    raw = np.full(num_bytes + 64, 0xFF, np.uint8)
    first = -raw.ctypes.data % 64
    return raw[first : first + num_bytes]


def packed(bits: Array, label: str) -> Array:
    from kernels.cpu.float_packing import pack_float_rows, packed_float_bytes

    n, k = bits.shape
    out = aligned(packed_float_bytes(label, n, k))
    pack_float_rows(label, bits.view(np.uint8).reshape(n, -1), k, out)
    return out


def run_product(
    name: str, rows: Array, weights: Array, n: int, out: Array, *, chunks: int = 1,
    accumulate: bool = False,
) -> None:  # fmt: skip
    """Multiply rows [M, K] and a packed matrix of `n` columns into out[FIRST_ROW:]."""
    from kernels.cpu.float_sizes import float_scratch_bytes
    from kernels.cpu.operands import Product
    from kernels.cpu.operation import HEADER_WORDS, RECORD_WORDS, StepWord, operation_named

    record, header = np.zeros(RECORD_WORDS, np.int64), np.zeros(HEADER_WORDS, np.int64)
    scratch = aligned(float_scratch_bytes(is_quantised=True))
    header[StepWord.SCRATCH] = scratch.ctypes.data
    header[StepWord.SCRATCH_BYTES] = len(scratch)
    header[StepWord.NUM_TOKENS], header[StepWord.FIRST_TOKEN] = len(rows), FIRST_ROW
    record[Product.INPUT], record[Product.K] = rows.ctypes.data, rows.shape[1]
    record[Product.WEIGHTS], record[Product.N] = weights.ctypes.data, n
    record[Product.OUT], record[Product.OUT_STRIDE] = out.ctypes.data, out.shape[1]
    record[Product.ACCUMULATE] = accumulate
    record[Product.ROWS_WORD] = StepWord.NUM_TOKENS
    record[Product.OUT_FIRST_WORD] = StepWord.FIRST_TOKEN
    kernel = operation_named(f"float_products.{name}").to_function(5)
    for chunk in range(chunks):
        kernel(record.ctypes.data, header.ctypes.data, chunk, chunks, 0)


def product(name: str, rows: Array, weights: Array, n: int, **options: Any) -> Array:
    """Return rows · weightsᵀ as the operation computes it, [M, n]."""
    out = np.full((FIRST_ROW + len(rows), n), MARK, np.float32)
    run_product(name, rows, weights, n, out, **options)
    return out[FIRST_ROW:]


def example(name: str, m: int, k: int, n: int) -> tuple[Array, Array, Array]:
    """Return rows, packed weights and the float64 product of random numbers."""
    random = np.random.default_rng([m, k, n])
    label, is_bf16 = KINDS[name]
    bits, weights = stored_as(random.standard_normal((n, k), dtype=np.float32), label)
    rows, x = stored_as(
        random.standard_normal((m, k), dtype=np.float32), "BF16" if is_bf16 else "F32"
    )
    return np.ascontiguousarray(rows), packed(bits, label), x @ weights.T


def main() -> None:
    from compute_plane.config import ComputePlaneConfig
    from compute_plane.cpu.kernel_cache import prepare_kernel_cache
    from tests.amx import sets

    sets.use(sys.argv[1])
    prepare_kernel_cache(ComputePlaneConfig().kernel_cache_root)
    digests = {}
    for name in KINDS:
        digest = hashlib.sha256()
        error = 0.0
        for m, k, n in [(1, 96, 33), (13, 77, 50), (40, 64, 96), (1, 77, 210), (4, 96, 210)]:
            rows, weights, expected = example(name, m, k, n)
            result = product(name, rows, weights, n, chunks=2)
            digest.update(result.tobytes())
            error = max(error, float(np.abs(result - expected).max()))
        digests[name] = [digest.hexdigest(), error]
    sys.stdout.write(json.dumps(digests))


if __name__ == "__main__":
    main()
