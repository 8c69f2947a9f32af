"""What `make gpu` does around the device is tested here: the simulator stands in for it."""

from __future__ import annotations

import ctypes
import itertools
import types
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch

from bench.gpu import __main__ as report
from bench.gpu import decode_bandwidth, device
from bench.gpu.cases import draw_cases
from bench.gpu.decode_bandwidth import Shape, measure_decode
from bench.gpu.decode_rivals import torch_sdpa
from bench.gpu.latent_shapes import DECODE_SHAPES, LatentDecodeShape
from bench.gpu.numerics import check_case
from kernels.cuda import attention_chunks
from kernels.cuda.attention_decode import DecodeVariant
from kernels.cuda.attention_wide import WideDecodeVariant
from kernels.cuda.latent_attention import LatentDecodeVariant
from tests.simt import launch

VARIANT = DecodeVariant("float32", 64, 1, 16)
SHAPE = Shape(2, 80, DecodeVariant("float32", 64, 2, 16), num_kv_heads=1)
WIDE = Shape(2, 80, WideDecodeVariant("float32", 512, 2, 16), num_kv_heads=1)
LATENTS = LatentDecodeShape(2, 80, LatentDecodeVariant("float32", 2, 256, 32, 16))


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

    CTYPES: ClassVar = {
        "float32*": ctypes.c_float, "int32*": ctypes.c_int32, "float32": np.float32,
        "int32": np.int32, "int64": np.int64,
    }  # fmt: skip

    def __init__(self, variant, sizes: dict[int, int]) -> None:
        self._variant = variant
        self._sizes = sizes  # pointer → elements

    def launch(self, grid, _stream, *arguments):
        bound = []
        for kind, argument in zip(self._variant.arguments, arguments, strict=True):
            made = self.CTYPES[kind]
            if kind.endswith("*"):
                array = (made * self._sizes[argument]).from_address(argument)
                bound.append(np.ctypeslib.as_array(array))
            else:
                bound.append(made(argument))
        kernel, threads = self._variant.kernel(), self._variant.threads
        scratch = (5, 6) if len(bound) > 6 else ()
        launch(kernel, grid, threads, bound, written=(0, *scratch))


@pytest.fixture
def small_measurement(monkeypatch):
    """One run of each thing, a second long, over a pool of two layers; short chunks, two splits."""
    monkeypatch.setattr(decode_bandwidth, "WORKING_SET_BYTES", 100_000)
    monkeypatch.setattr(decode_bandwidth, "REPEATS", 1)
    monkeypatch.setattr(decode_bandwidth, "ROUNDS", 1)
    for name in ("CHUNK_TILES", "LEAST_CHUNK_TILES", "MERGE_COST"):
        monkeypatch.setattr(attention_chunks, name, 4)
    sizes = {}

    def sized_pointer(tensor):
        pointer = data_ptr(tensor)
        sizes[pointer] = tensor.numel()
        return pointer

    data_ptr = torch.Tensor.data_ptr
    monkeypatch.setattr(torch.Tensor, "data_ptr", sized_pointer)

    def timer(queue_work, repeats):
        for _ in range(repeats):
            queue_work()
        return [1000.0] * repeats

    def measure(make_kernel, shape=SHAPE):
        def load(variant):
            return make_kernel(variant, sizes)

        return measure_decode(shape, load, timer, print, num_multiprocessors=4, device="cpu")

    return measure


class Idle:
    """Stands for a kernel that does nothing."""

    def __init__(self, *_):
        pass

    def launch(self, *_):
        pass


@pytest.mark.wide
def test_a_measurement_counts_the_bytes_of_all_tokens_and_checks_the_answer(small_measurement):
    result = small_measurement(SimulatedKernel)

    tokens = 80 + 79
    assert result["splits"] == 2
    assert result["layers"] == 2
    assert result["bytes"] == 2 * tokens * 2 * 64 * 4
    assert result["gb_per_s"] == pytest.approx(result["bytes"] / 1e9)
    assert result["microseconds_per_layer"] == 500_000
    assert result["max_error_of_checked_rows"] <= 1e-5
    assert result["faults"] == []


@pytest.mark.wide
def test_a_measurement_with_a_window_counts_the_bytes_of_what_is_seen(small_measurement):
    variant = replace(SHAPE.variant, has_window=True)
    result = small_measurement(SimulatedKernel, replace(SHAPE, variant=variant, window=70))

    assert result["shape"].startswith("2 × 80 (70 seen), 1 kv heads, ")
    assert result["bytes"] == 2 * (70 + 70) * 2 * 64 * 4
    assert result["max_error_of_checked_rows"] <= 1e-5
    assert result["faults"] == []
    assert result["rivals"] == {}


@pytest.mark.wide
def test_a_measurement_of_latents_counts_one_row_a_token_and_checks_the_answer(
    small_measurement, monkeypatch
):
    monkeypatch.setattr(decode_bandwidth, "WORKING_SET_BYTES", 200_000)
    result = small_measurement(SimulatedKernel, LATENTS)

    assert result["shape"] == "2 × 80, latent_decode_float32_h2_r256_p32_b16"
    assert (result["layers"], result["splits"], result["split_rows"]) == (2, 2, 2)
    assert result["bytes"] == 2 * (80 + 79) * (256 + 32) * 4
    assert result["max_error_of_checked_rows"] <= 1e-5
    assert result["faults"] == []
    assert result["rivals"] == {}


