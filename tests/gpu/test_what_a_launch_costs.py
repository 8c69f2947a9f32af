"""The counter that shows what early launches save: it assembles, and how it is launched."""

from __future__ import annotations

import ctypes
import types

import pytest

from bench.gpu.launch_costs import (
    COUNT_PTX,
    LEAST_CAPABILITY,
    counter_launcher,
    say_costs,
)
from kernels.cuda import build
from kernels.cuda.disassembly import count_instructions, find_disassembler
from kernels.cuda.errors import DriverError

PLACE, STREAM = 0x7F00_0000, 0x55


class Attribute:
    def __init__(self) -> None:
        self.id = None
        self.value = types.SimpleNamespace(programmaticStreamSerializationAllowed=0)


class RecordingDriver:
    """Takes the calls of a launch down; its configurations are plain objects."""

    CUlaunchConfig = types.SimpleNamespace
    CUlaunchAttribute = Attribute
    CUlaunchAttributeID = types.SimpleNamespace(
        CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION="early"
    )

    def __init__(self, refuses: str | None = None) -> None:
        self.refuses = refuses
        self.launches = []

    def _status(self, name: str) -> object:
        return types.SimpleNamespace(name="CUDA_ERROR_NO") if name == self.refuses else 0

    def cuModuleLoadData(self, image: bytes):  # noqa: N802 - the driver's name
        assert image == COUNT_PTX.encode() + b"\0"
        return self._status("cuModuleLoadData"), "module"

    def cuModuleGetFunction(self, module, name: bytes):  # noqa: N802 - the driver's name
        assert (module, name) == ("module", b"count")
        return self._status("cuModuleGetFunction"), "function"

    def cuLaunchKernelEx(self, config, function, parameters, extra):  # noqa: N802 - the driver's
        assert (function, extra) == ("function", 0)
        address = ctypes.c_void_p.from_address(parameters).value
        argument = ctypes.c_uint64.from_address(address).value
        attributes = getattr(config, "attrs", [])
        early = [a.value.programmaticStreamSerializationAllowed for a in attributes]
        self.launches.append((config.hStream, config.blockDimX, argument, early))
        return (self._status("cuLaunchKernelEx"),)


def test_a_counter_is_launched_early_only_if_it_is_to_be():
    for is_early, attributes in ((False, []), (True, [1])):
        driver = RecordingDriver()
        launch = counter_launcher(PLACE, is_early, driver=driver)
        launch(STREAM)
        launch(STREAM)
        assert driver.launches == [(STREAM, 32, PLACE, attributes)] * 2


@pytest.mark.parametrize("call", ["cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernelEx"])
def test_what_the_driver_refuses_is_an_error_of_that_call(call):
    with pytest.raises(DriverError, match=f"{call}.*CUDA_ERROR_NO"):
        counter_launcher(PLACE, True, driver=RecordingDriver(call))(STREAM)


def test_the_counter_waits_for_what_is_before_it_in_its_machine_code():
    try:
        build.require_toolchain()
    except build.MissingToolchainError as error:
        pytest.skip(str(error))
    cubin, usage = build.link("count", COUNT_PTX, LEAST_CAPABILITY)
    assert usage.registers < 32
    if find_disassembler() is None:
        pytest.skip("no nvdisasm")
    (counts,) = count_instructions([cubin], build.architecture(LEAST_CAPABILITY))
    assert counts["ACQBULK"] == 1  # the wait
    assert counts["PREEXIT"] == 1  # the next may be launched


def test_the_line_says_what_there_is():
    costs = {"graph_us": 1.25, "stream_us": 4, "spinning_wait_us": 500, "blocking_wait_us": 520}
    assert "early" not in say_costs(costs)
    line = say_costs({**costs, "counter_us": 1.5, "early_counter_us": 0.75})
    assert "1.25 µs in a graph (0.75 for 1.50 if launched early)" in line
