"""Which device a plane computes on, and the one line where that is not to be had."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from structlog.testing import capture_logs

from compute_plane import __main__ as entry
from compute_plane import device
from compute_plane.app import ComputePlane
from compute_plane.config import ComputePlaneConfig
from compute_plane.cuda import devices
from compute_plane.device import DeviceDescription, Placement, choose_placement
from compute_plane.errors import DeviceUnavailableError
from compute_plane.executor.registry import BuiltExecutor, ExecutorContext, build_executor
from compute_plane.executor.simulated import SPEC, SimulatedExecutor
from planes.errors import ConfigError
from planes.extras import the_extra

DRIVER_OF_ALL = "libc.so.6"
"""A library that is there, in the place of the CUDA driver."""


class Machine:
    """A machine with a CUDA driver and so many devices."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self.has(2)

    def has(self, num_devices: int) -> None:
        reason = None if num_devices else "torch finds no CUDA device"
        self._patch.setattr(device, "CUDA_DRIVER", DRIVER_OF_ALL)
        self._patch.setattr(devices, "why_no_cuda", lambda: reason)
        self._patch.setattr(devices, "num_devices", lambda: num_devices)

    def has_no_driver(self) -> None:
        self._patch.setattr(device, "CUDA_DRIVER", "libcuda-of-another-machine.so.1")

    def has_no_torch(self) -> None:
        self._patch.setitem(sys.modules, "torch", None)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def placed(**settings: object) -> Placement:
    return choose_placement(ComputePlaneConfig(**settings))  # type: ignore[arg-type]


def refusal(**settings: object) -> str:
    with pytest.raises(DeviceUnavailableError) as info:
        placed(**settings)
    assert info.value.field == "device"
    assert "\n" not in info.value.message
    return info.value.message


