from __future__ import annotations

from pathlib import Path

import pytest

from compute_plane.memory.sizing import (
    available_memory_bytes,
    check_pool_fits,
    check_weights_fit,
)
from planes.errors import ConfigError


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
