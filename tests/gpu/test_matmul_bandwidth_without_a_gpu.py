"""The measurement of quantised products, with the simulator in the place of the device."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from bench.gpu import matmul_bandwidth
from bench.gpu.matmul_bandwidth import (
    MEASURED,
    SHAPES,
    MatmulShape,
    as_graph,
    draw_packed,
    measure_matmul,
)
from bench.gpu.matmul_rivals import torch_int4, torch_int8, torch_matmul
from kernels.cuda.quantized_formats import FORMATS
from kernels.cuda.quantized_layout import unpack_matrix
from kernels.reference.quantized_matmul import dequantized
from tests.simt import launch

SHAPE = MatmulShape(3, 64, 40, "Q4_1")
MATRIX_BYTES = 2 * 2 * 640  # two panels of two tiles, each with a span of its own
ROWS_BYTES = 2 * 3 * (64 + 40)


class SimulatedKernel:
    """Stands for a LoadedKernel: finds the arrays behind the pointers and simulates the launch."""

    def __init__(self, variant) -> None:
        self._variant = variant

    def launch(self, grid, _stream, *arguments):
        out, x, packed, num_rows, num_outputs, num_inputs, strand_bits, out_width, biases = (
            arguments
        )
        assert biases == x
        assert (num_rows, num_outputs, num_inputs, out_width) == (3, 40, 64, 40)
        arrays = [
            np.ctypeslib.as_array((kind * size).from_address(pointer))
            for kind, size, pointer in (
                (ctypes.c_uint16, num_rows * num_outputs, out),
                (ctypes.c_uint16, num_rows * num_inputs, x),
                (ctypes.c_uint8, MATRIX_BYTES, packed),
            )
        ]
        scalars = (
            *map(np.int64, (num_rows, num_outputs, num_inputs)),
            np.int32(strand_bits),
            np.int64(out_width),
        )
        launch(self._variant.kernel(), grid, self._variant.threads, (*arrays, *scalars, arrays[1]))


class Idle:
    """Stands for a kernel that does nothing."""

    def launch(self, *_):
        pass


@pytest.fixture
def measure(monkeypatch):
    """One run of each thing, a second long, over two matrices."""
    monkeypatch.setattr(matmul_bandwidth, "WORKING_SET_BYTES", MATRIX_BYTES + 1)
    monkeypatch.setattr(matmul_bandwidth, "REPEATS", 1)

    def timer(queue_work, repeats):
        for _ in range(repeats):
            queue_work()
        return [1000.0] * repeats

    def run(load, **others):
        return measure_matmul(SHAPE, load, timer, print, device="cpu", **others)

    return run


@pytest.mark.wide
def test_a_measurement_counts_the_bytes_of_all_matrices_and_checks_the_answer(measure):
    result = measure(SimulatedKernel, rivals={})

    assert result["kernel"] == "quantized_matmul_q4_1_bfloat16_m8"
    assert result["strands"] == 8
    assert result["matrices"] == 2
    assert result["bytes"] == 2 * (MATRIX_BYTES + ROWS_BYTES)
    assert result["gb_per_s"] == pytest.approx(result["bytes"] / 1e9)
    assert result["microseconds_per_product"] == 500_000
    assert result["max_error_of_checked_outputs"] > 0
    assert result["faults"] == []


def test_a_measurement_of_a_kernel_that_writes_nothing_is_a_fault(measure):
    (fault,) = measure(lambda _: Idle(), rivals={})["faults"]

    assert fault.startswith("error inf exceeds")


def test_torch_is_measured_on_products_of_the_same_size_or_says_why_not(measure, capsys):
    rivals = measure(lambda _: Idle())["rivals"]

    # A matrix of 16 bits, and one of eight with a scale an output; as many as fill the working set.
    assert rivals["torch_matmul"]["bytes"] == 1 * (2 * 64 * 40 + ROWS_BYTES)
    assert rivals["torch_matmul"]["microseconds_per_product"] == 1_000_000
    assert rivals["torch_int8"]["bytes"] == 1 * (64 * 40 + 2 * 40 + ROWS_BYTES)
    assert "torch_int4: " in capsys.readouterr().out
    assert rivals["torch_int4"]["unavailable"]


def test_torchs_weights_fill_the_working_set(monkeypatch):
    monkeypatch.setattr(matmul_bandwidth, "WORKING_SET_BYTES", MATRIX_BYTES)
    problem = matmul_bandwidth.Problem(SHAPE, "cpu")

    for rival, matrix_bytes in ((torch_matmul, 5120), (torch_int8, 2640)):
        visit, num_bytes, num_matrices = rival(problem, 3 * matrix_bytes - 5)
        visit()
        assert num_matrices == 3
        assert num_bytes == 3 * (matrix_bytes + ROWS_BYTES)


@pytest.mark.parametrize(("weights", "group"), [("Q4_1", 32), ("Q4_Z_G128", 128)])
def test_torchs_weights_of_four_bits_have_scales_for_as_many(monkeypatch, weights, group):
    monkeypatch.setattr(torch, "_convert_weight_to_int4pack", lambda q, _: q)
    monkeypatch.setattr(matmul_bandwidth, "WORKING_SET_BYTES", 1)
    groups = []
    monkeypatch.setattr(torch, "_weight_int4pack_mm", lambda *given: groups.append(given[2]))
    problem = matmul_bandwidth.Problem(MatmulShape(3, 256, 40, weights), "cpu")

    visit, num_bytes, _ = torch_int4(problem, 1)
    visit()

    assert groups == [group]
    assert num_bytes == 256 * 40 // 2 + 4 * 40 * 256 // group + 2 * 3 * (256 + 40)


def test_what_runs_on_a_cpu_is_not_captured():
    def visit():
        pass

    assert as_graph(visit, "cpu") is visit


def test_what_most_models_have_is_measured_at_every_matrix_of_one_and_few_outputs_once():
    *most, square, down = SHAPES
    assert {(shape.weights, shape.dtype) for shape in SHAPES} == set(MEASURED.items())
    assert set(MEASURED) < set(FORMATS)
    assert {FORMATS[label].kind for label in MEASURED} == {
        "Q8_0", "Q4_0", "Q4_1", "Q4_Z", "MXFP4", "FP8", "Q4_K", "Q6_K"
    }  # fmt: skip
    assert len(most) == len(MEASURED) * 12
    assert {shape.num_rows for shape in most} == {1, 8, 32}
    assert [square, down] == [
        MatmulShape(8, num_inputs, 2048, "Q4_0") for num_inputs in (2048, 8192)
    ]
    assert {(shape.num_inputs, shape.num_outputs) for shape in most} == {
        (4096, 4096), (4096, 14336), (14336, 4096), (4096, 128256),
    }  # fmt: skip
    assert {shape.variant.columns for shape in SHAPES} == {8, 32}


@pytest.mark.parametrize("label", MEASURED)
def test_drawn_matrices_have_products_of_a_usual_size(label):
    packed = draw_packed(label, 40, 512, torch.device("cpu")).numpy()

    weights = np.empty((40, 512), np.float32)
    dequantized(*unpack_matrix(label, packed, 40, 512).operands, weights)
    size = float(np.sqrt(np.square(weights, dtype=np.float64).sum(axis=1).mean()))
    assert 0.3 < size < 8