def test_auto_is_a_cuda_device_where_one_can_be_used_else_the_processor(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert placed() == Placement("cuda", "cuda", "auto")
    assert placed(executor="cuda") == Placement("cuda", "cuda", "auto")
    assert placed(executor="cpu") == Placement("cpu", "cpu", "auto")
    assert placed(device="cpu") == Placement("cpu", "cpu", "auto")
    machine.has(0)
    assert placed() == Placement("cpu", "cpu", "auto")
    assert "although there is a CUDA driver" in capsys.readouterr().out
    machine.has_no_driver()
    assert placed() == Placement("cpu", "cpu", "auto")
    assert capsys.readouterr().out == ""


def test_a_limit_of_a_gpu_that_is_not_used_is_said_to_have_no_effect() -> None:
    with capture_logs() as logs:
        choose_placement(ComputePlaneConfig(device="cpu", gpu_memory_limit=1.0))
    assert [line["event"] for line in logs] == [
        "gpu_memory_limit has no effect: the model runs on the processor"
    ]


def test_where_there_is_no_driver_torch_is_not_even_looked_for(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.has_no_driver()
    monkeypatch.setitem(sys.modules, "compute_plane.cuda.devices", None)
    assert placed().device == "cpu"
    assert "no CUDA driver (libcuda-of-another-machine.so.1)" in refusal(device="cuda")


def test_a_device_by_its_number_must_be_one_of_those_there_are(machine: Machine) -> None:
    assert placed(device="cuda:1") == Placement("cuda", "cuda:1", "auto")
    assert refusal(device="cuda:2") == (
        "device: this machine has 2 CUDA devices from cuda:0 on, got cuda:2"
    )
    machine.has(1)
    assert placed(device="cuda:0").device == "cuda:0"
    assert refusal(device="cuda:1") == "device: this machine has 1 CUDA device, cuda:0, got cuda:1"
    assert refusal(device="cuda:1", executor="cuda")


@pytest.mark.parametrize(
    "settings", [{"device": "cuda"}, {"device": "cuda:1"}, {"executor": "cuda"}]
)
def test_cuda_without_a_device_is_refused_with_the_way_out(
    machine: Machine, settings: dict[str, str]
) -> None:
    machine.has(0)
    line = refusal(**settings)
    assert "torch finds no CUDA device" in line
    assert line.endswith("--device cpu computes on the processor")


def test_without_torch_the_extra_to_install_is_named(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.has_no_torch()
    assert the_extra("cuda") in refusal(device="cuda")
    assert placed() == Placement("cpu", "cpu", "auto")
    assert the_extra("cuda") in capsys.readouterr().out


def test_a_torch_that_cannot_be_imported_is_said_with_its_reason(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert machine
    monkeypatch.setitem(sys.modules, "compute_plane.cuda.devices", None)
    assert f"{the_extra('cuda')}: import of compute_plane.cuda" in refusal(device="cuda")


def test_an_executor_of_ones_own_is_told_the_device_and_never_to_fill_it(
    machine: Machine, tmp_path: Path
) -> None:
    assert machine
    found = placed(executor="mine:make", device="cuda:1")
    assert (found.device, found.pool_device) == ("cuda:1", "cpu")
    wants = ExecutorContext(
        spec=SPEC, model=None, block_size=4, num_blocks=6, dtype="auto", kv_cache_dtype="auto",
        instruction_set="auto", device="cuda:1", max_tokens=64, num_threads=1,
        kernel_cache=tmp_path, fills_memory=True,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="os:getcwd must be told a number") as info:
        build_executor("os:getcwd", wants)
    assert info.value.field == "max_num_blocks"


@pytest.mark.parametrize("flag", ["--device=cuda", "--device=cuda:3", "--executor=cuda"])
def test_a_compute_plane_for_cuda_without_a_device_ends_in_one_line(
    machine: Machine, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    machine.has_no_driver()
    assert entry.main([flag, "--listen=unix:/nowhere"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("compute_plane: device: cuda")


class SizedPlane:
    """Builds an executor that has chosen its pool itself, and remembers what it was told."""

    def build(self, name: str, context: ExecutorContext) -> BuiltExecutor:
        self.context = context
        executor = SimulatedExecutor(num_blocks=77, block_size=context.block_size)
        return BuiltExecutor(
            name, executor, "simulated/test", kv_pool_bytes=700, weights_bytes=900, num_blocks=77,
            num_host_blocks=5, device=device.DeviceDescription("cuda", "a GPU", "9.0", 1 << 33, 2),
        )  # fmt: skip


def test_the_start_says_and_describes_the_device_its_memory_and_the_pools(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sized = SizedPlane()
    config = ComputePlaneConfig(
        executor="simulated", listen=f"unix:{tmp_path}/p.sock", max_slots=11,
        gpu_memory_utilization=0.25, max_num_blocks="auto",
    )  # fmt: skip
    plane = ComputePlane(config, build=sized.build)
    assert sized.context.fills_memory
    assert (sized.context.max_slots, sized.context.gpu_memory_utilization) == (11, 0.25)
    logged = capsys.readouterr().out
    for words in (
        "device='a GPU'", "capability=9.0", f"total_memory_bytes={1 << 33}", "weights_bytes=900",
        "kv_pool_bytes=700", "num_blocks=77", "num_host_blocks=5",
    ):  # fmt: skip
        assert words in logged
    described = plane._servicer.Describe(None, None)
    assert (described.num_blocks, described.num_host_blocks) == (77, 5)
    assert described.device.name == "a GPU"
    assert described.device.capability == "9.0"
    assert described.device.total_memory_bytes == 1 << 33
    assert (described.device.kv_pool_bytes, described.device.weights_bytes) == (700, 900)


@pytest.mark.parametrize(
    ("built_with", "reason"), [(None, "is built without CUDA"), ("13.0", "finds no CUDA device")]
)
def test_why_there_is_no_device_is_one_line_and_no_warning(
    monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
    built_with: str | None,
    reason: str,
) -> None:
    def is_available() -> bool:
        warnings.warn("CUDA initialization: the driver is too old", stacklevel=1)
        return False

    monkeypatch.setattr(torch.version, "cuda", built_with)
    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    found = devices.why_no_cuda()
    assert found is not None
    assert reason in found
    assert not recwarn.list
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert (devices.why_no_cuda() is None) == (built_with is not None)


def test_a_device_is_described_by_what_it_says_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    said = SimpleNamespace(name="NVIDIA H100", major=9, minor=0, total_memory=85 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: said)
    found = devices.describe_cuda(torch.device("cuda", 1), 8)
    assert found == DeviceDescription("cuda", "NVIDIA H100", "9.0", 85 << 30, 8)
