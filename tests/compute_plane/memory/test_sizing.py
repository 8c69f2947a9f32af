from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compute_plane.memory.sizing import (
    MIB,
    SIZE_BITS,
    BlockDemand,
    Memory,
    PoolBudget,
    check_pools_fit,
    check_weights_fit,
    choose_num_blocks,
    host_memory,
    size_host_pool,
    size_in_host_memory,
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


def test_a_space_for_swapping_that_holds_no_block_is_refused() -> None:
    assert size_host_pool(0, MIB) == 0
    assert size_host_pool(MIB, MIB) == 1
    with pytest.raises(ConfigError, match=r"--swap-space is 1048575 bytes, .* 1048576") as info:
        size_host_pool(MIB - 1, MIB)
    assert info.value.field == "swap_space"
    with pytest.raises(ConfigError, match="--swap-space is 1 bytes"):
        check_pools_fit(4, 1, MIB, 8 << 20)
    with pytest.raises(ConfigError, match="--swap-space is 1 bytes"):
        size_in_host_memory(demand(), 1, MIB, utilization=0.9, memory=Memory(1000 * MIB, 800 * MIB))


def test_weights_beyond_memory_are_refused_with_both_numbers() -> None:
    check_weights_fit(1 << 20, 4 << 20)
    check_weights_fit(1 << 40, None)
    with pytest.raises(ConfigError, match=r"8 MiB, but only 7 MiB") as info:
        check_weights_fit(8 << 20, 7 << 20)
    assert info.value.field == "model"


def test_memory_is_that_of_the_system_or_the_control_group_whichever_leaves_less(
    tmp_path: Path,
) -> None:
    meminfo = tmp_path / "meminfo"
    limit, used, stat = (tmp_path / f"memory.{name}" for name in ("max", "current", "stat"))
    assert host_memory(meminfo, tmp_path) is None
    meminfo.write_text("MemTotal:  9000 kB\nMemAvailable:    2048 kB\n")
    assert host_memory(meminfo, tmp_path) == Memory(9000 * 1024, 2048 * 1024)
    limit.write_text("max\n")
    used.write_text("500\n")
    assert host_memory(meminfo, tmp_path) == Memory(9000 * 1024, 2048 * 1024)
    limit.write_text("1000\n")
    assert host_memory(meminfo, tmp_path) == Memory(1000, 500)
    stat.write_text("anon 90\nfile 400\ninactive_file 200\nactive_file 100\nshmem 100\n")
    assert host_memory(meminfo, tmp_path) == Memory(1000, 800)


def test_this_machine_says_how_much_memory_it_has() -> None:
    memory = host_memory()
    assert memory is not None
    assert 0 < memory.free_bytes < memory.total_bytes


def demand(wanted: int | None = None, **changes: int) -> BlockDemand:
    sizes = {"block_size": 16, "context_length": 4096, "max_slots": 1000, **changes}
    return BlockDemand.of(wanted, **sizes)


def budget(pool_mib: int) -> PoolBudget:
    return PoolBudget(
        limit_bytes=(100 + pool_mib) * MIB, used_bytes=90 * MIB, aside_bytes=10 * MIB,
        words="the numbers",
    )  # fmt: skip


def test_a_pool_has_as_many_blocks_as_its_part_of_the_memory_holds() -> None:
    assert budget(300).pool_bytes == 300 * MIB
    assert choose_num_blocks(demand(), budget(300), MIB) == 300
    assert choose_num_blocks(demand(), budget(511), MIB) == 511
    assert choose_num_blocks(demand(299), budget(300), MIB) == 299
    assert choose_num_blocks(demand(300), budget(300), MIB) == 300


@settings(max_examples=200, deadline=None)
@given(st.integers(128, 1 << 24))
def test_a_pool_that_sizes_itself_loses_little_to_come_out_the_same_again(fits: int) -> None:
    plenty = demand(max_slots=1 << 30)
    found = choose_num_blocks(plenty, budget(fits), MIB)
    assert fits * (1 - 1 / 256) <= found <= fits
    assert found.bit_count() <= SIZE_BITS


def test_a_pool_is_not_larger_than_all_slots_could_ever_fill() -> None:
    few = demand(max_slots=2)
    assert choose_num_blocks(few, budget(300), MIB // 8) == 2 * 4096 // 16
    assert choose_num_blocks(demand(1000, max_slots=2), budget(1000), MIB) == 1000


def test_a_number_of_blocks_that_does_not_fit_is_refused_with_the_largest_that_does() -> None:
    with pytest.raises(
        ConfigError, match=r"--max-num-blocks 301 needs 301 MiB .* 300 blocks fit \(the numbers\)"
    ) as info:
        choose_num_blocks(demand(301), budget(300), MIB)
    assert info.value.field == "max_num_blocks"


@pytest.mark.parametrize(("context_length", "least"), [(4096, 128), (100, 7)])
def test_a_pool_that_cannot_hold_one_sequence_is_refused(context_length: int, least: int) -> None:
    wants = demand(context_length=context_length)
    assert choose_num_blocks(wants, budget(least), MIB) == least
    with pytest.raises(
        ConfigError, match=f"{least - 1} blocks .* needs {least}: the numbers"
    ) as info:
        choose_num_blocks(wants, budget(least - 1), MIB)
    assert info.value.field == "max_num_blocks"
    # A number that was asked for may be smaller.
    assert choose_num_blocks(demand(1, context_length=context_length), budget(1), MIB) == 1


def test_nothing_is_left_where_more_is_taken_than_may_be() -> None:
    overdrawn = PoolBudget(limit_bytes=5, used_bytes=7, aside_bytes=0, words="the numbers")
    assert overdrawn.pool_bytes == 0


def test_in_host_memory_the_share_less_what_is_taken_and_swapped_to_is_the_pools() -> None:
    memory = Memory(1000 * MIB, 800 * MIB)

    def size(wanted: int | None, utilization: float = 0.5) -> tuple[int, int]:
        return size_in_host_memory(
            demand(wanted), 20 * MIB, MIB, utilization=utilization, memory=memory
        )

    assert size(None) == (280, 20)  # 500 − 200 taken − 20 for the host pool
    assert size(None, 1.0) == (780 - 780 % 2, 20)
    assert size(780) == (780, 20)  # a number may take all there is
    with pytest.raises(ConfigError, match="--swap-space needs"):
        size(781)
    with pytest.raises(ConfigError, match=r"of 1000 MiB a share of 0\.2 .*200 MiB are taken"):
        size(None, 0.2)
    with pytest.raises(ConfigError, match="does not say"):
        size_in_host_memory(demand(), 0, MIB, utilization=0.9, memory=None)
