"""Loading and launching, against a driver that writes down what it is asked."""

from __future__ import annotations

import ctypes
import struct
from enum import IntEnum
from types import SimpleNamespace

import pytest

from kernels.cuda.attention_decode import DecodeVariant
from kernels.cuda.errors import DriverError
from kernels.cuda.launch import LoadedKernel

VARIANT = DecodeVariant("bfloat16", 64, 3, 16)
ARGUMENTS = (16, 32, 48, 64, 80, 96, 112, 5, 0.5, 192, 8, 4096, 0, 1024, 0, 16, 2.5)


def grid_of(num_rows, num_kv_heads):
    return VARIANT.plan_of(num_rows, num_kv_heads, 100).grid


class Status(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2


class RecordingDriver:
    """Answers like `cuda.bindings.driver` and keeps the calls; `refuses` names the one to fail."""

    CUfunction_attribute = SimpleNamespace(
        CU_FUNC_ATTRIBUTE_NUM_REGS=40,
        CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES=1024,
        CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES=0,
        CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK=128,
    )

    CUlaunchConfig = SimpleNamespace
    CUlaunchAttributeID = SimpleNamespace(
        CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION="early"
    )

    def CUlaunchAttribute(self):  # noqa: N802 - the driver's names
        return SimpleNamespace(id=None, value=SimpleNamespace())

    def __init__(self, refuses: str | None = None) -> None:
        self.calls: list[tuple] = []
        self._refuses = refuses

    def _answer(self, name, arguments, *results):
        self.calls.append((name, *arguments))
        if name == self._refuses:
            return (Status.CUDA_ERROR_OUT_OF_MEMORY, *(None for _ in results))
        return (Status.CUDA_SUCCESS, *results)

    def cuModuleLoadData(self, image):  # noqa: N802 - the driver's names
        return self._answer("cuModuleLoadData", (image,), "module")

    def cuModuleGetFunction(self, module, name):  # noqa: N802
        return self._answer("cuModuleGetFunction", (module, name), "function")

    def cuFuncGetAttribute(self, attribute, function):  # noqa: N802
        return self._answer("cuFuncGetAttribute", (attribute, function), attribute)

    def cuLaunchKernel(self, *arguments):  # noqa: N802
        return self._answer("cuLaunchKernel", arguments)

    def cuLaunchKernelEx(self, config, *arguments):  # noqa: N802
        return self._answer("cuLaunchKernelEx", (SimpleNamespace(**vars(config)), *arguments))


def packed(parameters):
    """The arguments that a launch passes."""
    numbers = (ctypes.c_int32, ctypes.c_float, *[ctypes.c_int64] * 5, ctypes.c_int32)
    types = (*[ctypes.c_void_p] * 7, *numbers, ctypes.c_void_p, ctypes.c_float)
    addresses = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))
    return [kind.from_address(addresses[i]).value for i, kind in enumerate(types)]


def test_an_image_is_loaded_and_its_function_found_by_the_variants_name():
    driver = RecordingDriver()

    LoadedKernel(VARIANT, b"image", driver=driver)

    assert driver.calls == [
        ("cuModuleLoadData", b"image\0"),
        ("cuModuleGetFunction", "module", VARIANT.name.encode()),
    ]


def test_a_launch_passes_grid_threads_stream_and_typed_arguments():
    driver = RecordingDriver()
    kernel = LoadedKernel(VARIANT, b"image", driver=driver)

    kernel.launch(grid_of(7, 2), 99, *ARGUMENTS)

    name, function, *rest = driver.calls[-1]
    assert (name, function) == ("cuLaunchKernel", "function")
    *geometry, parameters, extra = rest
    assert geometry == [2, 1, 7, VARIANT.threads, 1, 1, 0, 99]
    assert packed(parameters) == list(ARGUMENTS)
    assert extra == 0


