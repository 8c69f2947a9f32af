"""The whole engine at work: a real control plane, the compute plane on the GPU, a client's streams.

Both planes are processes, started as `serve` starts them. The share of time in which the device had
nothing to compute is what the plane itself says of its last steps, all of which decode every
stream; beside it stands the time of a step as the client's tokens show it, and how long a batch
waited at the plane: next to nothing where the device waits for batches, a step where it waits for
those that are there to be launched.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.gpu import engine_rival
from bench.gpu.findings import Findings, PartOptions
from bench.gpu.random_model import ONE_BILLION, write_model
from hetero_infer.bench.load import (
    LoadClient,
    LoadRequest,
    Prompts,
    StreamRecord,
    load_client,
    run_client,
)
from hetero_infer.bench.server import started_planes
from hetero_infer.bench.throughput import figures_of, warm_up
from hetero_infer.config import EngineConfig
from planes.address import Address

IDLE_STREAMS: Final = 32
IDLE_SHARE: Final = 0.1
RIVAL_RATIO: Final = 3.0


def engine_config(model: Path, *, device: str, dtype: str, **settings: object) -> EngineConfig:
    """Return what the planes are started with."""
    return EngineConfig(
        model=str(model),
        executor="cuda",
        device=device,
        dtype=dtype,
        **settings,  # type: ignore[arg-type]
    )


@dataclass(frozen=True, slots=True)
class Load:
    """What the engine is asked for.

    `levels`: numbers of streams that decode together, each with a prompt and an output of so many
    tokens. `many`: requests sent all at once, for tokens a second, with tokens of their own.
    """

    levels: Sequence[int] = (1, 8, 32, 64)
    prompt_tokens: int = 128
    output_tokens: int = 1152
    """More than the steps that the plane's figures are of, so that these are all of decoding."""
    many: int = 128
    many_prompt_tokens: int = 256
    many_output_tokens: int = 128

    @property
    def most_streams(self) -> int:
        """Streams there are at once at most: a step has a row for each."""
        return max(self.many, *self.levels)


def engine_serving(found: Findings, options: PartOptions) -> None:
    """Measure on the CUDA device."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        model = write_model(ONE_BILLION, Path(directory) / ONE_BILLION.name)
        config = engine_config(
            model,
            device="cuda",
            dtype="bfloat16",
            kv_cache_dtype=options.kv_cache_dtype,
            max_batch_size=Load().most_streams,
            kernel_cache=str(options.kernel_cache),
        )
        measure_engine(found, config, Load())
        if options.has_rivals:
            left = options.seconds - (time.perf_counter() - began)
            compare_with_transformers(found, config, Load(), seconds=left)


def measure_engine(found: Findings, config: EngineConfig, load: Load) -> None:
    """Let streams decode together and see how busy the device is; then ask for much at once.

    The report gets `engine_serving`, a row for each number of streams, and `throughput`.
    """
    found.values["engine_serving"] = []
    with started_planes(config) as planes:
        run_client(_measure(found, planes.control, load))


async def _measure(found: Findings, address: Address, load: Load) -> None:
    results: list[dict[str, Any]] = found.values["engine_serving"]
    async with load_client(address) as client:
        prompts = Prompts(client.model["vocab_size"], seed=1)
        await warm_up(client, prompts, load.prompt_tokens, max(load.levels))
        for level in load.levels:
            requests = [
                prompts.request(load.prompt_tokens, load.output_tokens) for _ in range(level)
            ]
            records = await client.together(requests)
            result = {"streams": level, **await _figures(client, records)}
            results.append(result)
            found.say(
                f"{level:3} streams: a step {result['step_ms']:.3f} ms at the client, "
                f"{result['plane_step_ms']:.3f} in the plane, idle {result['idle_share']:.1%}, "
                f"a batch waits {result['plane_queue_ms']:.3f} ms there"
            )
            if level == IDLE_STREAMS:
                name = f"idle share of the device between decode steps of {level} streams"
                found.target(name, result["idle_share"], at_most=IDLE_SHARE)
        await warm_up(client, prompts, load.many_prompt_tokens, load.many)
        records = await client.together(drawn(load))
    own = figures_of(records).output_tokens_per_second
    found.values["throughput"] = {
        "requests": load.many,
        "prompt_tokens": load.many_prompt_tokens,
        "output_tokens": load.many_output_tokens,
        "output_tokens_per_second": own,
        "transformers": None,
    }
    found.say(f"{load.many} requests at once: {own:.0f} output tok/s")


async def _figures(client: LoadClient, records: Sequence[StreamRecord]) -> dict[str, float]:
    metrics = await client.metrics()
    return {
        "step_ms": step_milliseconds_of(records),
        "output_tokens_per_second": figures_of(list(records)).output_tokens_per_second,
        "plane_step_ms": 1e3 * metrics["plane_step_s"],
        "idle_share": metrics["plane_idle_share"],
        "plane_queue_ms": 1e3 * metrics["plane_queue_s"],
        "scheduling_delay_p99_ms": 1e3 * metrics["scheduling_delay_p99_s"],
    }


def step_milliseconds_of(records: Sequence[StreamRecord]) -> float:
    """Return the time of a step while all streams decode: a token of each stream a step.

    From the moment the last one has its first token to the moment the first one has its last.
    """
    first = max(record.arrivals[0] for record in records)
    last = min(record.arrivals[-1] for record in records)
    steps = []
    for record in records:
        arrived = zip(record.arrivals, record.counts, strict=True)
        steps.append(sum(count for at, count in arrived if first < at <= last))
    return 1e3 * (last - first) * len(steps) / max(1, sum(steps))


def compare_with_transformers(
    found: Findings, config: EngineConfig, load: Load, *, seconds: float
) -> None:
    """Give transformers' continuous batching the same model and prompts.

    It runs once the planes have given the device back, and what it takes to start is not counted.
    """
    figures = found.values["throughput"]
    try:
        rival = engine_rival.transformers_tokens_per_second(
            Path(config.model),
            [request.token_ids for request in drawn(load)],
            load.many_output_tokens,
            device=config.device,
            dtype=config.dtype,
            seconds=seconds,
        )
    except Exception as error:  # noqa: BLE001 - whatever another's library fails with
        reason = (f"{type(error).__name__}: {error}".splitlines() or [""])[0]
        figures["transformers"] = {"unavailable": reason}
        found.say(f"    transformers' continuous batching: {reason}")
        return
    figures["transformers"] = {"output_tokens_per_second": rival}
    found.say(f"    transformers' continuous batching: {rival:.0f} output tok/s")
    own = figures["output_tokens_per_second"]
    found.target("throughput over transformers'", own / rival, at_least=RIVAL_RATIO)


def drawn(load: Load) -> list[LoadRequest]:
    """Return the many requests that both engines are given; of ids that every model has."""
    prompts = Prompts(256, seed=2)
    return [
        prompts.request(load.many_prompt_tokens, load.many_output_tokens) for _ in range(load.many)
    ]
