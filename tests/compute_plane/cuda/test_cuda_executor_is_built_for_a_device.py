"""What is put together for a CUDA device; the device itself is played."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compute_plane.cuda import cuda_driver, devices, launchers
from compute_plane.device import DeviceDescription
from compute_plane.errors import DeviceUnavailableError
from compute_plane.executor.registry import ExecutorContext, build_executor
from kernels.cuda import build
from kernels.cuda.errors import CompileError
from kernels.cuda.rms_norm import RmsNormVariant
from planes.errors import ConfigError
from tests.compute_plane.cuda.simulated_launcher import SimulatedLauncher
from tests.compute_plane.cuda.torch_executors import RecordingDriver, tiny_model
from tests.compute_plane.executor.tiny_llama import tiny_spec

SPEC = replace(tiny_spec(), head_dim=64)


def context(tmp_path: Path, **changes: object) -> ExecutorContext:
    plain = ExecutorContext(
        spec=SPEC, model=tiny_model(SPEC), block_size=16,
        num_blocks=10, dtype="bfloat16", kv_cache_dtype="auto", instruction_set="auto",
        device="cuda", max_tokens=64, num_threads=1, kernel_cache=tmp_path, max_rows=3,
    )  # fmt: skip
    return replace(plain, **changes)  # type: ignore[arg-type]


class PlayedDevice:
    """A driver and a launcher in the places of those of a CUDA device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.driver = RecordingDriver()
        self.launcher = SimulatedLauncher(runs=False)
        self.free_bytes = 1 << 30
        self.description = DeviceDescription("cuda", "played", "sm_90", 1 << 30, 1)
        monkeypatch.setattr(devices, "require_cuda", lambda: None)
        monkeypatch.setattr(devices, "describe_cuda", lambda *_: self.description)
        monkeypatch.setattr(cuda_driver, "CudaDriver", lambda _: self.driver)
        monkeypatch.setattr(launchers, "CudaLauncher", lambda *_: self.launcher)
        monkeypatch.setattr(RecordingDriver, "free_bytes", lambda _: self.free_bytes)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> PlayedDevice:
    return PlayedDevice(monkeypatch)


def test_kernels_are_prepared_and_decode_steps_captured(
    tmp_path: Path, device: PlayedDevice
) -> None:
    built = build_executor("cuda", context(tmp_path))
    assert built.device is device.description
    assert built.numerics_id.startswith("cuda/kernels/")
    assert built.executor.graphs.captured == (1, 2, 4)  # type: ignore[attr-defined]
    assert {name for name, _ in device.launcher.launched} <= set(device.launcher.prepared)


def test_no_cuda_graph_captures_none(tmp_path: Path, device: PlayedDevice) -> None:
    built = build_executor("cuda", context(tmp_path, uses_graphs=False))
    assert built.executor.graphs.captured == ()  # type: ignore[attr-defined]
    assert "capture" not in device.driver.calls


def test_graphs_keep_to_a_tenth_of_the_memory_that_is_left(
    tmp_path: Path, device: PlayedDevice
) -> None:
    device.driver.bytes_of_capture = [120 << 20, 90 << 20, 10 << 20]
    built = build_executor("cuda", context(tmp_path))
    assert built.executor.graphs.captured == (1, 2)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_blocks": 1 << 20}, "max_num_blocks"),  # in the device's memory
        ({"swap_bytes": 1 << 60}, "swap_space"),  # in the host's
        ({"block_size": 8}, "block_size"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype"),
    ],
)
def test_what_a_device_cannot_hold_or_run_is_refused_by_field(
    tmp_path: Path, device: PlayedDevice, changes: dict[str, object], field: str
) -> None:
    assert device.free_bytes
    with pytest.raises(ConfigError) as info:
        build_executor("cuda", context(tmp_path, **changes))
    assert info.value.field == field


def test_a_kernel_that_cannot_be_built_is_named_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Properties:
        multi_processor_count, major, minor = 132, 9, 0

    def fail(*_: object, **__: object) -> bytes:
        raise CompileError("the linker refused it")

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    monkeypatch.setattr(build, "build", fail)
    launcher = launchers.CudaLauncher(torch.device("cpu"), tmp_path)
    with pytest.raises(DeviceUnavailableError, match="rms_norm_float32_e24: the linker refused"):
        launcher.prepare([RmsNormVariant("float32", 24, adds_residual=False)])
