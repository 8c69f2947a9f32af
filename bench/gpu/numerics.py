"""Every variant of every kernel against the exact answer, on whatever runs a kernel.

What runs it is a `Runner`: the GPU (`bench.gpu.device`), or the simulator in the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bench.gpu.case import Case, Runner
from bench.gpu.cases import draw_cases
from kernels.cuda.variant import Variant


@dataclass(frozen=True, slots=True)
class NumericsResult:
    """One case's check. `errors` by output; `faults` is empty if it passed."""

    case: str
    errors: dict[str, float]
    faults: tuple[str, ...]


def check_variant(
    variant: Variant, seed: int, run: Runner, note: Callable[[NumericsResult], None]
) -> None:
    """Check a variant on cases of its own, each noted as soon as it is known."""
    for case in draw_cases(variant, seed=seed):
        note(check_case(case, run))


def check_case(case: Case, run: Runner) -> NumericsResult:
    """Check one case: right, the same when repeated, and the same bits where it is a part."""
    outputs = run(case)
    faults = case.faults(outputs)
    again = run(case)
    if any(
        not np.array_equal(again[name], outputs[name], equal_nan=True) for name in case.expected
    ):
        faults.append("a second run gave other bits")
    if case.part is not None:
        part, select = case.part
        alone = run(part)
        together = select(outputs)
        if any(
            not np.array_equal(alone[name], together[name], equal_nan=True) for name in together
        ):
            faults.append("a part alone gave other bits than in the whole")
    return NumericsResult(case.name, case.errors(outputs), tuple(faults))
