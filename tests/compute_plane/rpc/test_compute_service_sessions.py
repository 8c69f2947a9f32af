from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import grpc
import pytest
import structlog
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from compute_plane.executor.sessions import LEASE_S
from compute_plane.executor.step import StepBatch
from compute_plane.rpc import streams
from compute_plane.rpc.server import MAX_REFLECTION_STREAMS, NUM_WORKERS
from compute_plane.rpc.servicer import MAX_STREAMS
from protos.hetero.compute.v1 import compute_pb2
from tests.compute_plane.rpc.plane_harness import (
    SERVICE,
    TIMEOUT_S,
    Harness,
    decode_parts,
    first_batch_parts,
    reason,
    violated_fields,
)
from tests.waiting import wait_until


def test_describe_says_what_the_plane_is(shared_plane: Harness):
    controller = shared_plane.open()
    controller.run(**first_batch_parts())
    answer = shared_plane.describe()
    assert answer.protocol_version == 1
    assert (answer.block_size, answer.num_blocks) == (4, 96)
    assert answer.model.vocab_size == 259
    assert answer.executor == "simulated"
    assert answer.device.kind == "simulated"
    assert answer.limits.max_slots == 8
    assert answer.max_batches_in_flight == 2
    assert answer.epoch == controller.epoch != 0
    assert answer.current_session == controller.session
    assert answer.last_step == 1
    assert "copies" in answer.features
    assert answer.software_version


def test_the_simulated_models_assets_are_the_simple_tokenizer(shared_plane: Harness):
    assets = shared_plane.stub.GetModelAssets(compute_pb2.GetModelAssetsRequest())
    assert assets.WhichOneof("tokenizer") == "simple"
    assert assets.simple.vocab_size == 259
    assert (assets.bos_token_id, list(assets.eos_token_ids), assets.pad_token_id) == (
        256,
        [257],
        258,
    )
    assert assets.context_length > 0


def test_sessions_increase_and_start_at_step_zero(shared_plane: Harness):
    first, second = shared_plane.open(), shared_plane.open()
    assert second.session == first.session + 1
    assert second.last_step == 0


def test_a_new_session_knows_no_slot_of_the_one_before(shared_plane: Harness):
    shared_plane.open().run(**first_batch_parts())
    with pytest.raises(grpc.RpcError) as caught:
        shared_plane.open().run(**decode_parts(5))
    assert violated_fields(caught.value) == ["slots[0]"]


def test_another_protocol_version_is_refused(shared_plane: Harness):
    with pytest.raises(grpc.RpcError) as caught:
        shared_plane.stub.Open(compute_pb2.OpenRequest(protocol_version=2, take_over=True))
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert reason(caught.value) == "PROTOCOL_MISMATCH"
    assert violated_fields(caught.value) == ["protocol_version"]


def test_a_session_with_a_stream_keeps_a_second_controller_out(own_plane: Harness):
    first = own_plane.open("first")
    with first.stream() as stream:
        stream.send(first.batch(**first_batch_parts()))
        stream.receive()
        with pytest.raises(grpc.RpcError) as caught:
            own_plane.open("second", take_over=False)
        assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert reason(caught.value) == "SESSION_HELD"
        assert "'first'" in caught.value.details()
        stream.send(first.batch(**decode_parts(5)))
        assert stream.receive().step_id == 2


def test_who_is_refused_again_and_again_is_logged_once_until_a_session_is_opened(
    own_plane: Harness,
):
    sessions = own_plane.plane._sessions

    def refused(*controllers: str) -> None:
        wait_until(lambda: sessions._stream is not None, "its stream counts")
        for controller in controllers:
            with pytest.raises(grpc.RpcError):
                own_plane.open(controller, take_over=False)

    with structlog.testing.capture_logs() as lines:
        with own_plane.open("first").stream():
            refused("second", "second", "third", "second", "third")
        wait_until(lambda: sessions._stream is None, "its stream has gone")
        with own_plane.open("fourth").stream():
            refused("second")
    found = [line for line in lines if line["event"] == "open refused"]
    warned = [line["controller"] for line in found if line["log_level"] == "warning"]
    assert warned == ["second", "third", "second"]
    assert {line["reason"] for line in found} == {"SESSION_HELD"}


def test_who_asks_a_new_process_for_the_session_of_the_old_one_is_no_reason_to_warn(
    own_plane: Harness,
):
    lost = compute_pb2.OpenRequest(
        protocol_version=1, controller="first", resume_session=1, resume_epoch=1
    )
    with structlog.testing.capture_logs() as lines, pytest.raises(grpc.RpcError):
        own_plane.stub.Open(lost, timeout=TIMEOUT_S)
    (line,) = [line for line in lines if line["event"] == "open refused"]
    assert (line["reason"], line["log_level"]) == ("STALE_EPOCH", "info")


def test_a_controller_that_has_sent_nothing_on_its_stream_is_alive(own_plane: Harness):
    first, sessions = own_plane.open("first"), own_plane.plane._sessions
    with first.stream():
        wait_until(lambda: sessions._stream is not None, "its stream counts")
        sessions._clock = lambda: time.monotonic() + 2 * LEASE_S
        with pytest.raises(grpc.RpcError, match="controller 'first' is alive"):
            own_plane.open("second", take_over=False)


