"""What is put together for a CUDA device; the device itself is played."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from compute_plane.cuda import build as executor_build
from compute_plane.cuda import cuda_driver, devices, launchers
from compute_plane.cuda.cuda_driver import CudaDriver, PinnedMemory
from compute_plane.device import DeviceDescription
from compute_plane.errors import DeviceUnavailableError
from compute_plane.executor.registry import ExecutorContext, build_executor
from kernels.cuda import build
from kernels.cuda.embedding import EmbeddingVariant
from kernels.cuda.errors import CompileError
from kernels.cuda.rms_norm import RmsNormVariant
from planes.errors import ConfigError
from planes.errors import MemoryError as OutOfMemoryError
from tests.compute_plane.cuda.played_cuda import played_cuda
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
        self.driver = RecordingDriver(memory=1 << 30)
        self.launcher = SimulatedLauncher(runs=False)
        self.description = DeviceDescription("cuda", "played", "9.0", 1 << 30, 1)
        self.asked_for: list[str] = []
        monkeypatch.setattr(executor_build, "require_cuda", self.asked_for.append)
        monkeypatch.setattr(devices, "describe_cuda", lambda *_: self.description)
        monkeypatch.setattr(cuda_driver, "CudaDriver", lambda *_: self.driver)
        monkeypatch.setattr(launchers, "CudaLauncher", lambda *_: self.launcher)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> PlayedDevice:
    return PlayedDevice(monkeypatch)


def test_kernels_are_prepared_and_decode_steps_captured(
    tmp_path: Path, device: PlayedDevice
) -> None:
    built = build_executor("cuda", context(tmp_path, device="cuda:3"))
    assert device.asked_for == ["cuda:3"]
    assert built.device is device.description
    assert built.numerics_id.startswith("cuda/kernels/")
    assert built.numerics_id.endswith("/graphs-1-2-4")  # a padded step may have other bits
    assert built.executor.graphs.captured == (1, 2, 4)  # type: ignore[attr-defined]
    assert {name for name, _ in device.launcher.launched} <= set(device.launcher.prepared)


@pytest.mark.parametrize("kv_dtype", ["int8", "float8"])
def test_kernels_for_a_pool_of_eight_bits_are_prepared_captured_and_launched(
    tmp_path: Path, device: PlayedDevice, kv_dtype: str
) -> None:
    built = build_executor("cuda", context(tmp_path, kv_cache_dtype=kv_dtype))
    assert f"/kv-{kv_dtype}-16/" in built.numerics_id
    assert built.executor.graphs.captured == (1, 2, 4)  # type: ignore[attr-defined]
    of_blocks = ("rope_write_kv_", "attention_decode_", "attention_prefill_")
    reading = {name for name in device.launcher.prepared if name.startswith(of_blocks)}
    assert len(reading) == 3
    assert all(name.endswith(f"_kv_{kv_dtype}") for name in reading)
    launched = {name for name, _ in device.launcher.launched}
    assert reading <= launched <= set(device.launcher.prepared)


def test_no_cuda_graph_captures_none(tmp_path: Path, device: PlayedDevice) -> None:
    built = build_executor("cuda", context(tmp_path, uses_graphs=False))
    assert built.executor.graphs.captured == ()  # type: ignore[attr-defined]
    assert built.numerics_id.endswith("/graphs-none")
    assert "capture" not in device.driver.calls


def test_graphs_keep_to_a_tenth_of_the_memory_that_pool_and_graphs_may_take(
    tmp_path: Path, device: PlayedDevice
) -> None:
    device.driver.bytes_of_capture = [120 << 20, 90 << 20, 2 << 20]
    built = build_executor("cuda", context(tmp_path))
    assert built.executor.graphs.captured == (1, 2)  # type: ignore[attr-defined]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_blocks": 1 << 20}, "max_num_blocks"),  # in the device's memory
        ({"swap_bytes": 1 << 60}, "swap_space"),  # in the host's
        ({"block_size": 8}, "block_size"),
        ({"kv_cache_dtype": "float16"}, "kv_cache_dtype"),
        ({"kv_cache_dtype": "int8", "dtype": "float32"}, "kv_cache_dtype"),
        ({"kv_cache_dtype": "float8", "dtype": "float32"}, "kv_cache_dtype"),
    ],
)
def test_what_a_device_cannot_hold_or_run_is_refused_by_field(
    tmp_path: Path, changes: dict[str, object], field: str
) -> None:
    with pytest.raises(ConfigError) as info:
        build_executor("cuda", context(tmp_path, **changes))
    assert info.value.field == field


def test_weights_must_fit_into_what_is_free_on_the_device(
    tmp_path: Path, device: PlayedDevice
) -> None:
    device.driver.memory = 1000
    with pytest.raises(ConfigError, match="weights need") as info:
        build_executor("cuda", context(tmp_path))
    assert info.value.field == "model"


@pytest.mark.usefixtures("device")
def test_running_out_of_memory_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    monkeypatch.setattr(executor_build, "build_on", fail)
    with pytest.raises(DeviceUnavailableError) as info:
        build_executor("cuda", context(tmp_path, device="cuda:1"))
    assert info.value.message.startswith("device: cuda:1 ran out of memory")
    assert info.value.message.endswith("CUDA out of memory. Tried to allocate")


def test_the_pool_of_swapped_blocks_is_memory_that_the_device_copies_by_itself(
    tmp_path: Path, device: PlayedDevice
) -> None:
    built = build_executor("cuda", context(tmp_path, swap_bytes=3 << 20))
    assert built.num_host_blocks > 0
    assert built.num_host_blocks * built.kv_pool_bytes // 10 in device.driver.host_buffers


class PlayedRuntime:
    """CUDA's runtime, as far as it pins memory."""

    class cudaError:  # noqa: N801 - CUDA's name
        success = 0

    def __init__(self, status: int) -> None:
        self.status = status
        self.registered: list[tuple[int, int]] = []

    def cudaHostRegister(self, address: int, num_bytes: int, _: int) -> int:  # noqa: N802
        self.registered.append((address, num_bytes))
        return self.status

    def cudaGetErrorString(self, status: int) -> str:  # noqa: N802
        return f"error {status}"


