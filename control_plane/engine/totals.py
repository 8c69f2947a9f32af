"""The numbers of several engines as if they were one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, cast

from control_plane.core.kv_interface import MemoryStats
from control_plane.telemetry import EngineMetrics

_Many = Sequence[EngineMetrics]


def _mean_by(name: str, weight: str) -> Callable[[_Many], float]:
    """Return what makes the mean of a field, weighted by another."""

    def mean(many: _Many) -> float:
        total = sum(getattr(one, weight) for one in many)
        weighted = sum(getattr(one, name) * getattr(one, weight) for one in many)
        return float(weighted / total) if total else 0.0

    return mean


_RULES: dict[str, Callable[[_Many], float]] = {
    "average_latency_s": _mean_by("average_latency_s", "completed_requests"),
    "plane_step_s": _mean_by("plane_step_s", "num_steps"),
    "plane_idle_share": _mean_by("plane_idle_share", "num_steps"),
    "plane_queue_s": _mean_by("plane_queue_s", "num_steps"),
    "last_step_age_s": lambda many: max(one.last_step_age_s for one in many),
    "scheduling_delay_p99_s": lambda many: max(one.scheduling_delay_p99_s for one in many),
}
"""What is not a sum. `memory_utilization` follows from the memory itself."""


def total_metrics(many: _Many, memory: MemoryStats) -> EngineMetrics:
    """Add up the counts of at least one engine; `memory`: the total of their pools."""
    if len(many) == 1:
        return many[0]
    values = {
        field.name: (
            _RULES[field.name](many)
            if field.name in _RULES
            else sum(getattr(one, field.name) for one in many)
        )
        for field in fields(EngineMetrics)
    }
    values["memory_utilization"] = memory.utilization
    return EngineMetrics(**cast("dict[str, Any]", values))  # a field has its own number type


def total_memory(pools: Sequence[tuple[MemoryStats, int]], block_size: int) -> MemoryStats:
    """Add up pools and their block sizes, in blocks of `block_size` tokens.

    Where a pool has blocks of another size, its share is rounded down.
    """
    if len(pools) == 1:
        return pools[0][0]

    def total(name: str) -> int:
        return sum(int(getattr(stats, name)) * size // block_size for stats, size in pools)

    used = [(stats.internal_fragmentation, stats.used_blocks * size) for stats, size in pools]
    all_used = sum(tokens for _, tokens in used)
    return MemoryStats(
        total_blocks=total("total_blocks"),
        used_blocks=total("used_blocks"),
        free_blocks=total("free_blocks"),
        num_sequences=sum(stats.num_sequences for stats, _ in pools),
        cached_blocks=total("cached_blocks"),
        internal_fragmentation=(
            sum(share * tokens for share, tokens in used) / all_used if all_used else 0.0
        ),
        total_host_blocks=total("total_host_blocks"),
        used_host_blocks=total("used_host_blocks"),
    )
