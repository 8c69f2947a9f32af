"""The link between the planes: who waits for whom, what travels, what a second batch gains."""

from __future__ import annotations

import contextlib
import dataclasses
from contextlib import AsyncExitStack
from typing import Any

from hetero_infer.bench.figures import median, ratio
from hetero_infer.bench.link_rows import blocks_for, bytes_of_a_row
from hetero_infer.bench.load import LoadClient, Prompts, load_client, run_client, subject_of
from hetero_infer.bench.report import Result, Table
from hetero_infer.bench.server import started_planes
from hetero_infer.bench.settings import LinkSettings
from hetero_infer.bench.throughput import ThroughputRun, figures_of, warm_up
from hetero_infer.config import EngineConfig
from planes.address import Address

DEPTHS = (1, 2)
"""Batches under way at once: the loop that waits for each, and the one that is ahead."""

ROWS = 32
GAUGES = ("plane_idle_share", "plane_step_s", "scheduling_delay_p99_s")
"""What the server itself says of its last steps, by the names of GetMetricsResponse."""


def run(config: EngineConfig, settings: LinkSettings) -> Result:
    """Measure; raises EngineError.

    The server's gauges are of its last steps, whatever ran in them: each number of streams gets
    planes of its own. The two depths take turns, on two pairs of planes that live side by side.
    """
    config.validate()
    rows = row_bytes(settings.row_contexts, config.block_size)
    with contextlib.ExitStack() as stack:
        addresses = [
            stack.enter_context(
                started_planes(dataclasses.replace(config, pipeline_depth=depth))
            ).control
            for depth in DEPTHS
        ]
        depths, model = run_client(_take_turns(addresses, settings))
    with started_planes(dataclasses.replace(config, pipeline_depth=DEPTHS[-1])) as planes:
        many = run_client(_many(planes.control, settings))
    data = {
        "model": model,
        "prompt_tokens": settings.prompt_tokens,
        "output_tokens": settings.output_tokens,
        "streams": settings.streams,
        "many_streams": settings.many_streams,
        "depths": depths,
        "many": many,
        "rows": rows,
    }
    return Result(subject_of(model), data, tables_of(data))


def row_bytes(contexts: list[int], block_size: int) -> list[dict[str, float]]:
    """Weigh a decode row at each context, in one pool in which even the longest fit."""
    num_blocks = blocks_for(max(contexts), ROWS, block_size)
    return [
        {"context": context, "bytes": bytes_of_a_row(context, ROWS, block_size, num_blocks)}
        for context in contexts
    ]


async def _take_turns(
    addresses: list[Address], settings: LinkSettings
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Run the same streams on one server after the other, again and again."""
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(load_client(at)) for at in addresses]
        prompts = [await _ready(client, settings, settings.streams) for client in clients]
        samples: list[list[ThroughputRun]] = [[] for _ in clients]
        for _ in range(settings.repeat):
            for client, drawn, runs in zip(clients, prompts, samples, strict=True):
                runs.append(await _together(client, drawn, settings, settings.streams))
        depths = [
            {
                "depth": depth,
                "median_s": median([run.seconds for run in runs]),
                "samples_s": [run.seconds for run in runs],
                "output_tokens_per_second": median([run.output_tokens_per_second for run in runs]),
                **await _gauges(client),
            }
            for depth, client, runs in zip(DEPTHS, clients, samples, strict=True)
        ]
        return depths, clients[0].model


async def _many(address: Address, settings: LinkSettings) -> dict[str, Any]:
    """Run many streams at once; what the engine's loop lost to them."""
    async with load_client(address) as client:
        prompts = await _ready(client, settings, settings.many_streams)
        runs = [
            await _together(client, prompts, settings, settings.many_streams)
            for _ in range(settings.repeat)
        ]
        return {
            "median_s": median([run.seconds for run in runs]),
            "output_tokens_per_second": median([run.output_tokens_per_second for run in runs]),
            **await _gauges(client),
        }


async def _ready(client: LoadClient, settings: LinkSettings, num_streams: int) -> Prompts:
    """Check the lengths and let everything be touched once; each server gets the same prompts."""
    client.check_length(settings.prompt_tokens, settings.output_tokens, "output_tokens")
    prompts = Prompts(client.model["vocab_size"], settings.seed)
    await warm_up(client, prompts, settings.prompt_tokens, num_streams)
    return prompts


async def _together(
    client: LoadClient, prompts: Prompts, settings: LinkSettings, num_streams: int
) -> ThroughputRun:
    requests = [
        prompts.request(settings.prompt_tokens, settings.output_tokens) for _ in range(num_streams)
    ]
    return figures_of(await client.together(requests))


async def _gauges(client: LoadClient) -> dict[str, float]:
    metrics = await client.metrics()
    return {name: metrics[name] for name in GAUGES}


def tables_of(data: dict[str, Any]) -> list[Table]:
    """Tell it to people."""
    shape = f"({data['prompt_tokens']} + {data['output_tokens']})"
    one, two = data["depths"]
    gain = ratio(one["median_s"], two["median_s"])
    pipelined = Table(
        ["batches under way", "s", "output tok/s", "step ms", "plane idle, of the step"],
        [
            [
                str(figures["depth"]),
                f"{figures['median_s']:.2f}",
                f"{figures['output_tokens_per_second']:.1f}",
                f"{1e3 * figures['plane_step_s']:.2f}",
                f"{100 * idle_of_step(figures['plane_idle_share']):.1f} %",
            ]
            for figures in (one, two)
        ],
        f"{data['streams']} × {shape}, taking turns; one under way takes {gain:.2f} × as long:",
    )
    delays = Table(
        ["streams", "delay p99 ms", "output tok/s"],
        [
            [
                str(streams),
                f"{1e3 * figures['scheduling_delay_p99_s']:.2f}",
                f"{figures['output_tokens_per_second']:.1f}",
            ]
            for streams, figures in ((data["streams"], two), (data["many_streams"], data["many"]))
        ],
        "How long a result waits for the engine's loop:",
    )
    first = data["rows"][0]["bytes"]
    rows = Table(
        ["context of a decode row", "bytes", "ratio"],
        [
            [str(row["context"]), f"{row['bytes']:.2f}", f"{ratio(row['bytes'], first):.2f}"]
            for row in data["rows"]
        ],
        f"On the wire to the compute plane, {ROWS} rows a batch:",
    )
    return [pipelined, delays, rows]


def idle_of_step(share: float) -> float:
    """Return idle time over computing time, from its share of both together."""
    return ratio(share, 1 - share)
