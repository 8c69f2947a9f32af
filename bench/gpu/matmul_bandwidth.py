"""How fast products with quantised weights read them, beside a device copy and torch's products.

The matrices are those of a model of eight billion parameters, and two of a small one. There are as
many of each as make it a gigabyte, and a run multiplies with every one once, so no cache holds what
the next launch reads. The launches are replayed from a CUDA graph, as a decode step is: many take
less time than queueing them does. Bytes are those that must move: weights and their scales, x and
y, once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from bench.gpu.case import TOLERANCES, Array
from bench.gpu.decode_bandwidth import Timer
from bench.gpu.device import Say, as_graph, current_stream, summary
from bench.gpu.matmul_rivals import RIVALS, Rival
from kernels.cuda.launch import LoadedKernel
from kernels.cuda.quantized_formats import FORMATS, PANEL_ROWS, packed_bytes
from kernels.cuda.quantized_layout import unpack_matrix
from kernels.cuda.quantized_matmul import QuantizedMatmulVariant
from kernels.cuda.quantized_strands import columns_of, strand_bits_of
from kernels.cuda.variant import Variant
from kernels.reference.quantized_matmul import quantized_matmul

Tensor: TypeAlias = Any  # torch.Tensor; torch is imported where a device is known to be there

WORKING_SET_BYTES = 2**30
REPEATS = 20
TYPICAL_FLOAT8 = 100
"""The root mean square of all floats of eight bits."""


@dataclass(frozen=True, slots=True)
class MatmulShape:
    """`num_rows` M rows of `num_inputs` K times a matrix of `num_outputs` N in a format."""

    num_rows: int
    num_inputs: int
    num_outputs: int
    weights: str
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        """M × K × N and the kernel."""
        sizes = f"{self.num_rows} × {self.num_inputs} × {self.num_outputs}"
        return f"{sizes}, {self.variant.name}"

    @property
    def variant(self) -> QuantizedMatmulVariant:
        """The kernel it takes."""
        return QuantizedMatmulVariant(self.weights, self.dtype, columns_of(self.num_rows))


MATRICES = ((4096, 4096), (4096, 14336), (14336, 4096), (4096, 128256))  # K, N
FEW_OUTPUTS = ((2048, 2048), (8192, 2048))  # of the small one: blocks for half of the device
MEASURED = {
    "Q8_0": "bfloat16",
    "Q4_0": "bfloat16",
    "Q4_1": "bfloat16",
    "MXFP4": "bfloat16",
    "FP8_G128": "bfloat16",
    "Q4_K": "bfloat16",
    "Q6_K": "bfloat16",
    "Q4_0_G128": "float16",
    "Q4_Z_G128": "float16",
}
"""Formats, each with the dtype of most models that have it: GGUF's, gpt-oss's, those of Qwen3 and
DeepSeek in float8, Q4_K_M's; GPTQ's, AWQ's."""
SHAPES = (
    *(
        MatmulShape(num_rows, num_inputs, num_outputs, weights, dtype)
        for weights, dtype in MEASURED.items()
        for num_inputs, num_outputs in MATRICES
        for num_rows in (1, 8, 32)
    ),
    *(MatmulShape(8, num_inputs, num_outputs, "Q4_0") for num_inputs, num_outputs in FEW_OUTPUTS),
)


def measure_matmul(
    shape: MatmulShape,
    load: Callable[[Variant], LoadedKernel],
    timer: Timer,
    say: Say,
    *,
    device: str = "cuda",
    rivals: Mapping[str, Rival] = RIVALS,
) -> dict[str, Any]:
    """Measure one shape.

    Return times, rates, the error of some outputs, and the rivals' figures, each with its reason
    where there are none.
    """
    problem = Problem(shape, device)
    visit = problem.launcher(load(shape.variant))
    times = timer(as_graph(visit, device), REPEATS)
    error, tolerance = problem.error_of_last_matrix()
    result = {
        "shape": shape.name,
        "kernel": shape.variant.name,
        "strands": 1 << strand_bits_of(shape.num_outputs),
        "matrices": problem.num_matrices,
        **with_rate(times, problem.bytes_moved, problem.num_matrices),
        "max_error_of_checked_outputs": error,
        "faults": [],
        "rivals": {},
    }
    if not error <= tolerance:
        result["faults"] = [f"error {error:.3g} exceeds {tolerance:.3g}"]
    for name, make in rivals.items():
        try:
            visit, num_bytes, num_matrices = make(problem, WORKING_SET_BYTES)
            times = timer(as_graph(visit, device), REPEATS)
            result["rivals"][name] = with_rate(times, num_bytes, num_matrices)
        except Exception as error_of_rival:  # noqa: BLE001 - whatever another's library fails with
            reason = f"{type(error_of_rival).__name__}: {error_of_rival}".splitlines()[0]
            result["rivals"][name] = {"unavailable": reason}
            say(f"{name}: {reason}")
    return result


