"""Kernels to be measured: what each is given, and what it must at least read and compute.

The shapes are those of the embedded model (SmolLM2-135M), so that a case is a part of its step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from compute_plane.cpu.thread_team import Entry
from hetero_infer.bench.kernel_workbench import Workbench

HIDDEN: Final = 576
HEADS: Final = 9
KV_HEADS: Final = 3
HEAD_DIM: Final = 64
INTERMEDIATE: Final = 1536
VOCAB: Final = 49152
BLOCK_SIZE: Final = 16

Prepare = Callable[[Workbench], Sequence[Entry]]


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One kernel on one shape.

    `num_bytes`: memory it must read and write, each byte once. `num_operations`: a multiplication
    and an addition are two. `peak`: the kind of arithmetic it is held against
    (`roof_kernels.arithmetic_roofs`), None for memory only. `prepare`: makes what it works on.
    """

    name: str
    num_bytes: int
    num_operations: int
    peak: str | None
    prepare: Prepare


def all_cases() -> list[KernelCase]:
    """Return every case the selected instruction set can run."""
    from hetero_infer.bench.attention_cases import attention_cases
    from hetero_infer.bench.product_cases import product_cases
    from hetero_infer.bench.row_cases import row_cases
    from hetero_infer.bench.sampling_cases import sampling_cases

    return [*product_cases(), *attention_cases(), *row_cases(), *sampling_cases()]
