"""Every operation becomes an object file that loads without Numba, on every instruction set.

On sets that this machine cannot run, too, of another kind of processor among them: a symbol that is
not there would end the process.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from compute_plane.config import ComputePlaneConfig
from kernels.cpu.instruction_set import INSTRUCTION_SETS

TIMEOUT_S = 1200
WITH_TILES = [
    "attention.attention_bfloat16",
    "float_products.gated_product_q4_1",
    "float_products.product_bf16_rows",
    "int8_products.product_q4_1",
]
"""All parts that only AMX has are in one of these."""
FOR_ARM = ["int8_products.product_q4_1", "rope_write.rope_angles", "step.work"]
"""A set's own instruction, constants in memory, calls of the C library."""
IN_ALL_SETS = 46
"""Operations, with a product for every format of weights among them."""


def loaded(
    name: str, root: Path, *operations: str, without_numba: bool = False
) -> tuple[Path, list[str]]:
    """Load operations in a process of its own; return where their files are, and their names."""
    program = "import sys, runpy\n" + "sys.modules['numba'] = None\n" * without_numba
    program += "runpy.run_module('tests.kernels.cpu.object_files', run_name='__main__')\n"
    done = subprocess.run(
        [sys.executable, "-c", program, name, str(root), *operations],
        capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    directory, *names = done.stdout.splitlines()
    return Path(directory), names


@pytest.mark.parametrize(
    ("name", "operations"),
    [("neon", FOR_ARM), pytest.param("amx", WITH_TILES, marks=pytest.mark.wide)],
)
def test_operations_load_without_the_compiler_that_made_them(
    name: str, operations: list[str]
) -> None:
    # Where all tests keep theirs: compiled once for the sources as they are.
    root = ComputePlaneConfig().kernel_cache_root
    directory, names = loaded(name, root, *operations)
    assert sorted(names) == operations
    assert {f"{operation}.o" for operation in operations} <= {p.name for p in directory.iterdir()}
    assert sorted(loaded(name, root, *operations, without_numba=True)[1]) == operations


@pytest.mark.slow
@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_all_operations_of_a_set_load_without_the_compiler_that_made_them(
    name: str, tmp_path: Path
) -> None:
    directory, names = loaded(name, tmp_path)
    assert len(names) >= IN_ALL_SETS
    assert loaded(name, tmp_path, without_numba=True)[1] == names
    assert {f"{name}.o" for name in names} <= {path.name for path in directory.iterdir()}
