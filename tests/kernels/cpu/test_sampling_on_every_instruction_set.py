"""What is sampled is the same on every instruction set, to the bit of every log-probability."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu.instruction_set import supported_sets

sys.path.insert(0, str(Path(__file__).parent))
from sampling_digest import digest

SCRIPT = Path(__file__).parent / "sampling_digest.py"
SETS = [chosen.name for chosen in supported_sets()]


def digest_on(instruction_set: str) -> str:
    """Run in a process of its own: a process compiles for one set only."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), instruction_set],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("instruction_set", SETS)
def test_every_instruction_set_gives_the_same_bits(instruction_set: str) -> None:
    assert digest_on(instruction_set) == digest()


@pytest.mark.slow
def test_the_least_instruction_set_gives_the_same_bits() -> None:
    assert digest_on(SETS[-1]) == digest()
