"""Several samples, tenants, priorities, request states: the public API on a fake compute plane."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from protos.hetero.inference.v1 import inference_pb2 as pb


@pytest.fixture(scope="module")
def fake_plane(fake_plane_class, tmp_path_factory):
    plane = fake_plane_class(f"unix:{tmp_path_factory.mktemp('plane')}/compute.sock")
    plane.start()
    yield plane
    plane.kill()


@pytest.fixture(scope="module")
def control_plane(fake_plane, start_control_plane):
    process = start_control_plane(fake_plane)
    process.ready()
    yield process
    process.close()


@pytest.fixture(autouse=True)
def _calm_plane(fake_plane):
    yield
    fake_plane.calm()


def ask(text, *, priority=0, cache_salt="", **sampling):
    sampling.setdefault("seed", 0)
    return pb.GenerateRequest(
        text=text,
        sampling=pb.SamplingParams(**sampling),
        priority=priority,
        cache_salt=cache_salt,
    )


def test_every_sample_has_its_deltas_one_end_and_the_text_it_has_in_a_unary_answer(stub, expected):
    request = ask("hello", max_tokens=11, seed=7, n=3)
    events = list(stub.GenerateStream(request))
    kinds = [event.WhichOneof("event") for event in events]
    assert (kinds[0], kinds[-1]) == ("started", "finished")
    assert events[0].started.sampling.n == 3
    texts, counts, ended = [""] * 3, [0] * 3, []
    for event in events[1:-1]:
        if event.HasField("delta"):
            delta = event.delta
            assert delta.index not in ended
            assert delta.offset == counts[delta.index]
            texts[delta.index] += delta.text
            counts[delta.index] += len(delta.token_ids)
        else:
            sample = event.sample_finished
            assert sample.finish_reason == pb.FINISH_REASON_LENGTH
            assert sample.completion_tokens == counts[sample.index] == 11
            ended.append(sample.index)
    assert sorted(ended) == [0, 1, 2]
    assert texts == [expected("hello", 11, 7, sample) for sample in range(3)]
    whole = stub.Generate(request)
    assert [sample.text for sample in whole.samples] == texts
    assert [sample.index for sample in whole.samples] == [0, 1, 2]
    assert (whole.text, whole.finish_reason) == (texts[0], pb.FINISH_REASON_LENGTH)
    assert whole.usage.completion_tokens == events[-1].finished.usage.completion_tokens == 33


def test_one_sample_has_neither_an_end_of_its_own_nor_a_list(stub):
    kinds = {e.WhichOneof("event") for e in stub.GenerateStream(ask("hello", max_tokens=3))}
    assert kinds == {"started", "delta", "finished"}
    assert len(stub.Generate(ask("hello", max_tokens=3)).samples) == 0


def test_usage_says_what_was_cached_and_a_salt_keeps_tenants_apart(stub):
    text = "a beginning that both prompts have"
    before = stub.GetMetrics(pb.GetMetricsRequest()).cached_tokens
    first, second, stranger = (
        stub.Generate(ask(text, max_tokens=3, cache_salt=salt)).usage.cached_tokens
        for salt in ("us", "us", "them")
    )
    assert (first, second, stranger) == (0, 32, 0)
    *_, last = stub.GenerateStream(ask(text, max_tokens=3, cache_salt="us"))
    assert last.finished.usage.cached_tokens == 32
    assert stub.GetMetrics(pb.GetMetricsRequest()).cached_tokens - before == 64
    memory = stub.GetMemoryStats(pb.GetMemoryStatsRequest())
    assert 0 < memory.cached_blocks <= memory.free_blocks == memory.total_blocks == 64
    assert (memory.used_blocks, memory.utilization, memory.internal_fragmentation) == (0, 0, 0)


def test_memory_says_what_is_used_and_what_of_it_is_empty(stub, fake_plane):
    fake_plane.may_run.clear()
    stream = stub.GenerateStream(ask("x" * 13, max_tokens=5))
    assert next(stream).HasField("started")
    assert fake_plane.steps_seen.acquire(timeout=60)
    memory = stub.GetMemoryStats(pb.GetMemoryStatsRequest())
    assert (memory.used_blocks, memory.num_sequences) == (4, 1)
    assert memory.utilization == 4 / 64
    # 16 places; 13 tokens of the prompt, and one more if the step after it is under way too.
    assert memory.internal_fragmentation in (pytest.approx(3 / 16), pytest.approx(2 / 16))
    fake_plane.may_run.set()
    assert list(stream)[-1].HasField("finished")


def states(changes):
    return [pb.RequestState.Name(change.state).removeprefix("REQUEST_STATE_") for change in changes]


def test_requests_are_listed_with_their_states_and_times(stub, fake_plane):
    answer = stub.Generate(ask("before", max_tokens=2))
    assert states(answer.states) == ["PENDING", "PREFILL", "DECODE", "COMPLETED"]
    times = [change.at_s for change in answer.states]
    assert times == sorted(times)
    assert (times[0], times[-1]) == (0.0, pytest.approx(answer.timings.total_s, abs=0.05))
    fake_plane.may_run.clear()
    stream = stub.GenerateStream(ask("now", max_tokens=2, n=2, priority=-3))
    request_id = next(stream).started.request_id
    assert fake_plane.steps_seen.acquire(timeout=60)
    (running,) = stub.ListRequests(pb.ListRequestsRequest()).requests
    assert (running.request_id, running.priority, running.prompt_tokens) == (request_id, -3, 3)
    assert states(running.states) == ["PENDING", "PREFILL"]
    assert running.state == pb.REQUEST_STATE_PREFILL
    assert list(running.completion_tokens) == [0, 0]
    assert running.finish_reason == pb.FINISH_REASON_UNSPECIFIED
    fake_plane.may_run.set()
    finished = list(stream)[-1].finished
    assert states(finished.states)[-1] == "COMPLETED"
    ended = stub.ListRequests(pb.ListRequestsRequest(include_ended=True)).requests
    assert [info.request_id for info in ended][-2:] == [answer.request_id, request_id]
    assert ended[-1].finish_reason == pb.FINISH_REASON_LENGTH
    assert len(stub.ListRequests(pb.ListRequestsRequest()).requests) == 0


@pytest.mark.parametrize(
    ("request_", "field", "said"),
    [
        (ask("x", n=0), "sampling.n", "1 to 128, got 0"),
        (ask("x", n=129), "sampling.n", "1 to 128, got 129"),
        (ask("x", beam_width=11), "sampling.beam_width", "1 to 10, got 11"),
        (ask("x", beam_width=2, n=3), "sampling.n", "at most beam_width (2), got 3"),
        (
            ask("x", beam_width=2, length_penalty=11),
            "sampling.length_penalty",
            "-10.0 to 10.0, got 11.0",
        ),
        (ask("x", length_penalty=2), "sampling.length_penalty", "without beam_width, got 2.0"),
        (ask("x", early_stopping=True), "sampling.early_stopping", "without beam_width, got True"),
        (ask("x", beam_width=2), "sampling.beam_width", "lacks logprobs, got 2"),
        (ask("x", cache_salt="s" * 257), "cache_salt", "at most 256 bytes, got 257"),
    ],
)
def test_what_is_out_of_range_is_refused_with_field_limit_and_value(stub, request_, field, said):
    with pytest.raises(grpc.RpcError) as caught:
        stub.Generate(request_)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert said in caught.value.details()
    violation = error_details_pb2.BadRequest()
    assert any(packed.Unpack(violation) for packed in rpc_status.from_call(caught.value).details)
    assert violation.field_violations[0].field == field
