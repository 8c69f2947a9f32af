"""What one stream loses beside a process that never rests."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hetero_infer.bench.figures import median, ratio
from hetero_infer.bench.load import (
    LoadClient,
    Prompts,
    StreamRecord,
    load_client,
    run_client,
    subject_of,
)
from hetero_infer.bench.processors import seconds_of_process
from hetero_infer.bench.report import Result, Table
from hetero_infer.bench.server import started_planes
from hetero_infer.bench.settings import NeighbourSettings
from hetero_infer.config import EngineConfig
from planes.address import Address
from planes.errors import ExecutionError

NEVER_RESTS = """
import os
parent = os.getppid()
print("ready", flush=True)
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""
"""Loads one core until it is killed; or until its parent is, which is not to leave it behind."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The same kind of stream twice: alone and beside the neighbours, tokens a second each.

    `neighbour_cores`: how many cores the neighbours got meanwhile.
    """

    alone: float
    beside: float
    neighbour_cores: float

    def to_object(self) -> dict[str, float]:
        """Return it for JSON."""
        return {
            "alone_tokens_per_second": self.alone,
            "beside_tokens_per_second": self.beside,
            "slower_by": ratio(self.alone, self.beside),
            "neighbour_cores": self.neighbour_cores,
        }


def run(config: EngineConfig, settings: NeighbourSettings) -> Result:
    """Measure; raises EngineError."""
    with started_planes(config) as planes:
        return run_client(_measure(planes.control, settings))


async def _measure(address: Address, settings: NeighbourSettings) -> Result:
    async with load_client(address) as client:
        client.check_length(settings.prompt_tokens, settings.output_tokens, "output_tokens")
        prompts = Prompts(client.model["vocab_size"], settings.seed)
        await _stream(client, prompts, settings)
        # Each pair begins with the other half: what drifts in between falls on both alike.
        pairs = [
            await _pair(client, prompts, settings, is_alone_first=number % 2 == 0)
            for number in range(settings.repeat)
        ]
        model = client.model
    figures = figures_of(pairs)
    data = {"model": model, "neighbours": settings.neighbours, **figures}
    data["samples"] = [pair.to_object() for pair in pairs]
    return Result(subject_of(model), data, [table_of(data)])


async def _pair(
    client: LoadClient, prompts: Prompts, settings: NeighbourSettings, *, is_alone_first: bool
) -> Pair:
    alone = await _stream(client, prompts, settings) if is_alone_first else None
    with busy_neighbours(settings.neighbours) as pids:
        began, before = time.perf_counter(), sum(map(seconds_of_process, pids))
        beside = await _stream(client, prompts, settings)
        used = sum(map(seconds_of_process, pids)) - before
        cores = used / (time.perf_counter() - began)
    if alone is None:
        alone = await _stream(client, prompts, settings)
    return Pair(alone.decode_tokens_per_second, beside.decode_tokens_per_second, cores)


async def _stream(
    client: LoadClient, prompts: Prompts, settings: NeighbourSettings
) -> StreamRecord:
    return await client.stream(prompts.request(settings.prompt_tokens, settings.output_tokens))


@contextlib.contextmanager
def busy_neighbours(count: int) -> Iterator[list[int]]:
    """Run that many processes that never rest; their process ids, once all are at it."""
    with contextlib.ExitStack() as stack:
        processes = []
        for _ in range(count):
            # -S -E: nothing of the environment runs in it.
            process = subprocess.Popen(
                [sys.executable, "-S", "-E", "-c", NEVER_RESTS], stdout=subprocess.PIPE
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)
        for process in processes:
            assert process.stdout is not None  # it is a pipe
            if not process.stdout.readline():
                raise ExecutionError("a neighbour process ended before it began")
        yield [process.pid for process in processes]


def figures_of(pairs: list[Pair]) -> dict[str, Any]:
    """Return medians; of the ratio, that of the pairs' own ratios."""
    samples = [pair.to_object() for pair in pairs]
    return {name: median([sample[name] for sample in samples]) for name in samples[0]}


def table_of(data: dict[str, Any]) -> Table:
    """Tell it to people."""
    count = data["neighbours"]
    whom = "1 busy neighbour" if count == 1 else f"{count} busy neighbours"
    return Table(
        ["one stream", "decode tok/s", "slower by", "cores they got"],
        [
            ["alone", f"{data['alone_tokens_per_second']:.1f}", "", ""],
            [
                f"beside {whom}",
                f"{data['beside_tokens_per_second']:.1f}",
                f"{data['slower_by']:.2f} ×",
                f"{data['neighbour_cores']:.2f}",
            ],
        ],
    )
