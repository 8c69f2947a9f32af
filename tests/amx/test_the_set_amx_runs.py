"""Operations of the instruction set `amx` compute what they must, on machines without tiles too.

Their tests are those of the operations. A process compiles for one set only: here they run again in
one that has chosen `amx` (`tests.amx.plugin`).
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu.instruction_set import selected_instruction_set
from tests.amx.marks import NO_TILES
from tests.amx.sets import missing

pytestmark = [
    pytest.mark.skipif(selected_instruction_set().has_amx, reason="they ran in this process"),
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 7000
HANG_S = 1800
"""A test of a whole model takes minutes."""
WITHOUT = ["-p", "no:cacheprovider", "-p", "no:anyio", "-p", "no:schemathesis"]
TILES = [
    "tests/amx",
    "tests/kernels/cpu/test_gated_products.py",
    "tests/kernels/cpu/test_unpacked_products.py",
]
"""Tests of what no other set has."""
SHARED = [
    "tests/kernels/cpu/test_float_products.py",
    "tests/kernels/cpu/test_int8_products.py",
    "tests/kernels/cpu/test_attention_operation.py",
]
"""Tests of what every set has, and this one makes of tiles."""
WALKS = "test_workers_that_walk_forwards_and_backwards_get_the_same_bits"
ATTENTION = "test_attention_is_that_of_the_reference_on_what_the_pool_holds"
SIDE_BY_SIDE = "test_row_blocks_of_an_item_have_the_bits_of_one"
FIRST_OF_SHARED = [
    f"{SHARED[0]}::test_products_equal_float64_within_rounding",
    f"{SHARED[0]}::test_nothing_behind_the_last_row_or_weight_is_read",
    f"{SHARED[1]}::test_a_product_is_that_of_the_decoded_numbers",
    *(f"{SHARED[1]}::{WALKS}[{case}]" for case in ("64-10-Q4_0", "160-37-Q4_1", "224-10-Q8_0")),
    *(
        f"{SHARED[2]}::{ATTENTION}[{case}]"
        for case in ("9-3-64-16-bfloat16", "6-2-40-8-bfloat16", "8-2-80-24-int8", "4-4-32-1-float8")
    ),
    *(f"{SHARED[2]}::{SIDE_BY_SIDE}[bfloat16-{case}]" for case in ("64-3-0-0-1", "128-3-0-0-30")),
]
"""Enough of them for `make test`."""
MODELS = "tests/properties/test_cpu_results_do_not_depend_on_the_batch.py"


def check(*arguments: str) -> None:
    """Run tests on the set; all must pass, and none may miss the tiles."""
    options = [*WITHOUT, "-o", f"faulthandler_timeout={HANG_S}"]
    command = [sys.executable, "-m", "pytest", *arguments, "-p", "tests.amx.plugin", *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert NO_TILES not in done.stdout
    # Each product of tiles was computed with them.
    assert re.search(r"[1-9]\d* TDPBF16PS, [1-9]\d* TDPBSSD", done.stdout)


def test_all_products_and_attention_are_right() -> None:
    check("-m", "not slow and not wide", *TILES, *FIRST_OF_SHARED)


@pytest.mark.slow
def test_all_that_is_made_of_tiles_is_right_in_every_way() -> None:
    check(*TILES, *SHARED)


@pytest.mark.slow
def test_what_is_compiled_for_a_processor_with_tiles_is_right() -> None:
    check("-p", "tests.amx.sapphire_rapids", "-m", "not slow", *TILES, *FIRST_OF_SHARED)


@pytest.mark.slow
def test_models_keep_their_promises_with_tiles() -> None:
    check("-m", "not slow", MODELS)
