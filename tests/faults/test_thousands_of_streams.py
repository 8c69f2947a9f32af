"""Thousands of streams at the same moment: each is answered rightly, or told to come again."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

import grpc
import pytest

from hetero_infer.config import EngineConfig
from planes.address import Address
from protos.hetero.inference.v1 import inference_pb2 as pb
from protos.hetero.inference.v1 import inference_pb2_grpc
from tests.faults.deployment import MIB, PATIENCE_S, Deployment, deployed

CONFIG = EngineConfig(
    executor="simulated", block_size=4, max_batch_size=256, compute_grace=PATIENCE_S
)
NUM_PROMPTS = 16
NUM_TOKENS = 8
ALLOWANCE_BYTES = 64 * MIB

Stream = Iterable[pb.GenerateStreamResponse]
Outcome = tuple[str, list[int]]
Clients = list[inference_pb2_grpc.InferenceServiceStub]


@contextlib.contextmanager
def stubs(address: Address, num_connections: int) -> Iterator[Clients]:
    """So many clients, each with a connection of its own."""
    with contextlib.ExitStack() as channels:
        own = [("grpc.use_local_subchannel_pool", 1)]
        yield [
            inference_pb2_grpc.InferenceServiceStub(
                channels.enter_context(grpc.insecure_channel(address.target, own))
            )
            for _ in range(num_connections)
        ]


def request(number: int) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(max_tokens=NUM_TOKENS, seed=number, ignore_eos=True)
    return pb.GenerateRequest(text=f"prompt {number} " * 3, sampling=sampling)


def read(stream: Stream) -> Outcome:
    """How a stream ended, `finished` or its status, and its tokens."""
    tokens: list[int] = []
    end = ""
    try:
        for event in stream:
            tokens += event.delta.token_ids
            end = str(event.WhichOneof("event"))
    except grpc.RpcError as error:
        end = error.code().name
    return end, tokens


def has_begun(stream: Stream) -> bool:
    """Wait for the first event; whether it is not a refusal."""
    try:
        return bool(next(iter(stream)).HasField("started"))
    except grpc.RpcError:
        return False


def storm(deployment: Deployment, clients: Clients, num_streams: int) -> list[Outcome]:
    """Open all streams while the plane stands still; how each ended, and its tokens.

    So those that are not refused are there at the same moment.
    """
    (plane,) = deployment.compute
    plane.stop()
    try:
        streams = [
            clients[i % len(clients)].GenerateStream(request(i % NUM_PROMPTS), timeout=PATIENCE_S)
            for i in range(num_streams)
        ]
        num_begun = sum(map(has_begun, streams))
        metrics = deployment.metrics
        assert metrics.active_sequences + metrics.waiting_requests == num_begun
    finally:
        plane.wake()
    return [read(stream) for stream in streams]


QUEUES = [
    pytest.param(300, 1, 60, id="300-short-queue"),
    pytest.param(1000, 1, 200, id="1000-short-queue", marks=pytest.mark.slow),
    pytest.param(1000, 4, 4096, id="1000-long-queue", marks=pytest.mark.slow),
    pytest.param(4000, 1, 4096, id="4000-long-queue", marks=pytest.mark.slow),
    pytest.param(4000, 8, 1000, id="4000-short-queue", marks=pytest.mark.slow),
]


@pytest.mark.wide
@pytest.mark.parametrize(("num_streams", "num_connections", "max_queued"), QUEUES)
def test_every_one_of_thousands_of_streams_ends_well_or_is_told_to_come_again(
    measured, num_streams, num_connections, max_queued
):
    config = replace(CONFIG, max_queued_requests=max_queued)
    with deployed(config) as deployment, deployment.explained():
        with stubs(deployment.address, num_connections) as clients:
            expected = [read(clients[0].GenerateStream(request(i))) for i in range(NUM_PROMPTS)]
            storm(deployment, clients, num_streams)
        usage = deployment.usage()
        with stubs(deployment.address, num_connections) as clients:
            outcomes = storm(deployment, clients, num_streams)
        ends = Counter(end for end, _ in outcomes)
        assert ends["finished"] > 0
        assert ends.keys() <= {"finished", "RESOURCE_EXHAUSTED"}
        if max_queued >= num_streams:
            assert ends == {"finished": num_streams}
        else:
            assert ends["RESOURCE_EXHAUSTED"] > 0
        for i, (end, tokens) in enumerate(outcomes):
            assert (end, tokens) == expected[i % NUM_PROMPTS] or not tokens
        growths = deployment.check_at_rest(usage, ALLOWANCE_BYTES)
    measured("ends", dict(ends))
    measured("memory_growth_mib", [round(growth / MIB, 1) for growth in growths])