def test_a_controller_whose_stream_has_ended_keeps_nobody_out(own_plane: Harness):
    first, sessions = own_plane.open("first"), own_plane.plane._sessions
    with first.stream() as stream:
        stream.send(first.batch(**first_batch_parts()))
        stream.receive()
    wait_until(lambda: sessions._stream is None, "its stream has gone")
    assert own_plane.open("second", take_over=False).session == first.session + 1


def test_a_controller_that_waits_for_its_unary_call_is_alive(own_plane: Harness):
    first, sessions = own_plane.open("first"), own_plane.plane._sessions
    own_plane.executor.gate.clear()
    sessions._clock = lambda: time.monotonic() + 0.9 * LEASE_S
    batch = first.batch(**first_batch_parts())
    call = own_plane.stub.ExecuteOne.future(batch, timeout=TIMEOUT_S)
    assert own_plane.executor.entered.acquire(timeout=TIMEOUT_S)
    sessions._clock = lambda: time.monotonic() + 1.2 * LEASE_S
    with pytest.raises(grpc.RpcError, match="controller 'first' is alive"):
        own_plane.open("second", take_over=False)
    own_plane.executor.gate.set()
    assert call.result().step_id == 1


def test_a_stream_that_ends_with_all_its_room_taken_leaves_no_thread(own_plane: Harness):
    def num_readers() -> int:
        return sum(thread.name == "execute-reader" for thread in threading.enumerate())

    before = num_readers()
    controller = own_plane.open()
    own_plane.executor.gate.clear()
    with controller.stream() as stream:
        stream.send(controller.batch(**first_batch_parts()))
        stream.send(controller.batch(**decode_parts(5)))
        assert own_plane.executor.entered.acquire(timeout=TIMEOUT_S)
        wait_until(lambda: own_plane.plane._device._queue.qsize() == 1, "one waits behind it")
        assert num_readers() == before + 1
    wait_until(lambda: num_readers() == before, "its reader has ended")


def test_callers_who_leave_a_step_that_does_not_end_leave_their_workers_to_others(
    own_plane: Harness,
):
    controller = own_plane.open()
    own_plane.executor.gate.clear()
    parts = first_batch_parts()

    def call() -> grpc.Future:
        return own_plane.stub.ExecuteOne.future(controller.batch(**parts), timeout=TIMEOUT_S)

    calls = [call()]
    # The number of a step is looked at when its turn comes; the others may arrive in any order.
    assert own_plane.executor.entered.acquire(timeout=TIMEOUT_S)
    calls += [call() for _ in range(NUM_WORKERS - 1)]
    queue = own_plane.plane._device._queue
    wait_until(lambda: queue.qsize() == NUM_WORKERS - 1, "all workers wait")
    for call in calls:
        call.cancel()
    assert own_plane.describe().current_session == controller.session


def test_a_taken_over_controllers_stream_ends_and_its_waiting_batch_is_not_run(
    own_plane: Harness,
):
    executor = own_plane.executor
    old = own_plane.open("old")
    with old.stream() as stream:
        executor.gate.clear()
        stream.send(old.batch(**first_batch_parts()))
        stream.send(old.batch(**decode_parts(5)))
        assert executor.entered.acquire(timeout=TIMEOUT_S)
        new = own_plane.open("new")
        ending = stream.ending()
        assert ending.code() == grpc.StatusCode.ABORTED
        assert reason(ending) == "SESSION_FENCED"
        executor.gate.set()
        new.run(**first_batch_parts(b"other"))
        assert [batch.input_tokens.tolist() for batch in executor.batches] == [
            list(b"hello"),
            list(b"other"),
        ]


def test_two_batches_are_under_way_and_the_third_is_held_back(
    own_plane: Harness, monkeypatch: pytest.MonkeyPatch
):
    executor = own_plane.executor
    controller = own_plane.open()
    ahead: list[int] = []  # at each batch taken off the wire: how many are not executed yet
    take = streams.batch_from_proto

    def watched_take(batch: compute_pb2.ExecutionBatch) -> StepBatch:
        ahead.append(batch.step_id - own_plane.describe().last_step)
        return take(batch)

    monkeypatch.setattr(streams, "batch_from_proto", watched_take)
    with controller.stream() as stream:
        executor.gate.clear()
        stream.send(controller.batch(**first_batch_parts()))
        for position in (5, 6, 7):
            stream.send(controller.batch(**decode_parts(position)))
        assert executor.entered.acquire(timeout=TIMEOUT_S)
        for _ in range(20):  # time enough for a third batch, were it not held back
            assert own_plane.describe().last_step == 0
        executor.gate.set()
        outputs = [stream.receive() for _ in range(4)]
    assert [output.step_id for output in outputs] == [1, 2, 3, 4]
    assert ahead[:2] == [1, 2]
    assert max(ahead) == 2
    piped = [token for output in outputs for token in output.sampled_token_ids]
    alone = own_plane.open()
    tokens = alone.run(**first_batch_parts())
    for position in (5, 6, 7):
        tokens += alone.run(**decode_parts(position))
    assert piped == tokens


