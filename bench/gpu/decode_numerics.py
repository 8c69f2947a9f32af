"""Every decode attention variant against the float64 answer, on whatever runs a kernel.

What runs it is a `Runner`: the GPU (`bench.gpu.device`), or the simulator in the tests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.gpu.decode_case import DecodeCase, draw_case
from kernels.cuda.attention_decode import DecodeVariant

# Largest absolute error on normally distributed data. Outputs reach magnitude 4 (a row of one token
# is its value), where a bfloat16 result is rounded by up to 2⁻⁷ and a float16 one by 2⁻¹⁰.
TOLERANCES = {"float32": 1e-5, "float16": 2e-2, "bfloat16": 2e-2}

# Runs a case's variant over it; returns the output [S, H, D] as stored, poisoned before the launch.
Runner = Callable[[DecodeCase], npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class NumericsResult:
    """One variant's check. `faults` is empty if it passed."""

    variant: str
    max_error: float
    tolerance: float
    faults: tuple[str, ...]


def check_variants(
    variants: Iterable[DecodeVariant],
    run: Runner,
    *,
    progress: Callable[[NumericsResult], None] | None = None,
) -> list[NumericsResult]:
    """Check each variant on a case of its own."""
    results = []
    for seed, variant in enumerate(variants):
        results.append(check_variant(variant, run, seed=seed))
        if progress is not None:
            progress(results[-1])
    return results


def check_variant(variant: DecodeVariant, run: Runner, *, seed: int = 0) -> NumericsResult:
    """Check one variant: right, the same when repeated, and the same for a row alone."""
    case = draw_case(variant, lengths(variant.block_size), seed=seed)
    tolerance = TOLERANCES[variant.dtype]
    out = run(case)
    error = case.error(out)
    faults = []
    if not error <= tolerance:
        faults.append(f"error {error:.3g} exceeds {tolerance:.3g}")
    if not np.array_equal(run(case), out):
        faults.append("a second run gave other bits")
    longest = int(np.argmax(case.seq_lens))
    if not np.array_equal(run(only_row(case, longest))[0], out[longest]):
        faults.append("a row alone gave other bits than in the batch")
    return NumericsResult(variant.name, error, tolerance, tuple(faults))


def lengths(block_size: int) -> tuple[int, ...]:
    """Return the lengths where mistakes live: one token, block edges, padding, many blocks."""
    return (
        block_size, 2 * block_size + 3, 1, 0, block_size - 1, block_size + 1, 2, 9 * block_size + 5,
    )  # fmt: skip


def only_row(case: DecodeCase, row: int) -> DecodeCase:
    """Return the case with one of its rows; the pool stays."""
    one = slice(row, row + 1)
    return dataclasses.replace(
        case,
        query=case.query[one],
        block_tables=case.block_tables[one],
        seq_lens=case.seq_lens[one],
        expected=case.expected[one],
    )