def test_large_host_memory_is_pinned_as_it_is_without_being_rounded_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = PlayedRuntime(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    pinned = PinnedMemory()
    first, second = pinned.take(1000), pinned.take(3000)
    assert runtime.registered == [(first.data_ptr(), 1000), (second.data_ptr(), 3000)]
    assert (first.dtype, len(first)) == (torch.uint8, 1000)
    of_first = weakref.ref(first)
    del first
    assert of_first() is not None  # given back, it would be somebody else's that a device writes


def test_host_memory_that_cannot_be_pinned_is_an_error_with_its_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: PlayedRuntime(2))
    with pytest.raises(OutOfMemoryError, match=r"1000 bytes .*\(error 2\).* --swap-space"):
        PinnedMemory().take(1000)


class Properties:
    multi_processor_count, major, minor = 132, 9, 0


NORM = RmsNormVariant("float32", 24, adds_residual=False)


@pytest.mark.parametrize(
    ("where", "match"),
    [(build, "cuda: rms_norm_float32_e24: the linker refused"), (launchers, "cuda: the linker")],
)
def test_a_kernel_that_cannot_be_built_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: ModuleType, match: str
) -> None:
    def fail(*_: object, **__: object) -> bytes:
        raise CompileError("the linker refused it")

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    monkeypatch.setattr(where, "build" if where is build else "build_ahead", fail)
    launcher = launchers.CudaLauncher(torch.device("cpu"), tmp_path)
    with pytest.raises(DeviceUnavailableError, match=f"^device: {match}") as info:
        launcher.prepare([NORM])
    assert info.value.field == "device"


