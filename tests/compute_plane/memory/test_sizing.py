from __future__ import annotations

from pathlib import Path

import pytest

from compute_plane.memory.sizing import (
    available_memory_bytes,
    check_pools_fit,
    check_weights_fit,
)
from planes.errors import ConfigError


def test_a_pool_beyond_memory_is_refused_with_the_flag_and_both_numbers() -> None:
    assert check_pools_fit(10, 0, 1 << 20, 10 << 20) == 0
    assert check_pools_fit(10, 0, 1 << 20, None) == 0
    with pytest.raises(ConfigError, match=r"--max-num-blocks 11 needs 11 MiB .*at most 10") as info:
        check_pools_fit(11, 0, 1 << 20, 10 << 20)
    assert info.value.field == "max_num_blocks"


def test_a_host_pool_has_the_whole_blocks_that_fit_its_space_or_is_refused() -> None:
    assert check_pools_fit(4, (3 << 20) + 5, 1 << 20, 8 << 20) == 3
    with pytest.raises(ConfigError, match=r"--swap-space needs 5 MiB .* 4 MiB, .* 8 MiB") as info:
        check_pools_fit(4, 5 << 20, 1 << 20, 8 << 20)
    assert info.value.field == "swap_space"


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
