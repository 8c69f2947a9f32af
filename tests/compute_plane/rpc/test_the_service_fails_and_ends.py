"""What callers are told when the executor fails, when the plane does, and when it is stopped."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from compute_plane.errors import DeviceLostError, PlaneDraining, SessionFenced
from compute_plane.executor.slots import SlotTable
from compute_plane.rpc import streams
from protos.hetero.compute.v1 import compute_pb2
from tests.compute_plane.rpc.plane_harness import (
    SERVICE,
    TIMEOUT_S,
    Harness,
    decode_parts,
    first_batch_parts,
    reason,
    start,
)
from tests.waiting import wait_until


def test_a_failing_executor_costs_its_batch_and_the_plane_stays_up(own_plane: Harness):
    controller = own_plane.open()
    other = {**first_batch_parts(b"other", slot=1, first_block=8)}
    controller.run(**other)
    own_plane.executor.failure = ValueError("the kernel broke")
    with controller.stream() as stream:
        stream.send(controller.batch(**first_batch_parts()))
        refusal = stream.receive().refusal
        assert refusal.reason == compute_pb2.REFUSAL_REASON_EXECUTION_FAILED
        assert "the kernel broke" in refusal.message
        stream.send(controller.batch(**decode_parts(5)))
        (failure,) = stream.receive().row_failures
        assert failure.reason == compute_pb2.ROW_FAILURE_REASON_POISONED
        stream.send(controller.batch(**decode_parts(5, slot=1)))
        assert not stream.receive().row_failures
        stream.send(controller.batch(**first_batch_parts()))
        assert not stream.receive().row_failures
    assert not own_plane.faults.is_set()


def test_a_failing_row_poisons_its_slot_also_for_batches_already_sent(own_plane: Harness):
    controller = own_plane.open()
    parts = {
        "starts": [start(0, b"good", [0, 1]), start(1, b"bad.", [2, 3])],
        "slots": [0, 1],
        "query_lens": [4, 4],
        "positions": [0, 0],
        "sampled_rows": [0, 1],
    }
    decode = {"slots": [1, 0], "query_lens": [1, 1], "positions": [4, 4], "sampled_rows": [0, 1]}
    expected = own_plane.open().run(**parts)[0]
    controller = own_plane.open()
    own_plane.executor.failed_rows = {1: "not finite"}
    with controller.stream() as stream:
        stream.send(controller.batch(**parts))
        stream.send(controller.batch(**decode))
        first, second = stream.receive(), stream.receive()
    (failure,) = first.row_failures
    assert (failure.row, failure.reason) == (1, compute_pb2.ROW_FAILURE_REASON_NOT_FINITE)
    assert first.sampled_token_ids[0] == expected
    (failure,) = second.row_failures
    assert (failure.row, failure.reason) == (0, compute_pb2.ROW_FAILURE_REASON_POISONED)
    assert second.sampled_token_ids[1] > 0


def test_a_fault_of_the_planes_own_code_answers_everybody_and_ends_the_plane(
    own_plane: Harness, monkeypatch: pytest.MonkeyPatch
):
    def broken_prepare(*_: object) -> NoReturn:
        raise ZeroDivisionError

    monkeypatch.setattr(SlotTable, "prepare", broken_prepare)
    controller = own_plane.open()
    with controller.stream() as stream:
        stream.send(controller.batch(**first_batch_parts()))
        ending = stream.ending()
    assert (ending.code(), reason(ending)) == (grpc.StatusCode.INTERNAL, "PLANE_BROKEN")
    assert own_plane.faults.wait(TIMEOUT_S)
    with pytest.raises(grpc.RpcError) as caught:
        own_plane.open()
    assert reason(caught.value) == "PLANE_BROKEN"


def test_a_device_that_is_lost_answers_everybody_and_ends_the_plane(own_plane: Harness):
    controller = own_plane.open()
    own_plane.executor.failure = DeviceLostError("an illegal address")
    with pytest.raises(grpc.RpcError) as info:
        controller.run(**first_batch_parts())
    assert reason(info.value) == "PLANE_BROKEN"
    assert own_plane.faults.wait(TIMEOUT_S)


def test_stopping_reports_not_serving_and_delivers_the_batches_under_way(own_plane: Harness):
    executor = own_plane.executor
    controller = own_plane.open()
    health = health_pb2_grpc.HealthStub(own_plane.channel)
    assert serving(health, "") == serving(health, SERVICE) == serving_status()
    watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=TIMEOUT_S)
    assert next(watch).status == serving_status()
    with controller.stream() as stream:
        executor.gate.clear()
        stream.send(controller.batch(**first_batch_parts()))
        assert executor.entered.acquire(timeout=TIMEOUT_S)
        stopping = threading.Thread(target=own_plane.plane.stop)
        stopping.start()
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        executor.gate.set()
        assert stream.receive().step_id == 1
        ending = stream.ending()
        assert ending.code() == grpc.StatusCode.UNAVAILABLE
        stopping.join(TIMEOUT_S)


def test_batches_under_way_are_answered_before_a_draining_plane_ends_the_stream(
    own_plane: Harness,
):
    executor, controller = own_plane.executor, own_plane.open()
    parts = [first_batch_parts(), decode_parts(5), decode_parts(6)]
    batches = [controller.batch(**part) for part in parts]
    third_is_wanted = threading.Event()

    def requests() -> Iterator[compute_pb2.ExecutionBatch]:
        yield from batches[:2]
        assert third_is_wanted.wait(TIMEOUT_S)
        yield batches[2]

    stream = streams.ExecuteStream(
        requests(),
        own_plane.plane._device,
        own_plane.plane._sessions,
        cut_off=lambda: None,
        max_in_flight=2,
    )
    replies = stream.replies()
    steps: list[int] = []
    first = threading.Thread(target=lambda: steps.append(next(replies).header.step_id))
    executor.gate.clear()
    first.start()
    assert executor.entered.acquire(timeout=TIMEOUT_S)
    wait_until(lambda: not own_plane.plane._device._queue.empty(), "the second is queued as well")
    own_plane.plane._device.stop(0)
    third_is_wanted.set()
    executor.gate.set()
    first.join(TIMEOUT_S)
    steps.append(next(replies).header.step_id)
    with pytest.raises(PlaneDraining):
        next(replies)
    assert steps == [1, 2]


def test_a_stream_that_is_ended_but_not_read_is_cut_off(
    own_plane: Harness, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(streams, "END_GRACE_S", 0.01)
    controller, was_cut_off = own_plane.open(), threading.Event()
    stream = streams.ExecuteStream(
        iter([controller.batch(**first_batch_parts())]),
        own_plane.plane._device,
        own_plane.plane._sessions,
        was_cut_off.set,
        2,
    )
    replies = stream.replies()
    next(replies)  # while nobody reads, gRPC does not come back for the next one
    stream.end(SessionFenced("over"))
    assert was_cut_off.wait(TIMEOUT_S)
    replies.close()


def test_health_of_an_unknown_service_is_not_found(shared_plane: Harness):
    with pytest.raises(grpc.RpcError) as caught:
        serving(health_pb2_grpc.HealthStub(shared_plane.channel), "nobody")
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    watch = health_pb2_grpc.HealthStub(shared_plane.channel).Watch(
        health_pb2.HealthCheckRequest(service="nobody"), timeout=TIMEOUT_S
    )
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    watch.cancel()


def serving_status() -> int:
    return health_pb2.HealthCheckResponse.SERVING


def serving(stub: health_pb2_grpc.HealthStub, service: str) -> int:
    return stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT_S).status


def test_a_plane_that_ends_leaves_the_socket_of_the_one_that_listens_there_by_now(tmp_path: Path):
    first = Harness(tmp_path)
    path = tmp_path / "compute.sock"
    path.unlink()  # as who tidies up directories for temporary files may do
    second = Harness(tmp_path)
    try:
        first.close()
        assert os.listdir(tmp_path) == ["compute.sock"]
        assert second.describe().current_session == 0
    finally:
        second.close()
    assert os.listdir(tmp_path) == []
