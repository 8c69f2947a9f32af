"""The mark of tests of what only the instruction set `amx` has."""

from __future__ import annotations

import pytest

from kernels.cpu.instruction_set import selected_instruction_set

NO_TILES = "no tiles in this process: tests/amx/test_the_set_amx_runs.py starts one that has them"
needs_tiles = pytest.mark.skipif(not selected_instruction_set().has_amx, reason=NO_TILES)
