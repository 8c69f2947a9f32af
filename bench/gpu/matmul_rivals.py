"""torch's products of the same size: with weights of 16 bits, and its own of eight and four.

A rival is made from a `matmul_bandwidth.Problem` and the bytes its matrices should take together.
It gives what queues one product with each matrix, the bytes that this moves, and how many matrices
there are. Their weights are not the problem's: they are measured, not checked. Any exception says
that the rival cannot be had here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

from kernels.cuda.quantized_formats import FORMATS

Problem: TypeAlias = Any  # matmul_bandwidth.Problem, which imports this module
Tensor: TypeAlias = Any
Rival: TypeAlias = Callable[[Problem, int], tuple[Callable[[], None], int, int]]

INNER_K_TILES = 8  # of torch's layout, the one its users take


def torch_matmul(problem: Problem, working_set: int) -> tuple[Callable[[], None], int, int]:
    """x · Wᵀ with W in x's own type."""
    import torch

    x, shape = problem.x, problem.shape
    size = (shape.num_outputs, shape.num_inputs)
    matrix_bytes = math.prod(size) * x.element_size()
    matrices = [
        torch.randn(size, dtype=x.dtype, device=x.device)
        for _ in range(max(1, math.ceil(working_set / matrix_bytes)))
    ]

    def visit() -> None:
        for weights in matrices:
            torch.nn.functional.linear(x, weights)

    return visit, *_moved(problem, matrix_bytes, len(matrices))


def torch_int8(problem: Problem, working_set: int) -> tuple[Callable[[], None], int, int]:
    """torch's product with weights of eight bits and a scale for each output."""
    import torch

    x, shape = problem.x, problem.shape
    size = (shape.num_outputs, shape.num_inputs)
    matrix_bytes = math.prod(size) + x.element_size() * shape.num_outputs
    scales = torch.rand(shape.num_outputs, device=x.device).to(x.dtype)
    matrices = [
        torch.randint(-128, 128, size, dtype=torch.int8, device=x.device)
        for _ in range(max(1, math.ceil(working_set / matrix_bytes)))
    ]

    def visit() -> None:
        for weights in matrices:
            torch._weight_int8pack_mm(x, weights, scales)

    return visit, *_moved(problem, matrix_bytes, len(matrices))


def torch_int4(problem: Problem, working_set: int) -> tuple[Callable[[], None], int, int]:
    """torch's product with weights of four bits, a scale and a minimum for each of our spans."""
    import torch

    x, shape = problem.x, problem.shape
    size = (shape.num_outputs, shape.num_inputs // 2)
    group = FORMATS[shape.weights].span
    groups = (shape.num_inputs // group, shape.num_outputs, 2)
    matrix_bytes = math.prod(size) + x.element_size() * math.prod(groups)
    scales_and_minima = torch.randn(groups, dtype=x.dtype, device=x.device)
    matrices = [
        torch._convert_weight_to_int4pack(
            torch.randint(0, 256, size, dtype=torch.uint8, device=x.device), INNER_K_TILES
        )
        for _ in range(max(1, math.ceil(working_set / matrix_bytes)))
    ]

    def visit() -> None:
        for weights in matrices:
            torch._weight_int4pack_mm(x, weights, group, scales_and_minima)

    return visit, *_moved(problem, matrix_bytes, len(matrices))


RIVALS: dict[str, Rival] = {
    "torch_matmul": torch_matmul,
    "torch_int8": torch_int8,
    "torch_int4": torch_int4,
}


def _moved(problem: Problem, matrix_bytes: int, num_matrices: int) -> tuple[int, int]:
    """Return the bytes of all products and how many there are."""
    rows_bytes = (problem.x.numel() + problem.out.numel()) * problem.x.element_size()
    return num_matrices * (matrix_bytes + rows_bytes), num_matrices
