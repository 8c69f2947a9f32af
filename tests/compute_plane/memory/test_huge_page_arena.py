from __future__ import annotations

from compute_plane.memory.huge_pages import HugePageArena


def test_arrays_of_an_arena_are_zero_aligned_and_apart():
    arena = HugePageArena("a test")
    sizes = [
        1,
        64,
        65,
        100_000,
        0,
        7,
        HugePageArena.REGION_BYTES,
        3,
        HugePageArena.REGION_BYTES + 1,
    ]
    arrays = [arena.take(size) for size in sizes]
    for number, (array, size) in enumerate(zip(arrays, sizes, strict=True)):
        assert len(array) == size
        assert array.ctypes.data % HugePageArena.ALIGNMENT == 0
        assert not array[:1000].any()
        array[:1000] = number + 1
        array[-1000:] = number + 1
    for number, array in enumerate(arrays):
        assert (array[:1000] == number + 1).all()
        assert (array[-1000:] == number + 1).all()


def test_small_arrays_share_one_region():
    arena = HugePageArena("a test")
    first, second = arena.take(1000), arena.take(1000)
    assert second.ctypes.data - first.ctypes.data == 1024
