from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from compute_plane.memory.huge_pages import HUGE_PAGE_BYTES, huge_page_array
from planes.errors import MemoryError as OutOfMemoryError


@pytest.mark.parametrize("num_bytes", [0, 1, 4096, HUGE_PAGE_BYTES, HUGE_PAGE_BYTES + 1])
def test_memory_is_aligned_zeroed_writable_and_of_the_size_asked_for(num_bytes):
    memory = huge_page_array(num_bytes, purpose="a test")
    assert memory.nbytes == num_bytes
    assert memory.dtype == np.uint8
    assert not memory.any()
    memory[:] = 255
    if num_bytes:
        assert memory.ctypes.data % HUGE_PAGE_BYTES == 0
        assert memory[-1] == 255


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_memory_that_nobody_touched_costs_nothing_and_is_freed_with_its_last_view():
    before = resident_bytes()
    memory = huge_page_array(1 << 30, purpose="a test")
    view = memory[1 << 29 :][: 64 << 20].view(np.float32)
    assert resident_bytes() - before < 16 << 20
    del memory
    view[:] = 1
    assert resident_bytes() - before > 48 << 20
    assert view[-1] == 1
    del view
    assert resident_bytes() - before < 16 << 20


def test_what_the_system_does_not_give_is_refused_in_one_line():
    with pytest.raises(OutOfMemoryError, match="1152921504606846976 bytes for a test are not"):
        huge_page_array(1 << 60, purpose="a test")
