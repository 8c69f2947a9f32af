"""Both planes and a client, on a device that takes so long for a step: what share of it is idle.

The compute plane's executor is `CudaExecutor` on the played device; everything else is as `serve`
starts it. What a step takes at the client beside what it takes the device says how long the device
waited for the host. Planes and client share this machine's cores.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.gpu.engine_serving import step_milliseconds_of
from hetero_infer.bench.load import LoadClient, Prompts, load_client, run_client
from hetero_infer.bench.processors import seconds_of_process
from hetero_infer.bench.server import StartedPlanes
from hetero_infer.bench.throughput import warm_up
from hetero_infer.config import EngineConfig, child_environment
from hetero_infer.local_planes import (
    compute_socket,
    control_socket,
    private_directory,
    start_control_plane,
)
from hetero_infer.plane_process import PlaneProcess, wait_all_ready

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Serving:
    """So many streams together, `repeat` times, on a device that takes `step_us` for any step.

    `wake_us`: how late it wakes who does not watch it.
    """

    step_us: float
    wake_us: float = 0.0
    levels: Sequence[int] = (1, 32)
    prompt_tokens: int = 128
    output_tokens: int = 1200
    repeat: int = 3

    @property
    def num_blocks(self) -> int:
        """Of a pool in which all fit."""
        tokens = self.prompt_tokens + self.output_tokens
        return max(self.levels) * (-(-tokens // BLOCK_SIZE) + 2)


def measure_serving(model: Path, serving: Serving) -> list[dict[str, Any]]:
    """Return figures of every run. Raises EngineError."""
    config = EngineConfig(
        model=str(model),
        executor="cuda",
        device="cpu",
        dtype="bfloat16",
        block_size=BLOCK_SIZE,
        max_num_blocks=serving.num_blocks,
        max_batch_size=max(serving.levels),
        log_level="warning",
    )
    with played_planes(config, serving) as planes:
        return run_client(_measure(planes, serving))


@contextlib.contextmanager
def played_planes(config: EngineConfig, serving: Serving) -> Iterator[StartedPlanes]:
    """Start both planes, the compute plane on the played device, and end them."""
    with private_directory() as directory:
        compute, control = compute_socket(directory), control_socket(directory)
        with (
            PlaneProcess(
                "bench.host.plane",
                [
                    str(serving.step_us),
                    str(serving.wake_us),
                    *config.compute_plane_flags(compute),
                ],
                environ=child_environment(str(Path.cwd())),
            ) as compute_plane,
            start_control_plane(config, compute, f"--listen={control}") as control_plane,
        ):
            wait_all_ready([compute_plane, control_plane])
            yield StartedPlanes(control, compute, control_plane.pid, compute_plane.pid)


async def _measure(planes: StartedPlanes, serving: Serving) -> list[dict[str, Any]]:
    results = []
    async with load_client(planes.control) as client:
        prompts = Prompts(client.model["vocab_size"], seed=1)
        await warm_up(client, prompts, serving.prompt_tokens, max(serving.levels))
        for level in serving.levels:
            results += [
                await _once(client, prompts, planes, serving, level) for _ in range(serving.repeat)
            ]
    return results


async def _once(
    client: LoadClient, prompts: Prompts, planes: StartedPlanes, serving: Serving, level: int
) -> dict[str, Any]:
    requests = [
        prompts.request(serving.prompt_tokens - number % BLOCK_SIZE, serving.output_tokens)
        for number in range(level)
    ]
    before = _seconds(planes)
    records = await client.together(requests)
    spent = {party: after - before[party] for party, after in _seconds(planes).items()}
    metrics = await client.metrics()
    step_ms = step_milliseconds_of(records)
    return {
        "streams": level,
        "device_step_ms": serving.step_us / 1e3,
        "step_ms": step_ms,
        "idle_share": max(0.0, 1 - serving.step_us / 1e3 / step_ms),
        "plane_idle_share": metrics["plane_idle_share"],
        "plane_queue_ms": 1e3 * metrics["plane_queue_s"],
        "scheduling_delay_p99_ms": 1e3 * metrics["scheduling_delay_p99_s"],
        "processor_us_of_a_step": {
            party: 1e6 * seconds / serving.output_tokens for party, seconds in spent.items()
        },
    }


def _seconds(planes: StartedPlanes) -> dict[str, float]:
    """Return the processor time of each party so far."""
    return {
        "compute_plane": seconds_of_process(planes.compute_pid),
        "control_plane": seconds_of_process(planes.control_pid),
        "client": time.process_time(),
    }
