"""How fast products with dense weights read them, beside a device copy and what they replace.

The matrices are those of a layer of a small model and of one of eight billion parameters, each with
what the layer has before and after it. As in `matmul_bandwidth` there are as many of each as make a
gigabyte, and a graph multiplies with every one once. Bytes are those that must move for the product
and what is around it in one launch, for all that is compared.

    torch_matmul     torch's product of the same rows and matrices, alone
    launches_apart   the norm, which adds, torch's product, and the gate: what a layer without this
                     kernel has; where our product is added, torch's is all there is
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from bench.gpu.case import TOLERANCES, Array, to_float64
from bench.gpu.cases.dense_matmul import EPS, exact_product
from bench.gpu.decode_bandwidth import Timer
from bench.gpu.device import as_graph, current_stream
from bench.gpu.matmul_bandwidth import REPEATS, WORKING_SET_BYTES, with_rate
from kernels.cuda.dense_matmul import (
    PANELS,
    DenseMatmulVariant,
    columns_of,
    normalises,
    panel_rows_of,
)
from kernels.cuda.fetched_weights import NOTHING, plan_fetch
from kernels.cuda.fitted_ptx import EARLY_LAUNCHES
from kernels.cuda.gate_mul import GateMulVariant
from kernels.cuda.launch import LoadedKernel
from kernels.cuda.rms_norm import RmsNormVariant
from kernels.cuda.variant import Variant

Tensor: TypeAlias = Any  # torch.Tensor; torch is imported where a device is known to be there
Load: TypeAlias = Callable[[Variant], LoadedKernel]

CHECKED_OUTPUTS = 32
FEW_OUTPUTS = 4096
"""Up to so many outputs both sizes of panels are measured."""


@dataclass(frozen=True, slots=True)
class DenseShape:
    """`num_rows` M rows of `num_inputs` K times a matrix for `num_outputs` N, and what becomes."""

    num_rows: int
    num_inputs: int
    num_outputs: int
    writes: str
    panel_rows: int = PANELS[1]
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        """M × K × N and the kernel."""
        sizes = f"{self.num_rows} × {self.num_inputs} × {self.num_outputs}"
        return f"{sizes}, {self.variant.name}"

    @property
    def normalises(self) -> bool:
        """What is added to the residual stream does not come from it; others do where it pays."""
        weight_rows = 2 * self.num_outputs if self.writes == "gated" else self.num_outputs
        return self.writes != "added" and normalises(self.dtype, weight_rows, self.num_inputs)

    @property
    def is_taken(self) -> bool:
        """Whether a model's steps take this kernel, not only the other size of panels."""
        gates = self.variant.gates
        own = panel_rows_of(self.num_outputs, is_normed=self.normalises)
        return gates or self.panel_rows == own

    @property
    def variant(self) -> DenseMatmulVariant:
        """The kernel."""
        columns = columns_of(self.num_rows)
        return DenseMatmulVariant(
            self.dtype, columns, self.writes, self.normalises, self.panel_rows
        )

    @property
    def variants_apart(self) -> tuple[Variant, ...]:
        """Our kernels of a layer without this one, around torch's product."""
        norm = (RmsNormVariant(self.dtype, self.num_inputs),) if self.normalises else ()
        return (*norm, GateMulVariant(self.dtype)) if self.variant.gates else norm


MATRICES = (
    (2048, 3072, "rounded"), (2048, 2048, "added"), (2048, 8192, "gated"), (8192, 2048, "added"),
    (4096, 6144, "rounded"), (4096, 4096, "added"), (4096, 14336, "gated"), (14336, 4096, "added"),
)  # fmt: skip
"""K, N and what is written: of 1.2 and of 8 billion parameters."""


def _panels_of(num_outputs: int, writes: str) -> tuple[int, ...]:
    return PANELS if writes != "gated" and num_outputs <= FEW_OUTPUTS else PANELS[1:]


SHAPES = tuple(
    DenseShape(num_rows, *matrix, panel_rows)
    for matrix in MATRICES
    for num_rows in (1, 8, 16)
    for panel_rows in _panels_of(*matrix[1:])
)


