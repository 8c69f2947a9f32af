"""What products with dense weights move and do, counted from their PTX and machine code: no times.

Counted on whole panels and tiles, with a panel to spare in the block.
"""

from __future__ import annotations

import re

import pytest

from bench.gpu.cases.dense_matmul import draw_case
from kernels.cuda import dense_matmul
from kernels.cuda.quantized_formats import TILE_INPUTS
from tests.kernels.cuda.compiled import kept_link, run_compiled, text_of
from tests.ptx import Meter
from tests.ptx.launcher import read_program
from tests.ptx.loops import machine_loop, traffic_of

SECTOR = 32
PANELS, TILES = 3, 9

# A multiprocessor of an H200 is fed 2 KB in 98 cycles (4.8 TB/s, 132 of them, 1.75 GHz), in which
# its schedulers issue 394 instructions. What goes with 2 KB of weights should take two thirds of
# that at most: nothing else of a step gets in the memory's way then.
MOST_FOR_2_KB = 262

SPREAD = dense_matmul.variants(every=False)
LOOPS = [
    *SPREAD,
    *(
        pytest.param(variant, marks=pytest.mark.slow)
        for variant in dense_matmul.variants(every=True)
        if variant not in SPREAD
    ),
]
OF_ONE_MATRIX = [
    *(variant for variant in SPREAD if not variant.of_experts),
    *(
        pytest.param(variant, marks=pytest.mark.slow)
        for variant in dense_matmul.variants(every=True)
        if variant not in SPREAD and not variant.of_experts
    ),
]


@pytest.mark.spread(2)
@pytest.mark.parametrize("variant", OF_ONE_MATRIX, ids=lambda variant: variant.name)
def test_weights_are_read_once_in_whole_sectors_and_no_banks_are_in_conflict(variant):
    num_outputs = PANELS * variant.panel_outputs
    case = draw_case(variant, variant.columns, num_outputs, TILES, 1, alone=0)
    meter = Meter()
    run_compiled(case, meters={variant.name: meter})
    program = read_program(text_of(variant))

    vector = re.compile(r"ld\.global(\.nc)?(\.L[12]::\w+)*\.v4\.")  # not so what is added to
    loads = {i for i, one in enumerate(program.instructions) if vector.match(one.opcode)}
    read = traffic_of(program, meter, "global", loads)
    # Of W every row; of x and the norm's weight all for each panel, and nothing for the spare one.
    rows = PANELS * (variant.panel_rows + variant.columns + variant.normalises)
    assert read.units == read.least == rows * TILES * TILE_INPUTS * 2 // SECTOR
    in_shared = traffic_of(program, meter, "shared", None)
    assert in_shared.units == in_shared.least > 0


@pytest.mark.spread(1)
@pytest.mark.parametrize("variant", LOOPS, ids=lambda variant: variant.name)
def test_the_loop_leaves_the_memory_time(variant):
    cubin, _ = kept_link(variant.name, text_of(variant), (9, 0))
    loop = machine_loop(cubin, "sm_90")
    if loop is None:
        pytest.skip("no disassembler")
    kilobytes = variant.ring * variant.panel_rows * TILE_INPUTS * 2 / 2**10

    assert loop["HMMA"] == variant.ring * 2 * variant.panel_tiles * variant.columns // 8
    assert loop.total() / kilobytes * 2 <= MOST_FOR_2_KB
