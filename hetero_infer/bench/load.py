"""Many streams from one client: requests sent, and when each of their messages came.

One thread and one channel carry all streams, so that the client takes as little as it can from
the cores it may share with the planes. Prompts are token ids: their length is exact, and no text
has to be found that has it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import uvloop

from control_plane.core.generation_params import GenerationParams
from hetero_infer.client import AsyncClient, Delta, Finished, PoolStats
from planes.address import Address
from planes.errors import ConfigError, ExecutionError
from planes.tls_files import ClientFiles

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StreamRecord:
    """One stream, as its client saw it; times in seconds of a monotonic clock.

    `arrivals`, `counts`: when each message with tokens came, and how many it had. `ended_s`: when
    the last message came, or when the stream was given up.
    """

    prompt_tokens: int
    sent_s: float
    arrivals: tuple[float, ...]
    counts: tuple[int, ...]
    ended_s: float

    @property
    def num_tokens(self) -> int:
        """Tokens that came."""
        return sum(self.counts)

    @property
    def time_to_first_token_s(self) -> float:
        """From sending to the first token."""
        return self.arrivals[0] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """Time from each message with tokens to the next: what a reader waits."""
        return [b - a for a, b in itertools.pairwise(self.arrivals)]

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens after the first message over the time they took; 0 if there are none."""
        elapsed = self.arrivals[-1] - self.arrivals[0]
        return (self.num_tokens - self.counts[0]) / elapsed if elapsed > 0 else 0.0

    def to_object(self, origin_s: float) -> dict[str, Any]:
        """Return it for JSON, times in milliseconds since `origin_s`."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "sent_ms": milliseconds(self.sent_s - origin_s),
            "arrivals_ms": [milliseconds(at - origin_s) for at in self.arrivals],
            "counts": list(self.counts),
        }


def milliseconds(seconds: float) -> float:
    """Return milliseconds to the microsecond."""
    return round(1e3 * seconds, 3)


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One greedy request, as long as it is told to be."""

    token_ids: tuple[int, ...]
    num_output: int

    @property
    def params(self) -> GenerationParams:
        """How it is generated."""
        return GenerationParams(max_tokens=self.num_output, temperature=0.0, ignore_eos=True)


class Prompts:
    """Draws prompts of exact lengths; no two begin alike, so no cache of prefixes helps them."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._vocab_size = vocab_size

    def request(self, num_tokens: int, num_output: int) -> LoadRequest:
        """Return a greedy request that generates exactly `num_output` tokens."""
        ids = self._random.choices(range(self._vocab_size), k=num_tokens)
        return LoadRequest(tuple(ids), num_output)


class LoadClient:
    """One channel to a control plane. Methods raise an `EngineError`, never a gRPC one.

    `model`: what the server says of its model, by the names of ModelInfo.
    """

    def __init__(self, client: AsyncClient, model: dict[str, Any]) -> None:
        self._client = client
        self.model = model

    def check_length(self, prompt_tokens: int, output_tokens: int, field: str) -> None:
        """Raise ConfigError, naming the setting, if such a request is longer than the model."""
        limit = self.model["max_model_len"]
        if prompt_tokens + output_tokens > limit:
            raise ConfigError(
                f"prompt_tokens {prompt_tokens} and {field} {output_tokens} must "
                f"be at most max_model_len ({limit}) together",
                field=field,
            )

    async def memory(self) -> PoolStats:
        """Return the use of the KV pool."""
        return await self._client.get_memory_stats()

    async def metrics(self) -> dict[str, float]:
        """Return what the server counts of itself, by name."""
        return dataclasses.asdict(await self._client.get_metrics())

    async def stream(
        self, request: LoadRequest, on_tokens: Callable[[int], None] | None = None
    ) -> StreamRecord:
        """Run one request to its end.

        `on_tokens`: called with the number of tokens so far at each message. Cancelling the task
        that waits for this gives the stream up; nothing is returned then.
        """
        arrivals: list[float] = []
        counts: list[int] = []
        total = 0
        sent = time.perf_counter()
        finished = None
        async with self._client.stream(request.token_ids, request.params) as stream:
            async for event in stream:
                if isinstance(event, Delta):
                    count = len(event.token_ids)
                    if count:
                        arrivals.append(time.perf_counter())
                        counts.append(count)
                        total += count
                        if on_tokens is not None:
                            on_tokens(total)
                elif isinstance(event, Finished):
                    finished = event
        if finished is None or total != request.num_output or total != finished.completion_tokens:
            counted = 0 if finished is None else finished.completion_tokens
            raise ExecutionError(
                f"a stream of {request.num_output} tokens brought {total}, "
                f"the server counted {counted}"
            )
        return StreamRecord(
            len(request.token_ids), sent, tuple(arrivals), tuple(counts), time.perf_counter()
        )

    async def together(self, requests: Iterable[LoadRequest]) -> list[StreamRecord]:
        """Run requests that are all sent at once; their records in the same order."""
        return await gathered([self.stream(request) for request in requests])

    async def in_turn(
        self, requests: Sequence[LoadRequest], num_streams: int
    ) -> list[StreamRecord]:
        """Run requests so that `num_streams` are always under way, until none is left."""
        left = iter(requests)

        async def one_after_another() -> list[StreamRecord]:
            return [await self.stream(request) for request in left]

        chains = await gathered([one_after_another() for _ in range(num_streams)])
        return [record for chain in chains for record in chain]

    async def at_rate(
        self, requests: Sequence[LoadRequest], rate: float, seed: int
    ) -> list[StreamRecord]:
        """Run requests that arrive at random, `rate` a second on average, whatever still runs."""
        arrivals = random.Random(seed)
        start = time.perf_counter()

        async def later(request: LoadRequest, delay_s: float) -> StreamRecord:
            await asyncio.sleep(start + delay_s - time.perf_counter())
            return await self.stream(request)

        waits, at = [], 0.0
        for request in requests:
            waits.append(later(request, at))
            at += arrivals.expovariate(rate)
        return await gathered(waits)


async def gathered(waits: Sequence[Any]) -> list[Any]:
    """Return the results of coroutines; if one fails, the others are cancelled and it is raised."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def load_client(
    address: Address, *, token: str | None = None, tls: ClientFiles | None = None
) -> AsyncIterator[LoadClient]:
    """Connect to a control plane and ask what it runs."""
    # What is tried again is not measured.
    async with AsyncClient(address, token=token, tls=tls, retries=0) as client:
        info = await client.model_info()
        yield LoadClient(client, dataclasses.asdict(info))


def run_client(measurement: Coroutine[Any, Any, T]) -> T:
    """Run a measurement on the event loop that takes the least from the planes' cores."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(measurement)


def subject_of(model: dict[str, Any]) -> str:
    """Say in one line what a server runs."""
    return (
        f"{model['model']} ({model['weight_format']} run as {model['dtype']}) "
        f"on {model['device']}, executor {model['executor']}"
    )
