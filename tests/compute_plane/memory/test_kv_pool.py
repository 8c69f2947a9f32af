from __future__ import annotations

import numpy as np

from compute_plane.memory.kv_pool import KvPool
from kernels.cpu.kv_layout import KvLayout, PoolLayout


def test_a_pool_starts_zeroed_and_aligned_for_every_vector() -> None:
    layout = KvLayout("bfloat16", 2, 3, 4, 8)
    pool = KvPool(layout, 5)
    assert pool.data.shape == (5, layout.block_bytes)
    assert pool.address % 64 == 0
    assert layout.sub_block_bytes % 64 == 0
    assert (pool.num_blocks, pool.block_size) == (5, 4)
    assert pool.num_bytes == 5 * layout.block_bytes
    assert not pool.data.any()


def test_copying_a_block_copies_all_its_layers_and_touches_no_other() -> None:
    pool = KvPool(PoolLayout((KvLayout("int8", 2, 1, 16, 32),)), 4)
    pool.data[:] = np.random.default_rng(0).integers(0, 256, pool.data.shape, np.uint8)
    before = pool.data.copy()
    pool.copy_block(1, 3)
    np.testing.assert_array_equal(pool.data[3], before[1])
    np.testing.assert_array_equal(pool.data[:3], before[:3])