def test_gemmas_heads_of_512_are_measured_on_rows_that_the_second_cache_does_not_hold():
    shapes = [one for one in decode_bandwidth.SHAPES if one.query_elements == 512]
    assert [(one.rows, one.context, one.num_heads) for one in shapes] == [
        (64, 4096, 32), (1, 32768, 32),
    ]  # fmt: skip
    assert {2 * one.token_elements for one in shapes} == {8192}
    assert not any(one.has_rivals for one in shapes)
    assert SHAPE.has_rivals


def test_latents_are_measured_on_rows_that_the_second_cache_does_not_hold():
    models = {
        (shape.num_heads, shape.out_elements, shape.query_elements) for shape in DECODE_SHAPES
    }
    assert models == {(16, 512, 576), (128, 512, 576)}
    for shape in DECODE_SHAPES:
        assert 2 * shape.token_elements == 1152
        assert shape in decode_bandwidth.SHAPES
        assert attention_chunks.num_chunks(shape.context, 8) > 8


@pytest.mark.parametrize("shape", [SHAPE, WIDE, LATENTS], ids=lambda shape: shape.name)
def test_a_measurement_of_a_kernel_that_writes_nothing_is_a_fault(small_measurement, shape):
    assert small_measurement(Idle, shape)["faults"] == ["error inf exceeds 1e-05"]


@pytest.mark.parametrize(
    ("argument", "fault"),
    [
        (0, "1 of 2 runs gave split rows other bits than unsplit ones"),
        (6, "split rows left tickets that are not zeros"),
    ],
)
def test_one_bit_too_many_in_one_of_many_runs_is_a_fault(argument, fault, monkeypatch):
    monkeypatch.setattr(decode_bandwidth, "WORKING_SET_BYTES", 100_000)
    monkeypatch.setattr(decode_bandwidth, "ROUNDS", 2)
    problem = decode_bandwidth.Problem(SHAPE, "cpu")
    launches = itertools.count(1)

    class Constant:
        """Stands for a kernel, of which the last launch leaves something else."""

        def launch(self, _grid, _stream, *arguments):
            problem.out.fill_(1.0)
            if next(launches) == 6:  # of two layers each: unsplit, two rounds
                ctypes.c_int32.from_address(arguments[argument]).value += 1

    shape = problem.shape
    split = shape.variant.plan_of(shape.rows, shape.num_kv_heads, shape.context, 2)
    visit_layers = problem.launcher(lambda _: Constant(), split)

    assert problem.faults_of_merging(visit_layers, lambda _: Constant()) == [fault]


def test_others_are_measured_on_the_same_rows_or_say_why_not(small_measurement):
    rivals = small_measurement(Idle)["rivals"]

    assert rivals["torch_sdpa"]["bytes"] == 2 * 2 * 79 * 2 * 64 * 4
    assert rivals["torch_flex"]["unavailable"] == "RuntimeError: compiled for CUDA devices only"
    assert "flashinfer" in rivals


def test_torch_is_given_the_same_problem(monkeypatch):
    """Its answer passes the check of the kernel's, in the last row, which it does not cut."""
    monkeypatch.setattr(decode_bandwidth, "WORKING_SET_BYTES", 100_000)
    problem = decode_bandwidth.Problem(SHAPE, "cpu")
    sdpa = torch.nn.functional.scaled_dot_product_attention
    answers = []
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *arguments, **options: answers.append(sdpa(*arguments, **options)),
    )

    visit_layers, _ = torch_sdpa(problem)
    visit_layers()
    problem.seq_lens[0] = problem.seq_lens[1]
    problem.out = answers[-1][:, :, 0]

    assert problem.error_of_last_layer() <= 1e-5


class RisingClock:
    """Plays a device whose clock rises from run to run, as fast as its events are asked for."""

    def __init__(self, *milliseconds: float) -> None:
        self.left = list(milliseconds)
        self.now = 0.0

    def run(self) -> None:
        self.now += self.left.pop(0) if len(self.left) > 1 else self.left[0]

    def event(self, *, enable_timing: bool):
        assert enable_timing
        made = types.SimpleNamespace(at=0.0, synchronize=lambda: None)
        made.record = lambda: setattr(made, "at", self.now)
        made.elapsed_time = lambda end: end.at - made.at
        return made


def test_nothing_is_timed_while_the_clock_still_rises(monkeypatch):
    clock = RisingClock(90, 80, 70, 60, 50, 40, 30, 20, 10)
    monkeypatch.setattr(torch.cuda, "Event", clock.event)
    monkeypatch.setattr(device, "WARM_UP_S", 0.0)
    assert device.milliseconds(clock.run, 3) == [10, 10, 10]


def test_what_gets_no_faster_is_timed_soon(monkeypatch):
    clock = RisingClock(90, 10)
    monkeypatch.setattr(torch.cuda, "Event", clock.event)
    monkeypatch.setattr(device, "WARM_UP_S", 0.0)
    runs = []
    assert device.milliseconds(lambda: runs.append(clock.run()), 2) == [10, 10]
    assert len(runs) == 6 + 2


@pytest.mark.wide
def test_a_ninth_shape_is_compiled_too():
    """torch runs a function as it is once it has compiled it for eight shapes."""
    # Imported here: it takes seconds, and every worker imports every file.
    from torch._dynamo.testing import CompileCounter

    compiler = CompileCounter()

    def double(x):
        return x * 2

    for size in range(2, 14):
        device.compiled(double, backend=compiler)(torch.ones(size))
    assert compiler.frame_count == 12
