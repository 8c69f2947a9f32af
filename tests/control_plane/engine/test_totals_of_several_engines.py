from __future__ import annotations

import dataclasses

from control_plane.core.kv_interface import MemoryStats
from control_plane.engine.totals import total_memory, total_metrics
from control_plane.telemetry import EngineMetrics

POOL = MemoryStats(total_blocks=10, used_blocks=4, free_blocks=6, num_sequences=2, cached_blocks=1)
NO_SUMS = {
    "memory_utilization", "average_latency_s", "plane_step_s", "plane_idle_share",
    "last_step_age_s", "scheduling_delay_p99_s", "plane_queue_s",
}  # fmt: skip


def test_the_numbers_of_one_engine_are_its_own():
    metrics = EngineMetrics(total_requests=3, average_latency_s=1.5, memory_utilization=0.1)
    assert total_metrics([metrics], POOL) is metrics
    assert total_memory([(POOL, 16)], 16) is POOL


def test_counts_are_added_and_shares_and_times_are_not():
    names = [field.name for field in dataclasses.fields(EngineMetrics)]
    many = [EngineMetrics(**dict.fromkeys(names, 1)), EngineMetrics(**dict.fromkeys(names, 3))]
    total = total_metrics(many, POOL)
    for name in set(names) - NO_SUMS:
        assert getattr(total, name) == 4, name
    assert total.memory_utilization == 0.4
    assert total.average_latency_s == 2.5  # three of the four requests took 3 s
    assert total.last_step_age_s == 3


def test_pools_of_unlike_blocks_are_counted_in_blocks_of_one_size():
    larger = dataclasses.replace(POOL, internal_fragmentation=0.3)
    total = total_memory([(POOL, 16), (larger, 32)], 16)
    assert (total.total_blocks, total.used_blocks, total.free_blocks) == (30, 12, 18)
    assert total.num_sequences == 4
    assert abs(total.internal_fragmentation - 0.2) < 1e-9
    assert total.utilization == 0.4
