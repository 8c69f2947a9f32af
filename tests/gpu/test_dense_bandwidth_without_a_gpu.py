"""The measurement of dense products, with the simulator in the place of the device."""

from __future__ import annotations

import ctypes
import re

import numpy as np
import pytest
import torch

from bench.gpu import dense_bandwidth
from bench.gpu.dense_bandwidth import (
    MATRICES,
    RIVALS,
    SHAPES,
    DenseShape,
    Problem,
    launches_apart,
    measure_dense,
)
from kernels.cuda.dense_matmul import PANELS, panel_rows_of
from kernels.cuda.gate_mul import GateMulVariant
from kernels.cuda.rms_norm import RmsNormVariant
from tests.simt import launch

GATED = DenseShape(3, 64, 40, "gated")
ADDED = DenseShape(3, 64, 40, "added", 16)
ROUNDED = DenseShape(3, 64, 40, "rounded", 32)
MATRIX_BYTES = 2 * 64 * 40


class SimulatedKernel:
    """Stands for a LoadedKernel: finds the arrays behind the pointers and simulates the launch.

    `sizes`: elements by pointer.
    """

    def __init__(self, variant, sizes) -> None:
        self._variant = variant
        self._sizes = sizes

    def launch(self, grid, _stream, *arguments):
        bound = []
        for kind, argument in zip(self._variant.arguments, arguments, strict=True):
            if kind.endswith("*"):
                array = (ctypes.c_uint16 * self._sizes[argument]).from_address(argument)
                bound.append(np.ctypeslib.as_array(array))
            else:
                bound.append(np.dtype(kind).type(argument))
        adds = isinstance(self._variant, RmsNormVariant)  # to its second argument
        written = (0, 1) if adds else (0,)
        launch(self._variant.kernel(), grid, self._variant.threads, bound, written=written)


class Idle:
    """Stands for a kernel that does nothing."""

    def launch(self, *_):
        pass


@pytest.fixture
def load(monkeypatch):
    """What loads simulated kernels; the working set is little more than one small matrix."""
    monkeypatch.setattr(dense_bandwidth, "WORKING_SET_BYTES", MATRIX_BYTES + 1)
    monkeypatch.setattr(dense_bandwidth, "REPEATS", 1)
    torch.manual_seed(0)  # problems are drawn
    sizes = {}
    data_ptr = torch.Tensor.data_ptr

    def sized_pointer(tensor):
        pointer = data_ptr(tensor)
        sizes[pointer] = tensor.numel()
        return pointer

    monkeypatch.setattr(torch.Tensor, "data_ptr", sized_pointer)
    return lambda variant: SimulatedKernel(variant, sizes)


def measure(shape, load, **others):
    """Measure with one run of each thing, a second long."""

    def timer(queue_work, repeats):
        for _ in range(repeats):
            queue_work()
        return [1000.0] * repeats

    return measure_dense(shape, load, timer, device="cpu", **others)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("shape", "matrices", "other_numbers"),
    [(ADDED, 2, 3 * 64 + 2 * 3 * 40), (GATED, 1, 3 * 64 + 3 * 40 + 64)],
    ids=lambda value: getattr(value, "writes", ""),
)
def test_a_measurement_counts_the_bytes_of_all_matrices_and_checks_the_answer(
    load, shape, matrices, other_numbers
):
    result = measure(shape, load, rivals={})

    assert result["kernel"] == shape.variant.name
    assert result["strands"] == 8
    assert result["matrices"] == matrices
    assert result["bytes"] == 2 * MATRIX_BYTES + matrices * 2 * other_numbers
    assert result["gb_per_s"] == pytest.approx(result["bytes"] / 1e9)
    assert result["microseconds_per_product"] == 1_000_000 / matrices
    assert result["max_error_of_checked_outputs"] > 0
    assert result["faults"] == []


@pytest.mark.usefixtures("load")
@pytest.mark.parametrize(("shape", "error"), [(ADDED, r"\d\.\d+"), (GATED, "inf")])
def test_a_measurement_of_a_kernel_that_writes_nothing_is_a_fault(shape, error):
    (fault,) = measure(shape, lambda _: Idle(), rivals={})["faults"]

    assert re.fullmatch(rf"error {error} exceeds 0\.0\d+", fault)


@pytest.mark.wide
def test_the_launches_that_are_replaced_give_what_the_kernel_gives(load):
    problem = Problem(GATED, "cpu")
    assert problem.num_matrices == 1
    problem.launcher(load(GATED.variant))()
    ours = problem.out.clone()

    visit = launches_apart(problem, load)
    assert visit is not None
    visit()

    # They round between launches.
    torch.testing.assert_close(problem.out, ours, rtol=2**-5, atol=2**-6)
    assert not torch.equal(problem.out, ours)


@pytest.mark.usefixtures("load")
def test_rivals_are_measured_on_the_same_bytes_beside_the_kernel_that_is_taken(monkeypatch):
    products = []
    monkeypatch.setattr(torch, "mm", lambda x, weights, out: products.append((x, weights, out)))

    result = measure(ROUNDED, lambda _: Idle())

    assert set(result["rivals"]) == set(RIVALS)
    for figures in result["rivals"].values():
        assert figures["bytes"] == result["bytes"]
        assert figures["microseconds_per_product"] == 500_000
    assert [weights.shape for _, weights, _ in products] == [(64, 40)] * 4
    assert set(measure(ADDED, lambda _: Idle())["rivals"]) == {"torch_matmul"}
    other_panels = DenseShape(3, 64, 40, "added", 32)
    assert measure(other_panels, lambda _: Idle())["rivals"] == {}


def test_a_gate_and_a_norm_are_launches_of_their_own_elsewhere():
    assert GATED.variants_apart == (RmsNormVariant("bfloat16", 64), GateMulVariant("bfloat16"))
    assert ROUNDED.variants_apart == (RmsNormVariant("bfloat16", 64),)
    assert ADDED.variants_apart == ()


def test_every_matrix_of_two_models_is_measured_at_every_variant_and_few_outputs_by_both_panels():
    assert len(SHAPES) == len(set(SHAPES)) == 3 * (len(MATRICES) + 5)
    for num_inputs, num_outputs, writes in MATRICES:
        same = [
            shape
            for shape in SHAPES
            if (shape.num_inputs, shape.num_outputs, shape.writes)
            == (num_inputs, num_outputs, writes)
        ]
        both = writes != "gated" and num_outputs <= 4096
        assert {shape.panel_rows for shape in same} == set(PANELS if both else PANELS[1:])
        taken = [shape for shape in same if shape.is_taken]
        assert [shape.num_rows for shape in taken] == [1, 8, 16]
        usual = panel_rows_of(num_outputs) if writes == "added" else 32
        assert {shape.panel_rows for shape in taken} == {usual}