def test_kernels_are_loaded_before_they_are_launched_and_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []

    class Kernel:
        def __init__(self, variant: object, image: bytes, **_: object) -> None:
            calls.append((variant, image))

        def launch(self, *arguments: object) -> None:
            calls.append(arguments)

    def compiled(_: object, capability: tuple[int, int], *__: object, **___: object) -> bytes:
        return bytes(capability)

    streams = iter((70, 71))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    monkeypatch.setattr(launchers, "current_stream", lambda _: next(streams))
    monkeypatch.setattr(launchers, "build_ahead", lambda *_, **__: None)
    monkeypatch.setattr(launchers, "LoadedKernel", Kernel)
    monkeypatch.setattr(build, "build", compiled)
    launcher = launchers.CudaLauncher(torch.device("cpu"), tmp_path)
    launcher.prepare([NORM, NORM])
    given = torch.zeros(3)
    for _ in range(2):  # a capture has another stream
        launcher.launch(NORM, (1, 2, 3), given[1:], 5, 0.5)
    of_launch = given.data_ptr() + 4, 5, 0.5
    assert calls == [(NORM, b"\x09\x00"), *(((1, 2, 3), at, *of_launch) for at in (70, 71))]


def test_recorded_launches_are_queued_again_on_the_stream_that_is_current_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []

    class Kernel:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def launch(self, grid: object, stream: int, *values: object) -> None:
            calls.append((grid, stream, values))

        def bind(self, grid: object, *values: object) -> SimpleNamespace:
            return SimpleNamespace(launch=lambda stream: self.launch(grid, stream, *values))

    streams = iter((70, 71, 72, 73))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    monkeypatch.setattr(launchers, "current_stream", lambda _: next(streams))
    monkeypatch.setattr(launchers, "build_ahead", lambda *_, **__: None)
    monkeypatch.setattr(launchers, "LoadedKernel", Kernel)
    monkeypatch.setattr(build, "build", lambda *_, **__: b"")
    launcher = launchers.CudaLauncher(torch.device("cpu"), tmp_path)
    given = torch.zeros(3)

    def work() -> None:
        launcher.launch(NORM, (1, 2, 3), given, 5)
        launcher.launch(NORM, (4, 5, 6), given, 7)

    again = launcher.record(work)
    first, second = ((1, 2, 3), (given.data_ptr(), 5)), ((4, 5, 6), (given.data_ptr(), 7))
    expected = [(first[0], 70, first[1]), (second[0], 71, second[1])]
    assert calls == expected
    again()
    assert calls[2:] == [(first[0], 72, first[1]), (second[0], 72, second[1])]
    launcher.launch(NORM, (9, 9, 9))
    again_later = len(calls)
    streams = iter((74,))
    again()
    assert len(calls) == again_later + 2  # what came later was not recorded


@pytest.mark.parametrize(
    ("which", "major", "expected"),
    [
        (("",), 9, [True, False]),
        (("attention", "rms_norm"), 9, [True, False]),
        (("attention",), 9, [False, False]),
        (("",), 8, [False, False]),
        ((), 9, [False, False]),
    ],
)
def test_kernels_that_wait_begin_early_where_devices_and_we_let_them(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    which: tuple[str, ...],
    major: int,
    expected: list[bool],
) -> None:
    loaded: list[bool] = []

    def load(*_: object, begins_early: bool) -> None:
        loaded.append(begins_early)

    device = SimpleNamespace(multi_processor_count=132, major=major, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    monkeypatch.setattr(build, "build", lambda *_, **__: b"")
    monkeypatch.setattr(launchers, "build_ahead", lambda *_, **__: None)
    monkeypatch.setattr(launchers, "LoadedKernel", load)
    monkeypatch.setattr(launchers, "BEGINS_EARLY", which)
    launcher = launchers.CudaLauncher(torch.device("cpu"), tmp_path)
    launcher.prepare([NORM, EmbeddingVariant("float32")])
    assert loaded == expected


def test_products_lose_nothing_that_their_dtype_has_whatever_torch_was_told() -> None:
    """Images set TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, which does what the first line does."""
    torch.set_float32_matmul_precision("high")
    with played_cuda():
        CudaDriver(torch.device("cpu"))
    assert torch.get_float32_matmul_precision() == "highest"
    products = torch.backends.cuda.matmul
    assert not products.allow_tf32
    assert not products.allow_bf16_reduced_precision_reduction
    assert not products.allow_fp16_reduced_precision_reduction
