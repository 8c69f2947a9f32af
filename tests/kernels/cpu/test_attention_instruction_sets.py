from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kernels.cpu.instruction_set import supported_sets
from kernels.cpu.kv_layout import VALUE_BYTES
from tests.amx.sets import sets_that_run
from tests.kernels.cpu import attention_driver

ROUNDING_SETS = ("amx", "zen4", "avx512_bf16")
"""Sets that round queries and weights to bfloat16, each in its own order."""


def digests_of(name: str, *dtypes: str) -> dict[str, tuple[str, float]]:
    """Run in a process of its own: a process compiles for one set only."""
    root = Path(attention_driver.__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.cpu.attention_driver", name, *dtypes],
        capture_output=True,
        text=True,
        check=False,
        cwd=root,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.slow
def test_float32_has_the_same_bits_here_and_on_an_old_instruction_set() -> None:
    names = [s.name for s in supported_sets()]
    old = "avx2" if "avx2" in names else names[-1]
    assert digests_of(old, "float32") == attention_driver.digests(["float32"])


@pytest.mark.slow
def test_every_instruction_set_gives_the_same_bits_but_for_rounding_to_bfloat16() -> None:
    names = [s.name for s in sets_that_run()]
    dtypes = tuple(VALUE_BYTES)
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda name: digests_of(name, *dtypes), names)
        results = dict(zip(names, found, strict=True))
    for dtype in dtypes:
        sets = [n for n in names if dtype == "float32" or n not in ROUNDING_SETS]
        assert len({results[n][dtype][0] for n in sets}) == 1, dtype
        for name in names:
            bound = 4e-6 if name in sets else 2e-2
            assert results[name][dtype][1] < bound, (name, dtype)
