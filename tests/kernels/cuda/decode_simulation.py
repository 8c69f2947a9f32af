"""Runs decode attention's kernel function in the simulator."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bench.gpu.decode_case import DecodeCase
from tests.simt import launch

# On N(0, 1) data. Sixteen-bit outputs of magnitude 4 are rounded by up to 2⁻⁷ (bfloat16).
TOLERANCES = {"float32": 1e-5, "float16": 2e-2, "bfloat16": 2e-2}


def simulate(
    case: DecodeCase, *, kernel: Callable[..., None] | None = None, seed: int = 0
) -> np.ndarray:
    """Run the variant's kernel, or a given one, over a case; the output starts poisoned."""
    variant = case.variant
    poison = np.nan if variant.dtype == "float32" else 0x7FFF  # NaN in both 16-bit types
    out = np.full(case.expected.shape, poison, case.pool.dtype)
    grid = variant.grid(len(case.seq_lens), case.num_kv_heads)
    arrays = (out, case.query, case.pool, case.block_tables, case.seq_lens)
    scale, *integers = case.scalars
    arguments = (*arrays, np.float32(scale), *integers)
    launch(kernel or variant.kernel(), grid, variant.threads, arguments, seed=seed)
    return out
