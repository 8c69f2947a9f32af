"""The measurement of mixtures of experts, with the simulator in the place of the device."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from bench.gpu import decode_bandwidth, expert_speed, kernel_parts
from bench.gpu.expert_speed import SHAPES, ExpertShape, measure_experts
from bench.gpu.findings import Findings, PartOptions
from bench.gpu.needed_kernels import needed_variants
from compute_plane.cuda import expert_kernels, launchers
from compute_plane.model.spec import Mixture
from tests.compute_plane.cuda.simulated_launcher import SimulatedLauncher

QUANTISED = ExpertShape(3, Mixture(4, 2), 64, 32, "Q4_1")
DENSE = ExpertShape(3, Mixture(4, 2), 64, 32)
FLOAT8 = ExpertShape(3, Mixture(4, 2), 64, 32, "FP8")
BIASED = ExpertShape(3, Mixture(4, 2), 64, 32, "MXFP4", "gpt-oss")
SHARED = ExpertShape(
    3, Mixture(4, 2, True, "sigmoid", 1.5, True, shared_size=32), 64, 32, "Q4_1", "dots1"
)
EXPERT_BYTES = {
    "Q4_1": 3 * 2 * (512 + 128),
    "MXFP4": 2 * 1152 + 2 * 640,
    "FP8": 3 * 2 * (1024 + 128),
    None: 3 * 64 * 32 * 2,
}
"""A panel's 32 columns in Q4_1 are 512 bytes of weights and 128 of scales."""


class Timer:
    """Runs what is timed once. `launched`: names of what that launched, of each time."""

    def __init__(self, launcher: SimulatedLauncher) -> None:
        self._launcher = launcher
        self.launched: list[list[str]] = []

    def __call__(self, queue_work, repeats):
        before = len(self._launcher.launched)
        queue_work()
        self.launched.append([name for name, _ in self._launcher.launched[before:]])
        return [1000.0] * repeats


@pytest.mark.wide
@pytest.mark.parametrize(
    "shape", [QUANTISED, FLOAT8, BIASED, DENSE, SHARED], ids=lambda shape: shape.name
)
def test_a_measurement_counts_the_experts_that_have_rows_and_beside_them_torch(shape, monkeypatch):
    shared_bytes = EXPERT_BYTES["Q4_1"] * (shape is SHARED)
    layer_bytes = 4 * EXPERT_BYTES[shape.weights] + shared_bytes
    monkeypatch.setattr(expert_speed, "WORKING_SET_BYTES", layer_bytes + 1)
    monkeypatch.setattr(expert_speed, "ROUNDS", int(shape is DENSE))  # each is a visit more
    torch.manual_seed(1)
    launcher, late = SimulatedLauncher(), SimulatedLauncher(runs=shape is DENSE)
    timer = Timer(launcher)

    result = measure_experts(shape, launcher, timer, late=late, device="cpu")

    assert result["faults"] == []
    assert [name for name, _ in late.launched] == timer.launched[0]
    assert result["layers"] == 2
    assert 2 * 2 <= result["experts_with_rows"] <= 2 * 4
    of_experts = result["experts_with_rows"] * EXPERT_BYTES[shape.weights]
    assert result["bytes"] == of_experts + 2 * shared_bytes
    assert result["microseconds_per_layer"] == 500_000
    of_layer = len(timer.launched[0]) // 2
    logits = "router_logits_bfloat16_t8" + "_biased" * (shape is BIASED)
    route = "route_experts_e4_c2" + "_sigmoid_corrected" * (shape is SHARED)
    shared = ["quantized_matmul_q4_1_bfloat16_m8_gated", "quantized_matmul_q4_1_bfloat16_m8"]
    first = 1 + 2 * (shape is SHARED)
    assert timer.launched[0][1:first] == shared[: first - 1]
    assert timer.launched[0][first : first + 2] == [logits, route]
    assert timer.launched[0][of_layer - 1] == "add_experts_bfloat16_c2"
    if shape is not DENSE:
        assert result["rivals"] == {}
    else:
        assert result["rivals"]["torch"]["bytes"] == result["bytes"]
        assert not any("experts" in name for name in timer.launched[1])


