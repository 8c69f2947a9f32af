from __future__ import annotations

import subprocess
import sys

import pytest

from compute_plane.memory.program_pages import code_ranges

MAPS = """\
7f0000000000-7f0000100000 r--p 00000000 08:01 42   /opt/a b/libcompiler.so.20
7f0000100000-7f0000500000 r-xp 00100000 08:01 42   /opt/a b/libcompiler.so.20
7f0000500000-7f0000600000 rw-p 00500000 08:01 42   /opt/a b/libcompiler.so.20
7f0000600000-7f0000700000 r-xp 00000000 08:01 43   /opt/libcompiler/other.so
7f0000700000-7f0000800000 r-xp 00000000 00:00 0
"""


def test_only_code_of_the_library_that_cannot_be_written_is_found():
    assert code_ranges("libcompiler", MAPS) == [(0x7F0000100000, 0x7F0000500000)]


@pytest.mark.wide
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_a_compiler_whose_code_was_given_back_still_compiles():
    program = """
import re, numba
from compute_plane.memory.program_pages import forget_code
def resident():
    text = open("/proc/self/smaps").read()
    found = re.findall(r" r-xp [^\\n]*libllvmlite.*?\\nRss: +(\\d+) kB", text, re.S)
    return sum(map(int, found))
assert numba.njit(lambda x: x + 1)(1) == 2
before = resident()
assert forget_code("libllvmlite") > 0
assert resident() < before / 4, (resident(), before)
assert numba.njit(lambda x: x * 3)(2) == 6
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