def measure_dense(
    shape: DenseShape,
    load: Load,
    timer: Timer,
    *,
    device: str = "cuda",
    rivals: Mapping[str, Rival] | None = None,
) -> dict[str, Any]:
    """Measure one shape; return times, rates, the error of some outputs, the rivals' figures.

    Rivals are measured beside the kernel that is taken, `RIVALS` if none are given.
    """
    problem = Problem(shape, device)

    def measured(visit: Callable[[], None]) -> dict[str, Any]:
        times = timer(as_graph(visit, device), REPEATS)
        return with_rate(times, problem.bytes_moved, problem.num_matrices)

    kernel = load(shape.variant)
    own = measured(problem.launcher(kernel))
    error, tolerance = problem.error_of_last_matrix(kernel)
    result = {
        "shape": shape.name,
        "kernel": shape.variant.name,
        "strands": 1 << shape.variant.strand_bits(shape.num_outputs),
        "matrices": problem.num_matrices,
        **own,
        "max_error_of_checked_outputs": error,
        "faults": [] if error <= tolerance else [f"error {error:.3g} exceeds {tolerance:.3g}"],
        "rivals": {},
    }
    if shape.is_taken:
        for name, make in (RIVALS if rivals is None else rivals).items():
            visit = make(problem, load)
            if visit is not None:
                result["rivals"][name] = measured(visit)
    return result


class Problem:
    """The tensors of one shape: `x` [M, K], `norm` [K], `out` [M, N]; each W [N, K] or [2·N, K]."""

    def __init__(self, shape: DenseShape, device: str) -> None:
        import torch

        self.shape = shape
        dtype = getattr(torch, shape.dtype)
        num_rows, num_inputs = shape.num_rows, shape.num_inputs
        self.matrix_rows = 2 * shape.num_outputs if shape.variant.gates else shape.num_outputs
        matrix_bytes = dtype.itemsize * self.matrix_rows * num_inputs
        self.num_matrices = max(1, math.ceil(WORKING_SET_BYTES / matrix_bytes))
        passes = 2 if shape.writes == "added" else 1  # over `out`
        numbers = num_rows * (num_inputs + passes * shape.num_outputs)
        numbers += num_inputs if shape.normalises else 0
        self.bytes_moved = self.num_matrices * (matrix_bytes + dtype.itemsize * numbers)
        self.x: Tensor = torch.randn(num_rows, num_inputs, dtype=dtype, device=device)
        self.norm: Tensor = torch.rand(num_inputs, dtype=dtype, device=device) + 0.5
        self.out: Tensor = self.empty(shape.num_outputs)
        size = (self.matrix_rows, num_inputs)
        self.matrices: list[Tensor] = [
            torch.randn(size, dtype=dtype, device=device).div_(math.sqrt(num_inputs))
            for _ in range(self.num_matrices)
        ]

    def empty(self, width: int) -> Tensor:
        """Return rows that nobody has written, of so many elements."""
        return self.x.new_full((self.shape.num_rows, width), math.nan)

    def launcher(self, kernel: LoadedKernel, matrices: slice = slice(None)) -> Callable[[], None]:
        """Return what multiplies x with each of some matrices once."""
        shape = self.shape
        strand_bits = shape.variant.strand_bits(shape.num_outputs)
        sizes = (shape.num_rows, shape.num_outputs, shape.num_inputs, strand_bits)
        grid = shape.variant.grid(*sizes)
        out, x, norm = (tensor.data_ptr() for tensor in (self.out, self.x, self.norm))
        pointers = [weights.data_ptr() for weights in self.matrices[matrices]]
        width = shape.num_outputs

        def visit() -> None:
            stream = current_stream(self.x.device.type)
            for weights in pointers:
                kernel.launch(grid, stream, out, x, weights, norm, *sizes, width, EPS, x)

        return visit

    def error_of_last_matrix(self, kernel: LoadedKernel) -> tuple[float, float]:
        """Multiply anew; return the largest error of first and last outputs, and what may be."""
        shape = self.shape
        if shape.writes == "added":
            self.out.normal_()
        count = min(CHECKED_OUTPUTS, shape.num_outputs)
        firsts = sorted({0, shape.num_outputs - count})
        exact = [self._exact(slice(first, first + count)) for first in firsts]
        self.launcher(kernel, slice(-1, None))()
        worst = largest = 0.0
        for first, values in zip(firsts, exact, strict=True):
            found = to_float64(shape.dtype, _stored(self.out[:, first : first + count]))
            worst = max(worst, float(np.nan_to_num(np.abs(found - values), nan=np.inf).max()))
            largest = max(largest, float(np.abs(values).max()))
        return worst, TOLERANCES[shape.dtype] * max(1.0, largest / 4)

    def _exact(self, outputs: slice) -> Array:
        """Return some outputs of the last matrix, [M, …] in float64; `out` is not written yet."""
        parts = self.matrices[-1].split(self.shape.num_outputs)
        return exact_product(
            self.shape.variant,
            {
                "out": _stored(self.out[:, outputs]),
                "x": _stored(self.x),
                "weights": np.concatenate([_stored(part[outputs]) for part in parts]),
                "norm_weight": _stored(self.norm),
            },
        )


