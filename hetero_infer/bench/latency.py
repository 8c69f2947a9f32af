"""How long a client waits: for the first token, between tokens, and beside a long prompt."""

from __future__ import annotations

import asyncio
import itertools
import math
from dataclasses import dataclass, field
from typing import Any

from control_plane.errors import AdminTokenRequiredError
from hetero_infer.bench.figures import median, percentile, summary
from hetero_infer.bench.load import (
    LoadClient,
    Prompts,
    StreamRecord,
    load_client,
    milliseconds,
    run_client,
    subject_of,
)
from hetero_infer.bench.report import Result, Table
from hetero_infer.bench.server import Server, server
from hetero_infer.bench.settings import LatencySettings
from hetero_infer.bench.throughput import to_objects, warm_up
from hetero_infer.config import EngineConfig
from planes.errors import ExecutionError

SETTLED_TOKENS = 16
"""Tokens of the running stream before the long prompt comes, and as many gaps to compare with."""


def run(config: EngineConfig, settings: LatencySettings) -> Result:
    """Measure; raises EngineError."""
    levels = settings.levels
    with server(config, settings.server) as where:
        return run_client(_measure(where, settings, levels))


async def _measure(where: Server, settings: LatencySettings, levels: list[int]) -> Result:
    async with load_client(where.address, token=where.token, tls=where.tls) as client:
        client.check_length(settings.prompt_tokens, settings.output_tokens, "output_tokens")
        client.check_length(settings.long_prompt, 1, "long_prompt")
        prompts = Prompts(client.model["vocab_size"], settings.seed)
        await warm_up(client, prompts, settings.prompt_tokens, max(levels))
        results = await _loads(client, prompts, settings, levels)
        prefill = await _prefill(client, prompts, settings)
        beside = await _beside(client, prompts, settings)
        model = client.model
    data = {"model": model, "results": results, "prefill": prefill, "beside": beside}
    tables = [_load_table(results), _long_prompt_table(prefill, beside)]
    return Result(subject_of(model), data, tables)


async def _loads(
    client: LoadClient, prompts: Prompts, settings: LatencySettings, levels: list[int]
) -> list[dict[str, Any]]:
    """Measure each level of concurrency, or the rate; all runs of one are taken together."""
    results = []
    for level in levels if settings.rate is None else [None]:
        samples = []
        for repetition in range(settings.repeat):
            requests = [
                prompts.request(settings.prompt_tokens, settings.output_tokens)
                for _ in range(settings.requests)
            ]
            if settings.rate is not None:
                seed = settings.seed + repetition
                records = await client.at_rate(requests, settings.rate, seed)
            else:
                records = await client.in_turn(requests, level or 1)
            samples.append(records)
        every = [record for records in samples for record in records]
        results.append(
            {
                "concurrency": level,
                "rate": settings.rate,
                "prompt_tokens": settings.prompt_tokens,
                "output_tokens": settings.output_tokens,
                **waits_of(every),
                "samples": [to_objects(records) for records in samples],
            }
        )
    return results


def waits_of(records: list[StreamRecord]) -> dict[str, Any]:
    """Return percentiles of the waits of streams, in milliseconds.

    A gap is from one message with tokens to the next; `tokens_per_message` says how many come with
    each, on average.
    """
    gaps = [1e3 * gap for record in records for gap in record.gaps_s]
    messages = sum(len(record.counts) for record in records)
    return {
        "time_to_first_token_ms": summary([1e3 * r.time_to_first_token_s for r in records]),
        "inter_token_ms": summary(gaps),
        "tokens_per_message": sum(record.num_tokens for record in records) / messages,
    }


async def _prefill(
    client: LoadClient, prompts: Prompts, settings: LatencySettings
) -> dict[str, Any]:
    """Send the long prompt alone."""
    samples = []
    for _ in range(settings.repeat):
        record = await client.stream(prompts.request(settings.long_prompt, 1))
        samples.append(record.time_to_first_token_s)
    return {
        "prompt_tokens": settings.long_prompt,
        "time_to_first_token_ms": milliseconds(median(samples)),
        "prefill_tokens_per_second": median([settings.long_prompt / s for s in samples]),
        "samples_ms": [milliseconds(s) for s in samples],
    }


@dataclass(slots=True)
class _Watched:
    """A running stream: when each of its messages came, and whether it has settled."""

    arrivals: list[float] = field(default_factory=list)
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    again: asyncio.Event = field(default_factory=asyncio.Event)

    def on_tokens(self, total: int) -> None:
        """Take note of a message."""
        self.arrivals.append(asyncio.get_running_loop().time())
        self.again.set()
        if total > SETTLED_TOKENS:
            self.settled.set()


