"""What the manual forbids is a fault in software too, or a test would pass that must not."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from kernels.cpu.instruction_set import supported_sets
from tests.amx.marks import needs_tiles
from tests.amx.sets import AMX, missing
from tests.amx.test_tiles_do_what_the_manual_says import SMALLEST, Array, configuration

pytestmark = [needs_tiles, pytest.mark.skipif(missing() is not None, reason=str(missing()))]


@pytest.fixture
def registers() -> Iterator[object]:
    """The software's own functions; they are called as if an instruction was met."""
    from tests.amx import called_from_python
    from tests.amx.registers import threads_with_registers

    yield called_from_python
    called_from_python.release()
    assert threads_with_registers() == 0
    assert np.float32(SMALLEST) * np.float32(0.5) != 0  # a product leaves no trace in who calls it


def changed(index: int, value: int) -> Array:
    made = configuration(dict.fromkeys(range(8), (16, 64)))
    made[index] = value
    return made


@pytest.mark.parametrize(
    "made",
    [changed(0, 2), changed(1, 1), changed(3, 1), changed(33, 1), changed(57, 1), changed(48, 17),
     changed(50, 0), changed(16, 0), changed(16, 65), changed(17, 1)],
    ids=["palette", "first row", "reserved", "reserved columns", "reserved rows", "17 rows",
         "no rows", "no columns", "65 bytes", "320 bytes"],
)  # fmt: skip
def test_a_configuration_that_no_processor_takes_is_a_fault(registers, made: Array) -> None:
    assert registers.configure(made.ctypes.data) == registers.Fault.CONFIGURATION
    assert registers.registers_of_this_thread() == 0


def test_registers_that_are_not_configured_cannot_be_used(registers) -> None:
    memory = np.zeros((16, 64), np.uint8)
    assert registers.clear(registers.registers_of_this_thread(), 0) == registers.Fault.REGISTER
    made = configuration({0: (16, 64), 1: (16, 62)})
    assert registers.configure(made.ctypes.data) == registers.Fault.NONE
    at = registers.registers_of_this_thread()
    for number, fault in [(0, "NONE"), (1, "REGISTER"), (2, "REGISTER"), (9, "REGISTER")]:
        found = registers.move(at, number, memory.ctypes.data, 64, False)
        assert found == registers.Fault[fault]
    assert registers.multiply(at, 0, 2, 3, True) == registers.Fault.REGISTER


def test_a_product_needs_three_registers_whose_shapes_fit(registers) -> None:
    shapes = {0: (5, 64), 1: (5, 32), 2: (8, 64), 3: (4, 64), 4: (8, 60), 5: (9, 64)}
    registers.configure(configuration(shapes).ctypes.data)
    at = registers.registers_of_this_thread()
    for operands, fault in [
        ((0, 1, 2), "NONE"), ((0, 0, 2), "SAME"), ((0, 1, 1), "SAME"), ((2, 1, 2), "SAME"),
        ((3, 1, 2), "SHAPES"), ((0, 1, 4), "SHAPES"), ((0, 1, 5), "SHAPES"),
    ]:  # fmt: skip
        for is_bf16 in (False, True):
            assert registers.multiply(at, *operands, is_bf16) == registers.Fault[fault], operands


def test_a_configuration_makes_zeros_of_all_registers(registers) -> None:
    made, memory = configuration({0: (16, 64)}), np.full((16, 64), 7, np.uint8)
    registers.configure(made.ctypes.data)
    at = registers.registers_of_this_thread()
    registers.move(at, 0, memory.ctypes.data, 64, False)
    registers.configure(made.ctypes.data)
    registers.move(at, 0, memory.ctypes.data, 64, True)
    assert not memory.any()


FORBIDDEN = """
from tests.amx import sets
sets.choose("amx")
sets.stand_in()
from tests.amx.test_tiles_do_what_the_manual_says import cleared, of_product
made = of_product(16, 16, 16)
made[1] = 1
cleared.to_function(3)(made.ctypes.data, 0, 0)
"""


@pytest.mark.slow
def test_a_fault_ends_the_process_and_says_what_it_was() -> None:
    done = subprocess.run([sys.executable, "-c", FORBIDDEN], capture_output=True, text=True)
    if AMX in supported_sets():  # the processor itself refuses
        assert done.returncode == -signal.SIGSEGV
        return
    assert done.returncode == -signal.SIGILL
    assert "a configuration that no processor takes" in done.stderr
