"""What `make gpu` does around the device is tested here: the simulator stands in for it."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest

from bench.gpu import __main__ as report
from bench.gpu import decode_bandwidth
from bench.gpu.cases import draw_cases
from bench.gpu.decode_bandwidth import Shape, measure_decode
from bench.gpu.numerics import check_case
from kernels.cuda.attention_decode import DecodeVariant
from tests.simt import launch

VARIANT = DecodeVariant("float32", 64, 1, 16)
SHAPE = Shape(2, 20, DecodeVariant("float32", 64, 2, 16), num_kv_heads=2)


def test_a_machine_without_a_device_gets_one_line_and_no_report(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(report, "why_no_device", lambda: "torch is built without CUDA")

    assert report.main(["--out", str(tmp_path / "report.json")]) == 2

    shown = capsys.readouterr()
    assert shown.err == "no CUDA device: torch is built without CUDA\n"
    assert shown.out == ""
    assert not (tmp_path / "report.json").exists()


CASE = draw_cases(VARIANT)[0]


def perfect(case):
    """Stands for a kernel that is right."""
    return {"out": case.expected["out"].values.astype(np.float32)}


def test_a_right_kernel_passes_the_numerics():
    result = check_case(CASE, perfect)

    assert result.case == VARIANT.name
    assert result.errors["out"] <= 1e-5
    assert result.faults == ()


def test_a_wrong_kernel_fails_the_numerics():
    result = check_case(CASE, lambda case: {"out": perfect(case)["out"] * np.float32(1.001)})

    assert len(result.faults) == 1
    assert "exceeds 1e-05" in result.faults[0]


def test_an_unwritten_output_is_infinitely_wrong():
    result = check_case(CASE, lambda case: {"out": case.arrays["out"]})

    assert result.errors == {"out": np.inf}


def test_a_kernel_whose_bits_change_fails_the_numerics():
    runs = itertools.count()

    def unsteady(case):
        return {"out": perfect(case)["out"] + np.float32(1e-6) * next(runs)}

    assert check_case(CASE, unsteady).faults == (
        "a second run gave other bits",
        "a part alone gave other bits than in the whole",
    )


class SimulatedKernel:
    """Stands for a LoadedKernel: finds the arrays behind the pointers and simulates the launch."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape

    def launch(self, grid, _stream, *arguments):
        pointers, scalars = arguments[:5], arguments[5:]
        scale, query_stride, width, block_stride, *offsets = scalars
        rows = self._shape.rows
        pool_size = rows * width * block_stride
        sizes = (rows * query_stride, rows * query_stride, pool_size, rows * width, rows)
        kinds = (ctypes.c_float, ctypes.c_float, ctypes.c_float, ctypes.c_int32, ctypes.c_int32)
        arrays = [
            np.ctypeslib.as_array((kind * size).from_address(pointer))
            for kind, size, pointer in zip(kinds, sizes, pointers, strict=True)
        ]
        variant = self._shape.variant
        strides = (query_stride, width, block_stride, *offsets)
        launch(variant.kernel(), grid, variant.threads, (*arrays, np.float32(scale), *strides))


@pytest.fixture
def small_measurement(monkeypatch):
    """One run of each thing, a second long, over a pool of two layers."""
    monkeypatch.setattr(decode_bandwidth, "WORKING_SET_BYTES", 70_000)
    monkeypatch.setattr(decode_bandwidth, "REPEATS", 1)

    def timer(queue_work, repeats):
        for _ in range(repeats):
            queue_work()
        return [1000.0] * repeats

    return lambda kernel: measure_decode(SHAPE, kernel, timer, print, device="cpu")


def test_a_measurement_counts_the_bytes_of_all_tokens_and_checks_the_answer(small_measurement):
    result = small_measurement(SimulatedKernel(SHAPE))

    tokens = 20 + 19
    assert result["layers"] == 2
    assert result["bytes"] == 2 * tokens * 2 * 2 * 64 * 4
    assert result["gb_per_s"] == pytest.approx(result["bytes"] / 1e9)
    assert result["microseconds_per_launch"] == 500_000
    assert result["max_error_of_checked_rows"] <= 1e-5
    assert result["faults"] == []
    assert result["torch_sdpa"]["bytes"] == 2 * 2 * 19 * 2 * 2 * 64 * 4


def test_a_measurement_of_a_kernel_that_writes_nothing_is_a_fault(small_measurement):
    class Idle:
        def launch(self, *_):
            pass

    assert small_measurement(Idle())["faults"] == ["error inf exceeds 1e-05"]
