"""A matrix goes to the device a part at a time, and is there what it would have been whole."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from compute_plane.cuda import planned_matrix
from compute_plane.cuda.matrices import DenseMatrix, QuantizedMatrix
from compute_plane.cuda.planned_matrix import PlannedMatrix, whole_panels
from compute_plane.model.quantize import converted_tensor
from compute_plane.model.tensor import RawTensor, TensorFormat
from kernels.cuda.quantized_formats import GATE_TURN, PANEL_ROWS
from kernels.cuda.quantized_layout import pack_rows

CPU = torch.device("cpu")
NUM_INPUTS = 64


def drawn(num_rows: int, of: TensorFormat, seed: int, num_inputs: int = NUM_INPUTS) -> RawTensor:
    """A tensor of drawn weights."""
    values = np.random.default_rng(seed).normal(size=(num_rows, num_inputs)).astype(np.float32)
    dense = RawTensor("x", "x", Path("file"), TensorFormat.F32, values.shape, values.view(np.uint8))
    rows = converted_tensor(dense, of)
    return RawTensor("x", "x", Path("file"), of, values.shape, rows)


def placed(planned: PlannedMatrix) -> np.ndarray:
    matrix = planned.place(CPU)
    if isinstance(matrix, QuantizedMatrix):
        return matrix.packed.numpy()
    assert isinstance(matrix, DenseMatrix)
    return matrix.values.view(torch.uint8).numpy()


@pytest.mark.parametrize("at_once", [1, 3000, 1 << 24])
@pytest.mark.parametrize("num_rows", [[32], [40, 40, 40], [8, 8], [70, 6, 33, 100], [320]])
def test_rows_of_several_matrices_of_any_size_are_packed_as_one(
    monkeypatch, num_rows: list[int], at_once: int
) -> None:
    monkeypatch.setattr(planned_matrix, "BYTES_AT_ONCE", at_once)
    tensors = tuple(drawn(n, TensorFormat.Q8_0, seed) for seed, n in enumerate(num_rows))
    whole = np.concatenate([tensor.rows() for tensor in tensors])
    planned = PlannedMatrix(tensors, TensorFormat.Q8_0)
    np.testing.assert_array_equal(placed(planned), pack_rows("Q8_0", whole, NUM_INPUTS))
    converted = PlannedMatrix(tensors, TensorFormat.BF16)
    expected = np.concatenate([converted_tensor(one, TensorFormat.BF16) for one in tensors])
    np.testing.assert_array_equal(placed(converted), expected)


@pytest.mark.parametrize("at_once", [1, 1 << 24])
def test_gates_and_what_they_gate_take_turns_and_rows_have_their_order(monkeypatch, at_once):
    monkeypatch.setattr(planned_matrix, "BYTES_AT_ONCE", at_once)
    size = 7 * GATE_TURN
    tensors = tuple(drawn(size, TensorFormat.Q8_0, seed) for seed in range(6))
    order = np.random.default_rng(9).permutation(size)
    for row_order in (None, order):
        which = slice(None) if row_order is None else row_order
        turned = [
            tensors[2 * expert + half].rows(which)[turn * GATE_TURN : (turn + 1) * GATE_TURN]
            for expert in range(3)
            for turn in range(7)
            for half in range(2)
        ]
        planned = PlannedMatrix(
            tensors, TensorFormat.Q8_0, row_order=row_order, num_stacked=3, in_turns=True
        )
        expected = pack_rows("Q8_0", np.concatenate(turned), NUM_INPUTS)
        np.testing.assert_array_equal(placed(planned), expected)


@pytest.mark.parametrize("of", [TensorFormat.Q8_0, TensorFormat.BF16])
def test_the_host_holds_a_part_of_a_stack_of_experts_and_not_the_stack(of: TensorFormat) -> None:
    num_experts, size, num_inputs = 64, 128, 2048
    one = drawn(size, of, 0, num_inputs)
    stack = PlannedMatrix((one,) * 2 * num_experts, of, num_stacked=num_experts,
                          in_turns=of is TensorFormat.Q8_0)  # fmt: skip
    tracemalloc.start()  # NumPy's arrays, and not the device's
    stack.place(CPU)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * 2 * one.rows().nbytes < stack.num_bytes / 7


def test_parts_become_whole_panels() -> None:
    sizes = [1, 40, 23, 64, 10, 500, 3]
    rows = np.arange(sum(sizes))[:, None].astype(np.uint8)
    parts = np.split(rows, np.cumsum(sizes)[:-1])
    whole = list(whole_panels(parts))
    np.testing.assert_array_equal(np.concatenate(whole), rows)
    assert all(len(part) % PANEL_ROWS == 0 for part in whole[:-1])
    assert list(whole_panels([])) == []