async def _beside(
    client: LoadClient, prompts: Prompts, settings: LatencySettings
) -> dict[str, Any]:
    """Send the long prompt while a stream runs, and see how long that waits for a token."""
    try:
        stats = await client.memory()
    except AdminTokenRequiredError:
        return {"left_out": "this token may not ask for the size of the KV pool (--admin)"}
    room = stats.total_blocks * stats.block_size - settings.long_prompt
    limit = min(client.model["max_model_len"], room)
    num_output = limit - settings.prompt_tokens
    if num_output <= 2 * SETTLED_TOKENS:
        return {"left_out": "the KV pool or max_model_len has no room for both at once"}
    samples = [
        await _one_beside(client, prompts, settings, num_output) for _ in range(settings.repeat)
    ]
    return {
        "prompt_tokens": settings.long_prompt,
        "usual_gap_ms": median([sample["usual_gap_ms"] for sample in samples]),
        "longest_gap_ms": median([sample["longest_gap_ms"] for sample in samples]),
        "long_prompt_ms": median([sample["long_prompt_ms"] for sample in samples]),
        "samples": samples,
    }


async def _one_beside(
    client: LoadClient, prompts: Prompts, settings: LatencySettings, num_output: int
) -> dict[str, Any]:
    watched = _Watched()
    running = asyncio.ensure_future(
        client.stream(prompts.request(settings.prompt_tokens, num_output), watched.on_tokens)
    )
    try:
        await _first_of(running, watched.settled.wait())
        loop = asyncio.get_running_loop()
        sent = loop.time()
        record = await client.stream(prompts.request(settings.long_prompt, 1))
        ended = loop.time()
        watched.again.clear()
        await _first_of(running, watched.again.wait())
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    usual, longest = gaps_beside(watched.arrivals, sent, ended)
    return {
        "usual_gap_ms": milliseconds(usual),
        "longest_gap_ms": milliseconds(longest),
        "long_prompt_ms": milliseconds(record.time_to_first_token_s),
        "arrivals_ms": [milliseconds(at - sent) for at in watched.arrivals],
    }


async def _first_of(running: asyncio.Future[StreamRecord], wait: Any) -> None:  # noqa: ANN401
    """Wait, while the stream runs. Raises what ends it, or ExecutionError if it is over."""
    waiting = asyncio.ensure_future(wait)
    try:
        await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
            raise ExecutionError(
                "the running stream was over before the long prompt was; "
                "give a larger max_model_len or a shorter --long-prompt"
            )
    finally:
        waiting.cancel()


def gaps_beside(arrivals: list[float], sent: float, ended: float) -> tuple[float, float]:
    """Return a stream's median gap before `sent`, and its longest that touches sent … ended."""
    pairs = list(itertools.pairwise(arrivals))
    usual = [b - a for a, b in pairs if b <= sent]
    touched = [b - a for a, b in pairs if b > sent and a < ended]
    return percentile(usual, 50), max(touched, default=float("nan"))


def _told(ms: float) -> str:
    """Spell a time, or that there is none: of one token there is no gap."""
    return "–" if math.isnan(ms) else f"{ms:.1f}"


def _load_table(results: list[dict[str, Any]]) -> Table:
    rows = []
    for result in results:
        first, gap = result["time_to_first_token_ms"], result["inter_token_ms"]
        level, rate = result["concurrency"], result["rate"]
        shape = f"({result['prompt_tokens']} + {result['output_tokens']})"
        what = f"{level} × {shape}" if rate is None else f"{rate:g}/s of {shape}"
        rows.append(
            [what, *(_told(w[key]) for w in (first, gap) for key in ("p50", "p90", "p99", "max"))]
        )
    return Table(
        ["load", "first p50", "p90", "p99", "max", "between p50", "p90", "p99", "max"],
        rows,
        "Time to the first token, and between tokens, in ms:",
    )


def _long_prompt_table(prefill: dict[str, Any], beside: dict[str, Any]) -> Table:
    tokens = prefill["prompt_tokens"]
    rows = [
        [
            f"prompt of {tokens} tokens alone",
            f"{prefill['time_to_first_token_ms']:.1f} ms",
            f"{prefill['prefill_tokens_per_second']:.0f} tok/s",
        ]
    ]
    if "left_out" in beside:
        rows.append(["beside a running stream", "left out", beside["left_out"]])
    else:
        rows.append(["the same beside a running stream", f"{beside['long_prompt_ms']:.1f} ms", ""])
        rows.append(
            [
                "longest gap of that stream",
                f"{beside['longest_gap_ms']:.1f} ms",
                f"usually {beside['usual_gap_ms']:.1f} ms",
            ]
        )
    return Table(["long prompt", "time", ""], rows)
