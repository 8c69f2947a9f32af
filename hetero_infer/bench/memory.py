"""What paging gains: the same trace with static, dynamic and paged memory; and what planes hold."""

from __future__ import annotations

from typing import Any

from control_plane.core.interface import SchedulerConfig
from hetero_infer.bench.figures import ratio
from hetero_infer.bench.memory_contiguous import simulate_contiguous
from hetero_infer.bench.memory_paged import run_paged
from hetero_infer.bench.memory_trace import MemoryRun, TraceRequest, draw_trace, draw_uniform
from hetero_infer.bench.report import Result, Table
from hetero_infer.bench.resident import resident_memory
from hetero_infer.bench.settings import MemorySettings
from hetero_infer.config import EngineConfig
from planes.errors import ConfigError

MIB = 1 << 20


def run(config: EngineConfig, settings: MemorySettings) -> Result:
    """Simulate, then measure; raises EngineError."""
    config.validate()
    runs = compare(config, settings)
    data: dict[str, Any] = {
        "pool_tokens": _num_blocks(config) * config.block_size,
        "results": [run.to_object() for run in runs],
        "resident": None,
    }
    tables = [_trace_table(runs)]
    if settings.streams:
        held = resident_memory(
            config, settings.streams, settings.prompt_tokens, settings.output_tokens, settings.seed
        )
        data["resident"] = held
        tables.append(_resident_table(held))
    lengths = f"median {settings.prompt_tokens} + {settings.output_tokens} tokens"
    if settings.lengths == "uniform":
        lengths = (
            f"uniform in {settings.shortest} to {settings.longest} tokens, "
            f"{100 * settings.pairs:g} % with two samples"
        )
    subject = (
        f"{settings.requests} requests, {lengths}, max_model_len {config.max_model_len}, "
        f"pool of {data['pool_tokens']} tokens in blocks of {config.block_size}"
    )
    return Result(subject, data, tables)


def compare(config: EngineConfig, settings: MemorySettings) -> list[MemoryRun]:
    """Run one trace with each kind of memory."""
    limits = scheduler_config(config)
    trace = _draw(config, settings)
    pool_tokens = _num_blocks(config) * config.block_size
    return [
        simulate_contiguous(trace, pool_tokens, limits, grows=False),
        simulate_contiguous(trace, pool_tokens, limits, grows=True),
        run_paged(trace, _num_blocks(config), config.block_size, limits),
    ]


def _num_blocks(config: EngineConfig) -> int:
    """Return the blocks of the pool. Raises ConfigError where memory is to say how many."""
    if isinstance(config.max_num_blocks, str):
        raise ConfigError(
            "max_num_blocks: memory is simulated here, which needs a number of blocks, got "
            f"{config.max_num_blocks}",
            field="max_num_blocks",
        )
    return config.max_num_blocks


def _draw(config: EngineConfig, settings: MemorySettings) -> list[TraceRequest]:
    """Draw the trace. Raises ConfigError for lengths that no sequence can have."""
    if settings.lengths == "lognormal":
        return draw_trace(
            settings.requests,
            settings.prompt_tokens,
            settings.output_tokens,
            config.max_model_len,
            settings.seed,
        )
    shortest, longest = settings.shortest, settings.longest
    if not shortest <= longest <= config.max_model_len:
        raise ConfigError(
            f"shortest ({shortest}) must be at most longest ({longest}), and that at most "
            f"max_model_len ({config.max_model_len})",
            field="longest",
        )
    return draw_uniform(settings.requests, shortest, longest, settings.pairs, settings.seed)


def scheduler_config(config: EngineConfig) -> SchedulerConfig:
    """Return the scheduler's limits, but for rows and slots: memory alone is to bound what runs."""
    pool_tokens = _num_blocks(config) * config.block_size
    return SchedulerConfig(
        max_batch_size=max(pool_tokens, 1),
        max_num_seqs=max(pool_tokens, 1),
        max_model_len=config.max_model_len,
        max_total_tokens=config.max_total_tokens,
        memory_threshold=config.memory_threshold,
    )


def _trace_table(runs: list[MemoryRun]) -> Table:
    rows = [
        [
            run.method,
            f"{100 * run.waste:.1f} %",
            f"{100 * run.stranded:.1f} %",
            f"{run.sustained_concurrency:.1f}",
            f"{ratio(run.sustained_concurrency, runs[0].sustained_concurrency):.2f}",
            str(len(run.steps)),
            str(run.num_preemptions),
            str(run.moved_tokens),
        ]
        for run in runs
    ]
    headers = ["memory", "reserved, unused", "stranded", "concurrency", "of static"]
    return Table([*headers, "steps", "preempted", "tokens moved"], rows)


def _resident_table(held: dict[str, Any]) -> Table:
    def plane(name: str) -> list[str]:
        sizes = held[name]
        return [name.replace("_", " "), mib(sizes["rss"]), mib(sizes["pss"])]

    touched = mib(held["touched_pool_bytes"])
    return Table(
        ["resident at most, MiB", "Rss", "Pss"],
        [
            plane("control_plane"),
            plane("compute_plane"),
            ["KV pool in use", touched, touched],
            [
                "both beyond the KV pool",
                mib(held["beyond_pool_rss_bytes"]),
                mib(held["beyond_pool_pss_bytes"]),
            ],
        ],
        f"{held['streams']} streams of {held['prompt_tokens']} + {held['output_tokens']} tokens:",
    )


def mib(size: int) -> str:
    """Return bytes as MiB."""
    return f"{size / MIB:.1f}"
