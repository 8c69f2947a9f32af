from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from compute_plane.memory.kv_pool import KvPool
from compute_plane.memory.sizing import (
    available_memory_bytes,
    check_pool_fits,
    check_weights_fit,
    kv_block_bytes,
)
from planes.errors import ConfigError


@dataclass
class Shape:
    num_layers: int = 30
    num_kv_heads: int = 3
    head_dim: int = 64


def small_pool(num_blocks: int = 4) -> KvPool:
    return KvPool(num_blocks=num_blocks, num_layers=2, num_kv_heads=3, block_size=4, head_dim=8)


def test_a_pool_has_the_documented_shape_and_starts_zeroed() -> None:
    pool = small_pool()
    assert pool.data.shape == (4, 2, 2, 3, 4, 8)
    assert pool.data.flags.c_contiguous
    assert (pool.num_blocks, pool.block_size) == (4, 4)
    assert not pool.data.any()


def test_copying_a_block_copies_all_its_layers_and_touches_no_other() -> None:
    pool = small_pool()
    pool.data[:] = np.random.default_rng(0).standard_normal(pool.data.shape)
    before = pool.data.copy()
    pool.copy_block(1, 3)
    np.testing.assert_array_equal(pool.data[3], before[1])
    np.testing.assert_array_equal(pool.data[:3], before[:3])


def test_a_block_has_the_bytes_that_sizing_says() -> None:
    pool = KvPool(num_blocks=5, num_layers=30, num_kv_heads=3, block_size=16, head_dim=64)
    assert kv_block_bytes(Shape(), 16) * 5 == pool.num_bytes


def test_a_large_pool_costs_nothing_until_it_is_written() -> None:
    def resident_bytes() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * 4096

    before = resident_bytes()
    pool = KvPool(num_blocks=1024, num_layers=30, num_kv_heads=3, block_size=16, head_dim=64)
    assert pool.num_bytes > 700 << 20
    assert resident_bytes() - before < 50 << 20


def test_a_pool_beyond_memory_is_refused_with_the_flag_and_both_numbers() -> None:
    check_pool_fits(10, 1 << 20, 10 << 20)
    check_pool_fits(10, 1 << 20, None)
    with pytest.raises(ConfigError, match=r"--max-num-blocks 11 needs 11 MiB .*at most 10") as info:
        check_pool_fits(11, 1 << 20, 10 << 20)
    assert info.value.field == "max_num_blocks"


def test_weights_beyond_memory_are_refused_with_both_numbers() -> None:
    check_weights_fit(1 << 20, 4 << 20)
    check_weights_fit(1 << 40, None)
    with pytest.raises(ConfigError, match=r"8 MiB, but only 7 MiB") as info:
        check_weights_fit(8 << 20, 7 << 20)
    assert info.value.field == "model"


def test_available_memory_is_the_smaller_of_the_system_and_the_control_group(
    tmp_path: Path,
) -> None:
    meminfo = tmp_path / "meminfo"
    limit, used, stat = (tmp_path / f"memory.{name}" for name in ("max", "current", "stat"))
    assert available_memory_bytes(meminfo, tmp_path) is None
    meminfo.write_text("MemTotal:  9 kB\nMemAvailable:    2048 kB\n")
    assert available_memory_bytes(meminfo, tmp_path) == 2048 * 1024
    limit.write_text("max\n")
    used.write_text("500\n")
    assert available_memory_bytes(meminfo, tmp_path) == 2048 * 1024
    limit.write_text("1000\n")
    assert available_memory_bytes(meminfo, tmp_path) == 500
    stat.write_text("anon 90\nfile 400\ninactive_file 200\nactive_file 100\nshmem 100\n")
    assert available_memory_bytes(meminfo, tmp_path) == 800
