"""Requests to a real deployment, many at once or one after the other, and what they were told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc

from control_plane.api.convert import params_from_proto
from planes.address import Address
from protos.hetero.inference.v1 import inference_pb2 as pb
from protos.hetero.inference.v1 import inference_pb2_grpc
from tests.judging import Judge, Said
from tests.waiting import PATIENCE_S, wait_until


class Server:
    """A control plane as a client sees it."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.channel = grpc.insecure_channel(address.target)
        self.stub = inference_pb2_grpc.InferenceServiceStub(self.channel)
        self.admin = inference_pb2_grpc.AdminServiceStub(self.channel)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    def ask(self, request: pb.GenerateRequest) -> list[list[int]]:
        """The tokens of each sample."""
        answer = self.stub.Generate(request, timeout=PATIENCE_S)
        samples = list(answer.samples) or [answer]
        return [list(sample.token_ids) for sample in samples]

    def ask_together(self, requests: list[pb.GenerateRequest]) -> list[list[list[int]]]:
        with ThreadPoolExecutor(len(requests)) as pool:
            return list(pool.map(self.ask, requests))

    def ask_in_turn(self, requests: Iterable[pb.GenerateRequest]) -> list[list[list[int]]]:
        return [self.ask(request) for request in requests]

    @property
    def metrics(self) -> pb.GetMetricsResponse:
        return self.admin.GetMetrics(pb.GetMetricsRequest())

    @property
    def memory(self) -> pb.GetMemoryStatsResponse:
        return self.admin.GetMemoryStats(pb.GetMemoryStatsRequest())

    def wait_until(self, holds: Callable[[], bool]) -> None:
        wait_until(holds, "what the server is to say")


def check_tokens(
    judge: Judge,
    requests: Sequence[pb.GenerateRequest],
    answers: Sequence[Sequence[Sequence[int]]],
    expected: Sequence[Sequence[Sequence[int]]],
) -> None:
    """Check the tokens of each sample beside those of another run."""
    assert [len(samples) for samples in answers] == [len(samples) for samples in expected]
    said = [
        Said(asked.text, params_from_proto(asked.sampling), tokens, index)
        for asked, samples in zip(requests, answers, strict=True)
        for index, tokens in enumerate(samples)
    ]
    judge.check(said, [tokens for samples in expected for tokens in samples])


def request(text: str, max_tokens: int, **sampling: float) -> pb.GenerateRequest:
    """A request that ends at `max_tokens` and not before."""
    return pb.GenerateRequest(
        text=text,
        sampling=pb.SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling),
    )
