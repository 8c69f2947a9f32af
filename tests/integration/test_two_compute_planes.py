"""Two compute planes with the embedded model behind one control plane, and one of them killed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from hetero_infer.config import EngineConfig
from hetero_infer.local_planes import private_directory, start_compute_plane, start_control_plane
from hetero_infer.plane_process import PlaneProcess
from planes.address import Address
from protos.hetero.compute.v1 import compute_pb2, compute_pb2_grpc
from protos.hetero.inference.v1 import inference_pb2 as pb
from tests.devices import Target
from tests.integration.asking import Server, check_tokens, request

pytestmark = pytest.mark.model

NUM_REQUESTS = 16
NUM_TOKENS = 16

SUBJECTS = ("lake", "clock", "bridge", "violin", "desert", "orchard", "harbour", "comet")
REQUESTS = [
    request(f"{number} facts about a {SUBJECTS[number % 8]}:", NUM_TOKENS, seed=number)
    for number in range(NUM_REQUESTS)
]
SHORT_REQUESTS = [request(f"A {subject}", 4) for subject in SUBJECTS[:2]]


class TwoPlanes:
    """Two compute planes, of one thread each; each may be started, killed and started again."""

    def __init__(self, directory: str, target: Target) -> None:
        self._config = target.config(num_threads=1)
        self.addresses = [Address(path=f"{directory}/{name}.sock") for name in ("one", "two")]
        self._planes: dict[int, PlaneProcess] = {}

    def start(self, index: int) -> None:
        self._planes[index] = plane = start_compute_plane(self._config, self.addresses[index])
        plane.wait_ready()

    def kill(self, index: int) -> None:
        os.kill(self._planes[index].pid, signal.SIGKILL)
        self._planes[index].stop()

    def stop(self) -> None:
        for plane in self._planes.values():
            plane.stop()

    def num_steps(self, index: int) -> int:
        """Steps run in the plane's life, as it says itself."""
        with grpc.insecure_channel(self.addresses[index].target) as channel:
            stub = compute_pb2_grpc.ComputeServiceStub(channel)
            return int(stub.Describe(compute_pb2.DescribeRequest(), timeout=60).last_step)

    def wait_until_used(self, index: int, server: Server) -> None:
        """Ask until requests go there, two at a time, so that both planes are wanted."""
        before = self.num_steps(index)

        def is_used() -> bool:
            server.ask_together(SHORT_REQUESTS)
            return self.num_steps(index) > before

        server.wait_until(is_used)


class Fleet:
    """The planes, their server, and what one plane alone answers."""

    def __init__(self, compute: TwoPlanes, server: Server) -> None:
        self.compute, self.server = compute, server
        self.texts_of_one_plane = server.ask_together(REQUESTS)


@pytest.fixture(scope="module")
def fleet(target) -> Iterator[Fleet]:
    with private_directory() as directory:
        compute = TwoPlanes(str(directory), target)
        try:
            compute.start(0)  # the other one comes later
            names = ",".join(map(str, compute.addresses))
            with start_control_plane(EngineConfig(), names, "--grpc-port=0") as control:
                control.wait_ready()
                assert control.address is not None
                with Server(control.address) as server:
                    made = Fleet(compute, server)
                    compute.start(1)
                    compute.wait_until_used(1, server)
                    yield made
        finally:
            compute.stop()


def read_all(server: Server, has_begun: threading.Barrier, asked: pb.GenerateRequest) -> list[int]:
    """The tokens of a stream; says when the first has come."""
    tokens: list[int] = []
    for response in server.stub.GenerateStream(asked, timeout=120):
        if response.HasField("delta"):
            if not tokens:
                has_begun.wait(60)
            assert response.delta.offset == len(tokens)
            tokens.extend(response.delta.token_ids)
    return tokens


@pytest.mark.wide
def test_two_planes_share_the_load_and_give_the_texts_of_one(fleet, judge):
    before = [fleet.compute.num_steps(index) for index in range(2)]
    answers = fleet.server.ask_together(REQUESTS)
    check_tokens(judge, REQUESTS, answers, fleet.texts_of_one_plane)
    steps = [fleet.compute.num_steps(index) - before[index] for index in range(2)]
    assert all(0.4 <= share / sum(steps) <= 0.6 for share in steps), steps
    fleet.server.wait_until(lambda: fleet.server.memory.used_blocks == 0)


@pytest.mark.wide
def test_when_one_of_two_planes_is_killed_no_request_is_lost_or_changed(fleet, judge):
    compute, server = fleet.compute, fleet.server
    before = server.metrics
    has_begun = threading.Barrier(NUM_REQUESTS + 1)
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        answers = [pool.submit(read_all, server, has_begun, asked) for asked in REQUESTS]
        has_begun.wait(60)  # every stream has its first tokens, and most are to come
        compute.kill(0)
        tokens = [answer.result() for answer in answers]
    check_tokens(judge, REQUESTS, [[each] for each in tokens], fleet.texts_of_one_plane)
    after = server.metrics
    assert after.completed_requests - before.completed_requests == NUM_REQUESTS
    assert after.failed_requests == before.failed_requests
    server.wait_until(lambda: server.memory.used_blocks == 0)
    compute.start(0)  # and it has its part again
    compute.wait_until_used(0, server)