Rival: TypeAlias = Callable[[Problem, Load], Callable[[], None] | None]
"""Gives what queues a product with each matrix of a problem, or None where there is no such."""


def torch_matmul(problem: Problem, _load: Load) -> Callable[[], None]:
    """Return x · Wᵀ for each W, and nothing before or after."""
    import torch

    made = problem.empty(problem.matrix_rows)

    def visit() -> None:
        for weights in problem.matrices:
            torch.mm(problem.x, weights.t(), out=made)

    return visit


def launches_apart(problem: Problem, load: Load) -> Callable[[], None] | None:
    """Return the norm, which adds, and the gate as launches of their own around torch's product.

    The norm fetches what the product reads first, where a layer's does; nothing follows the gate.
    """
    import torch

    shape = problem.shape
    if not shape.variants_apart:
        return None
    kernels = [load(variant) for variant in shape.variants_apart]
    norms = kernels[: int(shape.normalises)]
    residual, normed = torch.zeros_like(problem.x), torch.empty_like(problem.x)
    made = problem.empty(problem.matrix_rows)
    fetched = NOTHING
    if problem.x.device.type == "cuda" and torch.cuda.get_device_capability() >= EARLY_LAUNCHES:
        fetched = plan_fetch(problem.matrix_rows, shape.num_inputs, problem.x.element_size())
    norm_grid = RmsNormVariant(shape.dtype, shape.num_inputs).grid(shape.num_rows, fetched)
    around_norm = (normed, residual, problem.x, problem.norm, problem.norm)
    gate_grid = GateMulVariant(shape.dtype).grid(shape.num_rows, shape.num_outputs)

    def visit() -> None:
        stream = current_stream(problem.x.device.type)
        norm_pointers = [tensor.data_ptr() for tensor in around_norm]  # kept alive by this function
        gate_arguments = (problem.out.data_ptr(), made.data_ptr(), shape.num_outputs)
        nothing = (problem.x.data_ptr(), *NOTHING.arguments)
        for weights in problem.matrices:
            following = (weights.data_ptr(), *fetched.arguments)
            for norm in norms:
                norm.launch(norm_grid, stream, *norm_pointers, EPS, 1.0, *following)
            torch.mm(normed, weights.t(), out=made)
            for gate in kernels[len(norms) :]:
                gate.launch(gate_grid, stream, *gate_arguments, *nothing)

    return visit


OWN_LAUNCHES: dict[str, Rival] = {"launches_apart": launches_apart}
"""What is no other library's, though it has torch's product in it."""
RIVALS: dict[str, Rival] = {"torch_matmul": torch_matmul, **OWN_LAUNCHES}


def _stored(tensor: Tensor) -> Array:
    """Return a tensor of 16-bit floats as a case has it."""
    import torch

    stored: Array = tensor.contiguous().view(torch.int16).cpu().numpy().view(np.uint16)
    return stored
