"""This product as its users have it: both planes, started as `serve` does, asked through gRPC."""

from __future__ import annotations

import asyncio
import contextlib

from hetero_infer.bench.load import LoadClient, LoadRequest, StreamRecord, load_client
from hetero_infer.bench.server import started_planes
from hetero_infer.bench.throughput import figures_of
from hetero_infer.config import EngineConfig


class OwnServer:
    """Both planes and one client in this process. Raises EngineError.

    `kind`: of `runners/runner.py`; tokens are counted over the time a client sees.
    """

    def __init__(self, kind: str, config: EngineConfig) -> None:
        self._kind = kind
        with contextlib.ExitStack() as resources:
            planes = resources.enter_context(started_planes(config))
            loop = resources.enter_context(asyncio.Runner())
            connection = load_client(planes.control)
            client: LoadClient = loop.run(connection.__aenter__())
            resources.callback(lambda: loop.run(connection.__aexit__(None, None, None)))
            self._resources = resources.pop_all()
        self._loop, self._client = loop, client
        self.pids = [planes.control_pid, planes.compute_pid]
        self.versions = {
            name: str(client.model[name]) for name in ("executor", "weight_format", "dtype")
        }

    def measure(self, prompts: list[list[int]], output_tokens: int) -> tuple[int, float]:
        """Run once; return tokens and seconds."""
        requests = [LoadRequest(tuple(prompt), output_tokens) for prompt in prompts]
        records = self._loop.run(self._client.together(requests))
        return counted(self._kind, records)

    def close(self) -> None:
        """End the planes."""
        self._resources.close()


def counted(kind: str, records: list[StreamRecord]) -> tuple[int, float]:
    """Return the tokens and seconds of streams that were sent together, as the kind counts them."""
    [first, *_] = records
    if kind == "decode":
        return first.num_tokens - first.counts[0], first.arrivals[-1] - first.arrivals[0]
    if kind == "prefill":
        return first.prompt_tokens, first.time_to_first_token_s
    return sum(record.num_tokens for record in records), figures_of(records).seconds