def test_a_launch_that_begins_early_says_so_and_passes_the_same():
    driver = RecordingDriver()
    usual = LoadedKernel(VARIANT, b"image", driver=driver)
    early = LoadedKernel(VARIANT, b"image", begins_early=True, driver=driver)

    for stream, num_rows in ((99, 7), (98, 3)):
        usual.launch(grid_of(num_rows, 2), stream, *ARGUMENTS)
        *geometry, expected, _ = driver.calls[-1][2:]
        early.launch(grid_of(num_rows, 2), stream, *ARGUMENTS)
        name, config, function, parameters, extra = driver.calls[-1]

        assert (name, function, extra) == ("cuLaunchKernelEx", "function", 0)
        assert [config.gridDimX, config.gridDimY, config.gridDimZ] == geometry[:3]
        assert [config.blockDimX, config.blockDimY, config.blockDimZ] == geometry[3:6]
        assert (config.hStream, config.numAttrs) == (stream, 1)
        (attribute,) = config.attrs
        assert attribute.id == "early"
        assert attribute.value.programmaticStreamSerializationAllowed == 1
        assert packed(parameters) == packed(expected)


@pytest.mark.parametrize("begins_early", [False, True])
def test_a_bound_launch_passes_what_it_was_bound_to_whatever_was_launched_since(begins_early):
    driver = RecordingDriver()
    kernel = LoadedKernel(VARIANT, b"image", begins_early=begins_early, driver=driver)
    kernel.launch(grid_of(7, 2), 99, *ARGUMENTS)
    *expected, parameters, _ = driver.calls[-1]
    before = packed(parameters)

    bound = kernel.bind(grid_of(7, 2), *ARGUMENTS)
    kernel.launch(grid_of(3, 1), 98, *(0 for _ in ARGUMENTS))
    for _ in range(2):
        bound.launch(99)
        *passed, parameters, _ = driver.calls[-1]
        assert passed == expected
        assert packed(parameters) == before
    with pytest.raises(TypeError, match="takes 17 arguments, got 1"):
        kernel.bind(grid_of(7, 2), 16)


def test_an_empty_grid_launches_nothing():
    driver = RecordingDriver()
    kernel = LoadedKernel(VARIANT, b"image", driver=driver)
    before = len(driver.calls)

    kernel.launch(grid_of(0, 2), 0, *ARGUMENTS)

    assert len(driver.calls) == before


def test_a_missing_argument_is_refused_before_the_driver_sees_it():
    kernel = LoadedKernel(VARIANT, b"image", driver=RecordingDriver())

    with pytest.raises(TypeError, match="takes 17 arguments, got 16"):
        kernel.launch(grid_of(1, 1), 0, *ARGUMENTS[:-1])


def test_an_argument_that_its_parameter_cannot_hold_is_refused_before_the_driver_sees_it():
    driver = RecordingDriver()
    kernel = LoadedKernel(VARIANT, b"image", driver=driver)
    before = len(driver.calls)

    for argument, wrong in ((0, -16), (0, 1 << 64), (9, 192.5)):
        arguments = [*ARGUMENTS[:argument], wrong, *ARGUMENTS[argument + 1 :]]
        with pytest.raises(struct.error):
            kernel.launch(grid_of(1, 1), 0, *arguments)

    assert len(driver.calls) == before


@pytest.mark.parametrize(
    "call",
    [
        "cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernel", "cuLaunchKernelEx",
        "cuFuncGetAttribute",
    ],
)  # fmt: skip
def test_a_refusal_of_the_driver_is_typed_and_names_call_and_status(call):
    def load_launch_and_ask():
        driver, is_early = RecordingDriver(refuses=call), call == "cuLaunchKernelEx"
        kernel = LoadedKernel(VARIANT, b"image", begins_early=is_early, driver=driver)
        kernel.launch(grid_of(1, 1), 0, *ARGUMENTS)
        kernel.attributes()

    with pytest.raises(DriverError, match=f"^{call} failed: CUDA_ERROR_OUT_OF_MEMORY$"):
        load_launch_and_ask()


def test_the_driver_tells_what_a_kernel_uses():
    kernel = LoadedKernel(VARIANT, b"image", driver=RecordingDriver())

    assert kernel.attributes() == {
        "registers": 40, "shared_bytes": 1024, "local_bytes": 0, "max_threads": 128,
    }  # fmt: skip


def test_a_machine_without_a_driver_says_so_in_one_error():
    class Absent(RecordingDriver):
        def cuModuleLoadData(self, image):  # noqa: N802, ARG002
            raise RuntimeError("libcuda.so.1 not found")

    with pytest.raises(DriverError, match=r"no CUDA driver: libcuda\.so\.1 not found"):
        LoadedKernel(VARIANT, b"image", driver=Absent())
