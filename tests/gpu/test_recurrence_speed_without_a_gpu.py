"""The measurement of layers with states, with the simulator in the place of the device."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from bench.gpu import decode_bandwidth, recurrence_parts, recurrence_speed, small_launches
from bench.gpu.findings import Findings, PartOptions
from bench.gpu.needed_kernels import needed_variants
from bench.gpu.recurrence_speed import SHAPES, RecurrenceShape, measure_recurrence
from bench.gpu.small_launches import COPIES, CopyShape, SmallShape, measure_copies, measure_launch
from compute_plane.cuda import launchers
from compute_plane.model.delta_net import DeltaNet
from compute_plane.model.mamba2 import Mamba2
from compute_plane.model.short_convolution import ShortConvolution
from tests.compute_plane.cuda.simulated_launcher import SimulatedLauncher

FIRST = frozenset({0})
DELTA_NET = RecurrenceShape("a", "qwen35", DeltaNet(1, 4, 32, 32, 2, FIRST), 2)
MAMBA2 = RecurrenceShape("b", "nemotron_h", Mamba2(8, 32, 32, 2, 1e-5, FIRST, num_groups=2), 2)
CONVOLUTION = RecurrenceShape("c", "lfm2", ShortConvolution(64, 3, FIRST), 1, 3)


class Timer:
    """Runs what is timed once. `launched`: names of what that launched."""

    def __init__(self, launcher: SimulatedLauncher) -> None:
        self._launcher = launcher
        self.launched: list[str] = []

    def __call__(self, queue_work, repeats):
        before = len(self._launcher.launched)
        queue_work()
        self.launched = [name for name, _ in self._launcher.launched[before:]]
        return [1.0] * repeats


@pytest.fixture
def _few(monkeypatch):
    monkeypatch.setattr(recurrence_speed, "LAYERS", (2, 2))
    monkeypatch.setattr(recurrence_speed, "ROUNDS", 1)
    torch.manual_seed(1)


KERNELS = {
    "a": ["short_convolution_bfloat16_k32_v32_w2", "delta_rule_bfloat16_k32_v32_w2_normed"],
    "b": ["mamba2_inputs_bfloat16_w2", "selective_scan_p32_n32", "gated_row_norm_bfloat16_i128"],
    "c": ["gated_convolution_bfloat16_w3"],
}
BYTES = {
    # States twice, projections, results, weights: a layer.
    "a": 2 * 2 * 4 * (192 + 4 * 1024) + 2 * 2 * (328 + 128) + 4 * (2 * 192 + 4 + 4 + 32),
    "b": 2 * 2 * 4 * (384 + 8 * 1024) + 2 * 2 * (648 + 256) + 4 * (3 * 384 + 3 * 8 + 256),
    "c": 2 * 4 * 2 * 64 + 3 * 2 * (192 + 64) + 4 * 3 * 64,
}


@pytest.mark.spread(1)
@pytest.mark.usefixtures("_few")
@pytest.mark.parametrize("shape", [CONVOLUTION, DELTA_NET, MAMBA2], ids=lambda shape: shape.name)
def test_a_measurement_goes_through_layers_one_behind_the_other(shape):
    launcher, late = SimulatedLauncher(), SimulatedLauncher()
    timer = Timer(launcher)

    result = measure_recurrence(shape, launcher, timer, late=late, device="cpu")

    assert result["faults"] == []
    assert timer.launched == KERNELS[shape.model] * 2
    assert [name for name, _ in late.launched] == timer.launched
    assert result["layers"] == 2
    assert result["bytes"] == 2 * BYTES[shape.model]
    assert result["microseconds"] == 500
    tokens = shape.num_rows * shape.num_tokens
    assert result["microseconds_per_token"] == 500 / tokens


def test_there_are_as_many_layers_as_have_states_for_the_working_set():
    layers = {shape.name: shape.num_layers for shape in SHAPES}
    assert layers["Qwen3.5 4B, 64 × 1 tokens"] == 4
    assert layers["Qwen3.5 4B, 8 × 1 tokens"] == 31
    assert layers["LFM2 1.2B, 1 × 1 tokens"] == 128
    assert layers["Nemotron Nano 9B v2, 1 × 2048 tokens"] == 4
    assert len(layers) == len(SHAPES) == 16


class PlayedLauncher(SimulatedLauncher):
    """Runs no kernel; the launch of some number changes a bit of a state."""

    def __init__(self, wrong_launches: tuple[int, ...]) -> None:
        super().__init__()
        self.ways: list[tuple[str, ...]] = []
        self._wrong_launches = wrong_launches
        self._num_launches = 0

    def prepare(self, variants):
        super().prepare(variants)
        self.ways.append(launchers.BEGINS_EARLY)

    def launch(self, variant, _grid, *arguments):
        if variant.name.startswith("gated_convolution"):
            self._num_launches += 1
            arguments[0].zero_()
            if self._num_launches in self._wrong_launches:
                arguments[6].view(torch.int32)[0, 0] ^= 1


def timer(queue_work, repeats):
    queue_work()
    return [1.0] * repeats


# The first visit is timed, each has two layers.
@pytest.mark.parametrize(
    ("wrong_launches", "faults"),
    [
        ((), []),
        ((4,), ["1 of 2 runs of launches that begin early gave other bits than launches in turn"]),
    ],
)
def test_the_part_measures_everything_and_states_must_be_those_of_launches_in_turn(
    wrong_launches, faults, monkeypatch
):
    monkeypatch.setattr(recurrence_speed, "LAYERS", (2, 2))
    monkeypatch.setattr(recurrence_speed, "ROUNDS", 2)
    monkeypatch.setattr(recurrence_speed, "SHAPES", [CONVOLUTION])
    monkeypatch.setattr(small_launches, "SHAPES", [SmallShape("relu2", 3)])
    monkeypatch.setattr(small_launches, "COPIES", [CopyShape(2)])
    for name in ("measure_recurrence", "measure_launch", "measure_copies"):
        measure = functools.partial(getattr(recurrence_parts, name), device="cpu")
        monkeypatch.setattr(recurrence_parts, name, measure)
    monkeypatch.setattr(small_launches, "NUM_LAYERS", 1)
    monkeypatch.setattr(decode_bandwidth, "measure_copy", lambda _: {"gb_per_s": 1.0})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(recurrence_parts, "milliseconds", timer)
    made: list[PlayedLauncher] = []

    def make_launcher(*_):
        made.append(PlayedLauncher(wrong_launches if not made else ()))
        return made[-1]

    monkeypatch.setattr(launchers, "CudaLauncher", make_launcher)
    found = Findings()

    recurrence_parts.recurrences(found, PartOptions(Path("not used"), 3600))

    assert found.failures == [f"{CONVOLUTION.name}: {fault}" for fault in faults]
    assert [launcher.ways for launcher in made] == [[("",)] * 2, [()]]
    assert [one["shape"] for one in found.values["recurrences"]] == [CONVOLUTION.name]
    small = [one["shape"] for one in found.values["small_launches"]]
    assert small == ["relu2, 3 rows", "copies of states, 2"]


@pytest.mark.spread(1)
@pytest.mark.parametrize("what", small_launches.VARIANTS)
def test_a_small_launch_is_one_that_a_kernel_takes(what, monkeypatch):
    monkeypatch.setattr(small_launches, "LAUNCHES", 1)
    launcher = SimulatedLauncher()
    shape = SmallShape(what, 2)

    result = measure_launch(shape, launcher, timer, device="cpu")

    assert [name for name, _ in launcher.launched] == [shape.variant.name]
    assert result["microseconds"] == 1000
    per_token = {"relu2": 4 * 15680, "joint_norms": 4 * 8192, "latent_write": 6400 + 256}
    weights = {"relu2": 0, "joint_norms": 2 * 8192, "latent_write": 1024}
    assert result["bytes"] == 2 * per_token[what] + weights[what]


def test_copies_of_states_move_their_bytes_twice(monkeypatch):
    monkeypatch.setattr(small_launches, "NUM_LAYERS", 1)
    result = measure_copies(CopyShape(2), timer, device="cpu")
    assert result["bytes"] == 2 * 4 * SHAPES[0].sizes.state_floats
    assert result["microseconds"] == 500
    assert [shape.num_copies for shape in COPIES] == [1, 8]


def test_what_is_measured_is_built_ahead():
    names = {variant.name for variant in needed_variants()}
    needed = {
        "delta_rule_bfloat16_k128_v128_w4_normed", "selective_scan_p80_n128",
        "gated_row_norm_bfloat16_i3072", "gated_convolution_bfloat16_w3",
        "latent_write_bfloat16_r512_p64_b16", "joint_norms_bfloat16_q4096_k4096",
    }  # fmt: skip
    assert needed <= names
