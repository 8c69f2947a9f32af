"""The counter that shows what early launches save: it assembles and waits."""

from __future__ import annotations

import pytest

from bench.gpu.launch_costs import COUNT_PTX, COUNTER, say_costs
from kernels.cuda import build
from kernels.cuda.disassembly import count_instructions, find_disassembler
from kernels.cuda.fitted_ptx import EARLY_LAUNCHES


def test_the_counter_waits_for_what_is_before_it_in_its_machine_code():
    try:
        build.require_toolchain()
    except build.MissingToolchainError as error:
        pytest.skip(str(error))
    cubin, usage = build.link(COUNTER.name, COUNT_PTX, EARLY_LAUNCHES)
    assert usage.registers < 32
    if find_disassembler() is None:
        pytest.skip("no nvdisasm")
    (counts,) = count_instructions([cubin], build.architecture(EARLY_LAUNCHES))
    assert counts["ACQBULK"] == 1  # the wait
    assert counts["PREEXIT"] == 1  # the next may be launched


def test_the_line_says_what_there_is():
    costs = {"graph_us": 1.25, "stream_us": 4, "spinning_wait_us": 500, "blocking_wait_us": 520}
    assert "early" not in say_costs(costs)
    line = say_costs({**costs, "counter_us": 1.5, "early_counter_us": 0.75})
    assert "1.25 µs in a graph (0.75 for 1.50 if launched early)" in line