def test_outputs_after_the_last_batch_arrive_before_the_stream_ends(shared_plane: Harness):
    controller = shared_plane.open()
    with controller.stream() as stream:
        stream.send(controller.batch(**first_batch_parts()))
        stream.send(controller.batch(**decode_parts(5)))
        stream.half_close()
        assert [output.step_id for output in stream.call] == [1, 2]
        assert stream.call.code() == grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("header", "wanted"),
    [
        ({"step_id": 5}, compute_pb2.REFUSAL_REASON_STEP_GAP),
        ({"epoch": 1}, compute_pb2.REFUSAL_REASON_STALE_EPOCH),
        ({"session": 1 << 40}, compute_pb2.REFUSAL_REASON_STALE_SESSION),
        ({"session": 0}, compute_pb2.REFUSAL_REASON_INVALID_BATCH),
        ({"epoch": 0}, compute_pb2.REFUSAL_REASON_INVALID_BATCH),
        ({"step_id": 0}, compute_pb2.REFUSAL_REASON_INVALID_BATCH),
        ({"acked_step": 9}, compute_pb2.REFUSAL_REASON_INVALID_BATCH),
    ],
)
def test_a_wrong_header_is_refused_in_band_and_nothing_is_executed(
    shared_plane: Harness, header: dict, wanted: int
):
    controller = shared_plane.open()
    executed = len(shared_plane.executor.batches)
    with controller.stream() as stream:
        stream.send(controller.batch(**first_batch_parts(), **header))
        refusal = stream.receive().refusal
        assert refusal.reason == wanted
        assert refusal.field == next(iter(header))
        assert refusal.expected_step == 1
        controller.last_step = 0
        assert len(shared_plane.executor.batches) == executed
        stream.send(controller.batch(**first_batch_parts()))
        assert not stream.receive().HasField("refusal")


def test_a_refused_step_may_be_corrected_or_passed_over(shared_plane: Harness):
    for repeat in (True, False):
        controller = shared_plane.open()
        with controller.stream() as stream:
            stream.send(controller.batch(slots=[0]))
            assert stream.receive().HasField("refusal")
            if repeat:
                controller.last_step -= 1
            stream.send(controller.batch(**first_batch_parts()))
            assert not stream.receive().HasField("refusal")


def test_a_step_sent_again_gets_the_same_reply_and_is_not_run_again(shared_plane: Harness):
    controller = shared_plane.open()
    batch = controller.batch(**first_batch_parts())
    with controller.stream() as stream:
        stream.send(batch)
        reply = stream.receive()
    executed = len(shared_plane.executor.batches)
    with controller.stream() as again:
        again.send(batch)
        assert again.receive() == reply
        assert len(shared_plane.executor.batches) == executed
        again.send(controller.batch(acked_step=1, **decode_parts(5)))
        assert not again.receive().HasField("refusal")
        again.send(batch)
        assert again.receive().refusal.reason == compute_pb2.REFUSAL_REASON_STEP_GAP


def test_a_newer_stream_of_the_same_session_replaces_the_older(shared_plane: Harness):
    controller = shared_plane.open()
    with controller.stream() as older, controller.stream() as newer:
        older.send(controller.batch(**first_batch_parts()))
        older.receive()
        newer.send(controller.batch(**decode_parts(5)))
        assert newer.receive().step_id == 2
        assert older.ending().code() == grpc.StatusCode.ABORTED


def test_streams_beyond_the_bound_are_refused_and_other_calls_still_answered(own_plane: Harness):
    controller = own_plane.open()
    with contextlib.ExitStack() as stack:
        for _ in range(MAX_STREAMS):
            stream = stack.enter_context(controller.stream())
            stream.send(controller.batch(session=1 << 40))
            assert stream.receive().HasField("refusal")
        ending = stack.enter_context(controller.stream()).ending()
        assert ending.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert reason(ending) == "TOO_MANY_STREAMS"
        own_plane.describe()


def test_reflection_lists_the_services(shared_plane: Harness):
    stub = reflection_pb2_grpc.ServerReflectionStub(shared_plane.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    (answer,) = stub.ServerReflectionInfo(iter([request]))
    names = {service.name for service in answer.list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= names


def test_reflection_streams_left_open_do_not_keep_other_calls_out(own_plane: Harness):
    stub = reflection_pb2_grpc.ServerReflectionStub(own_plane.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    over = threading.Event()

    def question() -> Iterator[reflection_pb2.ServerReflectionRequest]:
        yield request
        over.wait(TIMEOUT_S)

    calls = [stub.ServerReflectionInfo(question()) for _ in range(MAX_REFLECTION_STREAMS)]
    assert all(next(call).HasField("list_services_response") for call in calls)
    refused = [stub.ServerReflectionInfo(question()) for _ in range(NUM_WORKERS)]
    for call in refused:
        with pytest.raises(grpc.RpcError) as caught:
            next(call)
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert own_plane.describe().num_blocks
    over.set()
    for call in calls:
        assert list(call) == []
    assert list(stub.ServerReflectionInfo(iter([request])))