def test_tokens_that_no_kernel_takes_are_measured_as_steps_compute_them(monkeypatch):
    monkeypatch.setattr(expert_speed, "WORKING_SET_BYTES", 5 * EXPERT_BYTES[None])
    monkeypatch.setattr(expert_kernels, "MOST_ROWS", 2)
    launcher, late = SimulatedLauncher(), SimulatedLauncher()
    timer = Timer(launcher)

    result = measure_experts(DENSE, launcher, timer, late=late, device="cpu")

    assert result["microseconds_per_layer"] == 500_000
    assert result["rivals"] == {}
    assert len(timer.launched) == 1
    assert late.launched == []


class PlayedLauncher(SimulatedLauncher):
    """Runs no kernel; the run of some numbers changes a bit of what is added up.

    `ways`: which kernels began early when its own were prepared.
    """

    def __init__(self, wrong_runs: tuple[int, ...]) -> None:
        super().__init__()
        self.ways: list[tuple[str, ...]] = []
        self._wrong_runs = wrong_runs
        self._num_runs = 0

    def prepare(self, variants):
        super().prepare(variants)
        self.ways.append(launchers.BEGINS_EARLY)

    def launch(self, variant, _grid, *arguments):
        if variant.name.startswith("add_experts"):
            self._num_runs += 1
            if self._num_runs in self._wrong_runs:
                arguments[0].view(torch.int16)[0, 0] ^= 1


# The first run is timed.
@pytest.mark.parametrize(
    ("wrong_runs", "faults"),
    [
        ((), []),
        ((3,), ["1 of 3 runs of launches that begin early gave other bits than launches in turn"]),
    ],
)
def test_launches_that_begin_early_must_give_the_bits_of_launches_in_turn(
    wrong_runs, faults, monkeypatch
):
    monkeypatch.setattr(expert_speed, "WORKING_SET_BYTES", EXPERT_BYTES["Q4_1"])
    monkeypatch.setattr(expert_speed, "ROUNDS", 3)
    monkeypatch.setattr(expert_speed, "SHAPES", [QUANTISED])
    on_the_cpu = functools.partial(measure_experts, device="cpu")
    monkeypatch.setattr(expert_speed, "measure_experts", on_the_cpu)
    monkeypatch.setattr(decode_bandwidth, "measure_copy", lambda _: {"gb_per_s": 1.0})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    made = []

    def make_launcher(*_):
        made.append(PlayedLauncher(wrong_runs if not made else ()))
        return made[-1]

    def timer(queue_work, repeats):
        queue_work()
        return [1.0] * repeats

    monkeypatch.setattr(launchers, "CudaLauncher", make_launcher)
    monkeypatch.setattr(kernel_parts, "milliseconds", timer)
    found = Findings()

    kernel_parts.experts(found, PartOptions(Path("not used"), 3600))

    assert found.failures == [f"{QUANTISED.name}: {fault}" for fault in faults]
    assert [launcher.ways for launcher in made] == [[("",)], [()]]
    assert len(found.values["experts"]) == 1


@pytest.mark.wide
def test_what_is_measured_is_built_ahead():
    names = {variant.name for variant in needed_variants()}
    needed = {
        "route_experts_e128_c8",
        "route_experts_e8_c2",
        "quantized_experts_q4_1_bfloat16_m32",
        "dense_experts_gated_bfloat16_m16_n32",
        "add_experts_bfloat16_c2",
        "quantized_experts_mxfp4_bfloat16_m8_gated_clamped_biased",
        "quantized_experts_fp8_g128_bfloat16_m32_gated",
        "route_experts_e128_c8_sigmoid_corrected",
        "route_experts_e64_c6_corrected",
    }
    assert needed <= names
    assert len({shape.name for shape in SHAPES}) == len(SHAPES) == 22