class Problem:
    """The tensors of one shape: `x` [M, K], `out` [M, N], and every matrix packed, uint8."""

    def __init__(self, shape: MatmulShape, device: str) -> None:
        import torch

        self.shape = shape
        dtype = getattr(torch, shape.dtype)
        matrix_bytes = packed_bytes(shape.weights, shape.num_outputs, shape.num_inputs)
        self.num_matrices = max(1, math.ceil(WORKING_SET_BYTES / matrix_bytes))
        rows_bytes = dtype.itemsize * shape.num_rows * (shape.num_inputs + shape.num_outputs)
        self.bytes_moved = self.num_matrices * (matrix_bytes + rows_bytes)
        self.x: Tensor = torch.randn(shape.num_rows, shape.num_inputs, dtype=dtype, device=device)
        out_shape = (shape.num_rows, shape.num_outputs)
        self.out: Tensor = torch.full(out_shape, math.nan, dtype=dtype, device=device)
        self.packed: list[Tensor] = [
            draw_packed(shape.weights, shape.num_outputs, shape.num_inputs, self.x.device)
            for _ in range(self.num_matrices)
        ]

    def launcher(self, kernel: LoadedKernel) -> Callable[[], None]:
        """Return what multiplies x with each matrix once."""
        shape = self.shape
        strand_bits = strand_bits_of(shape.num_outputs)
        sizes = (shape.num_rows, shape.num_outputs, shape.num_inputs, strand_bits)
        grid = shape.variant.grid(*sizes)
        out, x = self.out.data_ptr(), self.x.data_ptr()
        pointers = [packed.data_ptr() for packed in self.packed]

        def visit() -> None:
            stream = current_stream(self.x.device.type)
            for packed in pointers:
                kernel.launch(grid, stream, out, x, packed, *sizes, shape.num_outputs, x)

        return visit

    def error_of_last_matrix(self) -> tuple[float, float]:
        """Return the largest error of the first and last panel, and what may be."""
        shape = self.shape
        num_panels = -(-shape.num_outputs // PANEL_ROWS)
        panels = self.packed[-1].view(num_panels, -1)
        x: Array = self.x.double().cpu().numpy()
        worst = largest = 0.0
        for panel in sorted({0, num_panels - 1}):
            first = panel * PANEL_ROWS
            count = min(PANEL_ROWS, shape.num_outputs - first)
            stored = panels[panel].cpu().numpy()
            matrix = unpack_matrix(shape.weights, stored, count, shape.num_inputs)
            exact: Array = np.empty((shape.num_rows, count))
            quantized_matmul(x, *matrix.operands, exact)
            found = self.out[:, first : first + count].double().cpu().numpy()
            difference = np.abs(found - exact)
            worst = max(worst, float(np.nan_to_num(difference, nan=np.inf).max()))
            largest = max(largest, float(np.abs(exact).max()))
        return worst, TOLERANCES[shape.dtype] * max(1.0, largest / 4)


def draw_packed(label: str, num_outputs: int, num_inputs: int, device: object) -> Tensor:
    """Return a matrix [N, K] packed. Any bytes but NaN are weights; numbers beside are finite."""
    import torch

    fmt = FORMATS[label]
    num_panels, num_spans = -(-num_outputs // PANEL_ROWS), num_inputs // fmt.span
    size = (num_panels, fmt.panel_bytes(num_inputs))
    packed = torch.randint(0, 256, size, dtype=torch.uint8, device=device)
    spans = packed[:, fmt.scales_at(num_inputs) :][:, : num_spans * fmt.span_bytes]
    if fmt.shares:
        spans &= 63  # whole scales, of bytes near the middle if they are signed
        spans += 96 if fmt.runs == 2 else 0
        units = packed[:, fmt.scales_at(num_inputs) :][:, num_spans * fmt.span_bytes :]
        units = units[:, : num_inputs // fmt.unit * fmt.shared_bytes]
        typical = 16 * 2.0 ** (fmt.bits - 2) * math.sqrt(num_inputs)
        shared = torch.randn((num_panels, units.shape[1] // 2), device=device) / typical
        units.copy_(shared.half().view(torch.uint8))
        return packed.view(-1)
    spans = spans.unflatten(1, (num_spans, fmt.span_bytes))
    if fmt.scale == "float32":
        packed -= ((packed & 127) == 127).to(torch.uint8)
        typical = TYPICAL_FLOAT8 * math.sqrt(num_inputs)
        numbers = (num_panels, num_spans, fmt.span_bytes // 4)
        scales = torch.randn(numbers, device=device) / typical
        spans.copy_(scales.view(torch.uint8))
        return packed.view(-1)
    if fmt.is_float:
        usual = 125 - round(math.log2(num_inputs) / 2)  # of floats of size 4
        spans.copy_(torch.randint(usual - 1, usual + 2, spans.shape, device=device))
        return packed.view(-1)
    typical = 2.0 ** (fmt.bits - 2) * math.sqrt(num_inputs)
    halves = (num_panels, num_spans, fmt.zeros_at // 2)
    scales = (torch.randn(halves, device=device) / typical).half()
    spans[..., : fmt.zeros_at] = scales.view(torch.uint8)
    return packed.view(-1)


def with_rate(times_ms: list[float], num_bytes: int, num_matrices: int) -> dict[str, Any]:
    """Return times, and the rate of all bytes that the products of a run move."""
    figures = summary(times_ms)
    return {
        **figures,
        "bytes": num_bytes,
        "gb_per_s": num_bytes / 1e6 / figures["median_ms"],
        "microseconds_per_product": figures["median_ms"] * 1e3 / num_matrices,
    }
