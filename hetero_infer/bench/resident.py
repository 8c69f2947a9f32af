"""Resident memory of both planes while streams run, and how much of it is not the KV pool."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetero_infer.bench.load import LoadClient, Prompts, load_client
from hetero_infer.bench.server import StartedPlanes, describe, started_planes
from hetero_infer.config import EngineConfig
from planes.address import Address
from planes.errors import ExecutionError

PERIOD_S = 0.1


@dataclass(slots=True)
class Peaks:
    """The most that was seen: bytes by name, for each plane, and KV blocks in use."""

    control: dict[str, int] = field(default_factory=dict)
    compute: dict[str, int] = field(default_factory=dict)
    used_blocks: int = 0

    def add(self, control: dict[str, int], compute: dict[str, int], used_blocks: int) -> None:
        """Take in one look."""
        for peak, seen in ((self.control, control), (self.compute, compute)):
            for name, value in seen.items():
                peak[name] = max(peak.get(name, 0), value)
        self.used_blocks = max(self.used_blocks, used_blocks)


def resident_memory(
    config: EngineConfig, num_streams: int, prompt_tokens: int, output_tokens: int, seed: int
) -> dict[str, Any]:
    """Start both planes, run streams, and return what the planes held at most.

    Raises EngineError; ExecutionError where the system has no /proc/PID/smaps_rollup.
    """
    with started_planes(config) as planes:
        return asyncio.run(_measure(planes, num_streams, prompt_tokens, output_tokens, seed))


async def _measure(
    planes: StartedPlanes, num_streams: int, prompt_tokens: int, output_tokens: int, seed: int
) -> dict[str, Any]:
    pool = _pool_of(planes.compute)
    async with load_client(planes.control) as client:
        client.check_length(prompt_tokens, output_tokens, "output_tokens")
        prompts = Prompts(client.model["vocab_size"], seed)
        peaks = Peaks()
        await _look(planes, client, peaks)
        watch = asyncio.ensure_future(_watch(planes, client, peaks))
        try:
            await client.together(
                prompts.request(prompt_tokens, output_tokens) for _ in range(num_streams)
            )
            await _look(planes, client, peaks)
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
        return {
            "streams": num_streams,
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
            "model": client.model,
            **pool,
            **figures_of(peaks, **pool),
        }


def figures_of(
    peaks: Peaks, *, kv_pool_bytes: int, num_blocks: int, weights_bytes: int
) -> dict[str, Any]:
    """Return peaks and what is left of them beyond the pool.

    The pool comes from the system as it is touched, so only blocks that were in use are taken off:
    what huge pages add to those stays counted.
    """
    touched = kv_pool_bytes * peaks.used_blocks // num_blocks
    rss = peaks.control["rss"] + peaks.compute["rss"]
    pss = peaks.control["pss"] + peaks.compute["pss"]
    return {
        "control_plane": peaks.control,
        "compute_plane": peaks.compute,
        "peak_used_blocks": peaks.used_blocks,
        "touched_pool_bytes": touched,
        "beyond_pool_rss_bytes": rss - touched,
        "beyond_pool_pss_bytes": pss - touched,
        "beyond_pool_and_weights_rss_bytes": rss - touched - weights_bytes,
    }


async def _watch(planes: StartedPlanes, client: LoadClient, peaks: Peaks) -> None:
    """Look again and again, until cancelled."""
    while True:
        await asyncio.sleep(PERIOD_S)
        await _look(planes, client, peaks)


async def _look(planes: StartedPlanes, client: LoadClient, peaks: Peaks) -> None:
    stats = await client.memory()
    control, compute = read_smaps(planes.control_pid), read_smaps(planes.compute_pid)
    peaks.add(control, compute, stats.used_blocks)


def read_smaps(pid: int) -> dict[str, int]:
    """Return resident bytes of a process: `rss`, `pss` (shared pages divided), `anonymous`.

    Raises ExecutionError where the system does not say.
    """
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    except OSError as error:
        raise ExecutionError(
            f"resident memory of process {pid}: {error.filename}: {error.strerror}"
        ) from None
    return parse_smaps(text)


def parse_smaps(text: str) -> dict[str, int]:
    """Read a smaps_rollup; sizes in it are in KiB."""
    wanted = {"Rss": "rss", "Pss": "pss", "Anonymous": "anonymous"}
    found = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        if name in wanted and rest.split()[1:] == ["kB"]:
            found[wanted[name]] = 1024 * int(rest.split()[0])
    return found


def _pool_of(compute: Address) -> dict[str, int]:
    """Ask a compute plane for the sizes of its pool and weights."""
    answer = describe(compute)
    return {
        "kv_pool_bytes": answer.device.kv_pool_bytes,
        "num_blocks": answer.num_blocks,
        "weights_bytes": answer.device.weights_bytes,
    }
