"""Both planes as real processes; the simulated executor's text shows every wrong block."""

from __future__ import annotations

import grpc
import pytest

from protos.hetero.inference.v1 import inference_pb2 as pb
from tests.control_plane.api.services import Services


@pytest.fixture(scope="module")
def stub(compute, start_control_plane):
    process = start_control_plane(compute, "--memory-threshold=1.0")
    with grpc.insecure_channel(process.ready()) as channel:
        yield Services(channel)
    process.terminate()
    code, _ = process.wait()
    process.close()
    assert code == 0


def request(i, max_tokens=40):
    sampling = pb.SamplingParams(max_tokens=max_tokens, seed=i, temperature=0.8, ignore_eos=True)
    return pb.GenerateRequest(text=f"prompt {i} " * (1 + i % 5), sampling=sampling)


def text(events):
    return "".join(event.delta.text for event in events)


@pytest.mark.wide
def test_any_mix_gets_the_text_each_gets_alone_also_under_memory_pressure(stub):
    alone = [stub.Generate(request(i)).text for i in range(16)]
    streams = [stub.GenerateStream(request(i)) for i in range(16)]
    assert [text(stream) for stream in streams] == alone
    assert stub.GetMetrics(pb.GetMetricsRequest()).num_preemptions > 0
    assert stub.GetMemoryStats(pb.GetMemoryStatsRequest()).used_blocks == 0


def test_killing_the_compute_plane_in_mid_stream_changes_no_text(stub, compute):
    alone = [stub.Generate(request(i, 170)).text for i in range(2)]
    streams = [stub.GenerateStream(request(i, 170)) for i in range(2)]
    begun = [[next(stream) for _ in range(3)] for stream in streams]
    compute.kill()
    left = stub.GetMetrics(pb.GetMetricsRequest())
    assert left.active_sequences + left.waiting_requests > 0
    compute.start()
    rest = [list(stream) for stream in streams]
    assert [text(a) + text(b) for a, b in zip(begun, rest, strict=True)] == alone
    assert stub.GetMemoryStats(pb.GetMemoryStatsRequest()).used_blocks == 0
