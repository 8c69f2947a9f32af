"""Hundreds of clients at once on two real processes, some of whom leave: what stays behind."""

from __future__ import annotations

import os
import time
from collections import Counter

import grpc
import pytest
from grpc_status import rpc_status

from protos.hetero.inference.v1 import inference_pb2 as pb
from tests.control_plane.api.services import Services

NUM_STREAMS = 300
MAX_GROWTH_BYTES = 16 << 20
"""Between two equal storms; one leaked request in ten would cost more."""


@pytest.fixture(scope="module")
def control(compute, start_control_plane):
    process = start_control_plane(compute, "--max-queued-requests=20", "--max-num-seqs=40")
    process.ready()
    yield process
    process.close()


@pytest.fixture(scope="module")
def stub(control):
    with grpc.insecure_channel(control.address) as channel:
        yield Services(channel)


def stream(stub, i, max_tokens=12, **call):
    sampling = pb.SamplingParams(max_tokens=max_tokens, seed=i, ignore_eos=True)
    request = pb.GenerateRequest(text=f"prompt {i} " * (1 + i % 5), sampling=sampling)
    return stub.GenerateStream(request, **call)


def outcome(events):
    """How a stream ended: `finished`, or its status."""
    try:
        return list(events)[-1].WhichOneof("event")
    except grpc.RpcError as error:
        return error.code().name


def storm(stub, **call):
    """All streams at once; how they ended."""
    streams = [stream(stub, i, **call) for i in range(NUM_STREAMS)]
    return Counter(map(outcome, streams))


def wait_until_idle(stub):
    """What is left once every request is out of the books; they must add up."""
    deadline = time.monotonic() + 60
    while True:
        metrics = stub.GetMetrics(pb.GetMetricsRequest())
        if metrics.active_sequences == metrics.waiting_requests == 0:
            break
        assert time.monotonic() < deadline
    ended = metrics.completed_requests + metrics.failed_requests + metrics.cancelled_requests
    assert metrics.total_requests == ended
    memory = stub.GetMemoryStats(pb.GetMemoryStatsRequest())
    assert (memory.used_blocks, memory.num_sequences) == (0, 0)


def resident_bytes(pid):
    with open(f"/proc/{pid}/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descriptors(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.wide
def test_every_stream_of_a_storm_succeeds_or_is_exhausted_and_nothing_is_left(
    stub, control, compute
):
    pids = (control.process.pid, compute.process.pid)
    ends = storm(stub)
    wait_until_idle(stub)
    before = [(descriptors(pid), resident_bytes(pid)) for pid in pids]
    ends += storm(stub)
    wait_until_idle(stub)
    assert ends.total() == 2 * NUM_STREAMS
    assert ends.keys() <= {"finished", "RESOURCE_EXHAUSTED"}
    for pid, (num_descriptors, num_bytes) in zip(pids, before, strict=True):
        assert descriptors(pid) == num_descriptors
        assert resident_bytes(pid) - num_bytes < MAX_GROWTH_BYTES


@pytest.mark.slow
def test_ten_thousand_refusals_leave_the_memory_flat_and_each_says_when_to_come_again(
    launch, fake_plane
):
    process = launch("--max-queued-requests=1", "--max-num-seqs=1")
    fake_plane.may_run.clear()
    with grpc.insecure_channel(process.ready()) as channel:
        stub = Services(channel)
        held = [stream(stub, 0)]
        next(held[0])
        assert fake_plane.steps_seen.acquire(timeout=60)  # it runs now and waits no more
        held.append(stream(stub, 1))
        next(held[1])

        def refuse(count):
            request = pb.GenerateRequest(text="refused", sampling=pb.SamplingParams(max_tokens=5))
            calls = [stub.Generate.future(request) for _ in range(count)]
            errors = [call.exception() for call in calls]
            assert {error.code() for error in errors} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
            return errors

        for error in refuse(3):
            kinds = [detail.type_url for detail in rpc_status.from_call(error).details]
            assert "type.googleapis.com/google.rpc.RetryInfo" in kinds
        for _ in range(10):
            refuse(200)
        before = resident_bytes(process.process.pid)
        for _ in range(50):
            refuse(200)
        assert resident_bytes(process.process.pid) - before < MAX_GROWTH_BYTES
        fake_plane.may_run.set()
        assert [outcome(one) for one in held] == ["finished", "finished"]
        assert stub.GetMetrics(pb.GetMetricsRequest()).total_requests == 2


@pytest.mark.wide
def test_streams_that_meet_their_deadline_at_any_moment_leave_nothing(stub, control):
    assert outcome(stream(stub, 0)) == "finished"  # the client's connection is there from now on
    num_descriptors = descriptors(control.process.pid)
    ends = storm(stub, max_tokens=60, timeout=0.2)
    wait_until_idle(stub)
    assert ends["DEADLINE_EXCEEDED"] > 0
    assert ends.keys() <= {"finished", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"}
    assert descriptors(control.process.pid) == num_descriptors
    assert outcome(stream(stub, 1)) == "finished"


@pytest.mark.wide
def test_a_reader_that_does_not_read_holds_up_nobody(stub):
    """Its tokens wait at the server, its blocks do not."""
    unread = [stream(stub, i, max_tokens=60) for i in range(15)]
    assert outcome(stream(stub, 99)) == "finished"
    wait_until_idle(stub)
    for i, events in enumerate(unread):
        deltas = [event.delta for event in events if event.WhichOneof("event") == "delta"]
        assert sum(len(delta.token_ids) for delta in deltas) == 60, i
