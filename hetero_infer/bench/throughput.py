"""Tokens a second of many streams at once, through the public gRPC API, and who takes the cores."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hetero_infer.bench.figures import median
from hetero_infer.bench.load import (
    LoadClient,
    Prompts,
    StreamRecord,
    load_client,
    milliseconds,
    run_client,
    subject_of,
)
from hetero_infer.bench.processors import ProcessorMeter, median_usage, usage_table
from hetero_infer.bench.report import Result, Table
from hetero_infer.bench.server import Server, server
from hetero_infer.bench.settings import ThroughputSettings
from hetero_infer.config import EngineConfig

WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class ThroughputRun:
    """All streams of one run, from the first sent to the last ended."""

    seconds: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    decode_tokens_per_second: float
    """Of a stream, from its first token to its last; the median stream's."""
    time_to_first_token_ms: float
    """The median stream's."""


def run(config: EngineConfig, settings: ThroughputSettings) -> Result:
    """Measure; raises EngineError."""
    with server(config, settings.server) as where:
        meter = ProcessorMeter(where.planes) if where.planes else None
        return run_client(_measure(where, meter, settings))


async def _measure(
    where: Server, meter: ProcessorMeter | None, settings: ThroughputSettings
) -> Result:
    levels = settings.levels
    results: list[dict[str, Any]] = []
    async with load_client(where.address, token=where.token, tls=where.tls) as client:
        client.check_length(settings.prompt_tokens, settings.output_tokens, "output_tokens")
        prompts = Prompts(client.model["vocab_size"], settings.seed)
        await warm_up(client, prompts, settings.prompt_tokens, max(levels))
        for level in levels:
            runs, samples = [], []
            for _ in range(settings.repeat):
                requests = [
                    prompts.request(settings.prompt_tokens, settings.output_tokens)
                    for _ in range(level)
                ]
                if meter is not None:
                    meter.start()
                records = await client.together(requests)
                used = {} if meter is None else meter.stop(level * settings.output_tokens)
                runs.append(figures_of(records))
                samples.append({**asdict(runs[-1]), **used, "streams": to_objects(records)})
            results.append(
                {
                    "concurrency": level,
                    "prompt_tokens": settings.prompt_tokens,
                    "output_tokens": settings.output_tokens,
                    "median": median_run(runs),
                    "processors": meter and median_usage(samples, meter.num_threads),
                    "samples": samples,
                }
            )
        model = client.model
    tables = [_table(results), *([] if meter is None else [usage_table(results)])]
    return Result(subject_of(model), {"model": model, "results": results}, tables)


async def warm_up(
    client: LoadClient, prompts: Prompts, prompt_tokens: int, num_streams: int
) -> None:
    """Let everything be touched once that the measured runs touch."""
    await client.together(
        prompts.request(prompt_tokens, WARM_UP_TOKENS) for _ in range(num_streams)
    )


def figures_of(records: list[StreamRecord]) -> ThroughputRun:
    """Return the figures of streams that were sent together."""
    seconds = max(r.ended_s for r in records) - min(r.sent_s for r in records)
    output = sum(r.num_tokens for r in records)
    prompt = sum(r.prompt_tokens for r in records)
    return ThroughputRun(
        seconds=seconds,
        output_tokens_per_second=output / seconds,
        total_tokens_per_second=(prompt + output) / seconds,
        decode_tokens_per_second=median([r.decode_tokens_per_second for r in records]),
        time_to_first_token_ms=milliseconds(median([r.time_to_first_token_s for r in records])),
    )


def median_run(runs: list[ThroughputRun]) -> dict[str, float]:
    """Return the median of each figure."""
    columns = [asdict(run) for run in runs]
    return {name: median([column[name] for column in columns]) for name in columns[0]}


def to_objects(records: list[StreamRecord]) -> list[dict[str, Any]]:
    """Return streams for JSON, times since the first was sent."""
    origin = min(record.sent_s for record in records)
    return [record.to_object(origin) for record in records]


def _table(results: list[dict[str, Any]]) -> Table:
    rows = []
    for result in results:
        figures = result["median"]
        rows.append(
            [
                f"{result['concurrency']} × "
                f"({result['prompt_tokens']} + {result['output_tokens']})",
                f"{figures['output_tokens_per_second']:.1f}",
                f"{figures['total_tokens_per_second']:.1f}",
                f"{figures['decode_tokens_per_second']:.1f}",
                f"{figures['time_to_first_token_ms']:.1f}",
            ]
        )
    return Table(
        [
            "streams × (prompt + output)",
            "output tok/s",
            "total tok/s",
            "decode tok/s a stream",
            "first token ms",
        ],
        rows,
    )
