"""Many streams from one client: requests sent, and when each of their messages came.

One thread and one channel carry all streams, so that the client takes as little as it can from
the cores it may share with the planes. Prompts are token ids: their length is exact, and no text
has to be found that has it.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import uvloop

from hetero_infer.wire_errors import ServerLostError, error_from_rpc
from planes.address import Address
from planes.errors import ConfigError, ExecutionError
from planes.transport import MAX_CLIENT_MESSAGE_BYTES
from protos.hetero.inference.v1 import inference_pb2, inference_pb2_grpc

RPC_TIMEOUT_S = 10.0

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


class Prompts:
    """Draws prompts of exact lengths; no two begin alike, so no cache of prefixes helps them."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._vocab_size = vocab_size

    def request(self, num_tokens: int, num_output: int) -> inference_pb2.GenerateRequest:
        """Return a greedy request that generates exactly `num_output` tokens."""
        ids = self._random.choices(range(self._vocab_size), k=num_tokens)
        return inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=ids),
            sampling=inference_pb2.SamplingParams(
                max_tokens=num_output, temperature=0.0, ignore_eos=True
            ),
        )


class LoadClient:
    """One channel to a control plane. Methods raise an `EngineError`, never a gRPC one.

    `model`: what the server says of its model, by the names of GetModelInfoResponse.
    """

    def __init__(
        self, stub: inference_pb2_grpc.InferenceServiceAsyncStub, model: dict[str, Any]
    ) -> None:
        self._stub = stub
        self.model = model

    def check_length(self, prompt_tokens: int, output_tokens: int, field: str) -> None:
        """Raise ConfigError, naming the setting, if such a request is longer than the model."""
        limit = self.model["max_model_len"]
        if prompt_tokens + output_tokens > limit:
            raise ConfigError(
                f"{field}: {prompt_tokens} prompt tokens and {output_tokens} output tokens must "
                f"be at most max_model_len ({limit}) together",
                field=field,
            )

    async def memory(self) -> inference_pb2.GetMemoryStatsResponse:
        """Return the use of the KV pool."""
        try:
            return await self._stub.GetMemoryStats(
                inference_pb2.GetMemoryStatsRequest(), timeout=RPC_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None

    async def stream(
        self,
        request: inference_pb2.GenerateRequest,
        on_tokens: Callable[[int], None] | None = None,
    ) -> StreamRecord:
        """Run one request to its end.

        `on_tokens`: called with the number of tokens so far at each message. Cancelling the task
        that waits for this gives the stream up; nothing is returned then.
        """
        arrivals: list[float] = []
        counts: list[int] = []
        total = 0
        sent = time.perf_counter()
        call = self._stub.GenerateStream(request)
        finished = None
        try:
            async for response in call:
                if response.HasField("delta"):
                    count = len(response.delta.token_ids)
                    if count:
                        arrivals.append(time.perf_counter())
                        counts.append(count)
                        total += count
                        if on_tokens is not None:
                            on_tokens(total)
                elif response.HasField("finished"):
                    finished = response.finished
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None
        finally:
            call.cancel()
        if finished is None:
            raise ServerLostError("the server closed the stream before the end of the text")
        if total != request.sampling.max_tokens or total != finished.usage.completion_tokens:
            raise ExecutionError(
                f"a stream of {request.sampling.max_tokens} tokens brought {total}, "
                f"the server counted {finished.usage.completion_tokens}"
            )
        prompt_tokens = len(request.token_ids.ids)
        return StreamRecord(
            prompt_tokens, sent, tuple(arrivals), tuple(counts), time.perf_counter()
        )

    async def together(
        self, requests: Iterable[inference_pb2.GenerateRequest]
    ) -> list[StreamRecord]:
        """Run requests that are all sent at once; their records in the same order."""
        return await gathered([self.stream(request) for request in requests])

    async def in_turn(
        self, requests: Sequence[inference_pb2.GenerateRequest], num_streams: int
    ) -> list[StreamRecord]:
        """Run requests so that `num_streams` are always under way, until none is left."""
        left = iter(requests)

        async def one_after_another() -> list[StreamRecord]:
            return [await self.stream(request) for request in left]

        chains = await gathered([one_after_another() for _ in range(num_streams)])
        return [record for chain in chains for record in chain]

    async def at_rate(
        self, requests: Sequence[inference_pb2.GenerateRequest], rate: float, seed: int
    ) -> list[StreamRecord]:
        """Run requests that arrive at random, `rate` a second on average, whatever still runs."""
        arrivals = random.Random(seed)
        start = time.perf_counter()

        async def later(request: inference_pb2.GenerateRequest, delay_s: float) -> StreamRecord:
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
async def load_client(address: Address) -> AsyncIterator[LoadClient]:
    """Connect to a control plane and ask what it runs."""
    limit = ("grpc.max_send_message_length", MAX_CLIENT_MESSAGE_BYTES)
    async with grpc.aio.insecure_channel(address.target, options=[limit]) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        try:
            info = await stub.GetModelInfo(
                inference_pb2.GetModelInfoRequest(), timeout=RPC_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None
        names = [field.name for field in info.DESCRIPTOR.fields]
        yield LoadClient(stub, {name: getattr(info, name) for name in names})


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
