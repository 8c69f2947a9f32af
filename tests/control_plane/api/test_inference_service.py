"""The public API of a control plane process, over gRPC, on a fake compute plane."""

from __future__ import annotations

import threading
import time

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from protos.hetero.inference.v1 import inference_pb2 as pb
from tests.control_plane.api.services import Services

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


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


def metrics_of(stub):
    return stub.GetMetrics(pb.GetMetricsRequest())


def ask(text=None, ids=None, model="", **sampling):
    sampling.setdefault("seed", 0)
    request = pb.GenerateRequest(model=model, sampling=pb.SamplingParams(**sampling))
    if text is not None:
        request.text = text
    if ids is not None:
        request.token_ids.ids.extend(ids)
    return request


def collect(stream):
    events = list(stream)
    assert events[0].WhichOneof("event") == "started"
    assert events[-1].WhichOneof("event") == "finished"
    deltas = [event.delta for event in events[1:-1]]
    assert all(event.WhichOneof("event") == "delta" for event in events[1:-1])
    return events[0].started, deltas, events[-1].finished


def details(error):
    found = {}
    for packed in rpc_status.from_call(error).details:
        for kind in (
            error_details_pb2.ErrorInfo,
            error_details_pb2.BadRequest,
            error_details_pb2.RetryInfo,
        ):
            if packed.Is(kind.DESCRIPTOR):
                found[kind] = kind()
                packed.Unpack(found[kind])
    return found


def used_blocks(stub):
    return stub.GetMemoryStats(pb.GetMemoryStatsRequest()).used_blocks


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline


def wait_for_health(channel, wanted):
    """Watch until the service's health is `wanted`."""
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)
    for response in watch:
        if response.status == wanted:
            watch.cancel()
            return
    raise AssertionError(wanted)


def test_the_streamed_text_is_the_unary_text(stub, expected):
    whole = stub.Generate(ask("hello", max_tokens=30, seed=7))
    started, deltas, finished = collect(stub.GenerateStream(ask("hello", max_tokens=30, seed=7)))
    assert whole.text == "".join(d.text for d in deltas) == expected("hello", 30, 7)
    assert list(whole.token_ids) == [t for d in deltas for t in d.token_ids]
    assert whole.finish_reason == finished.finish_reason == pb.FINISH_REASON_LENGTH
    for usage in (whole.usage, finished.usage):
        assert (usage.prompt_tokens, usage.completion_tokens) == (5, 30)
    assert started.prompt_tokens == 5
    assert started.model == whole.model == "fake"
    assert started.sampling == whole.sampling
    assert started.request_id != whole.request_id
    offsets = [d.offset for d in deltas]
    counts = [len(d.token_ids) for d in deltas]
    assert offsets == [sum(counts[:i]) for i in range(len(counts))]
    timings = finished.timings
    assert 0 < timings.queue_s <= timings.time_to_first_token_s <= timings.total_s


def test_a_length_that_is_not_given_is_cut_to_what_the_context_has_left(stub):
    request = ask("x" * 249)  # the pool has 64 blocks of 4, and the last token is not computed
    request.sampling.seed = 3
    whole = stub.Generate(request)
    assert (whole.sampling.max_tokens, whole.usage.completion_tokens) == (8, 8)
    started, _, _ = collect(stub.GenerateStream(request))
    assert started.sampling.max_tokens == 8
    events = stub.Resume(
        pb.ResumeRequest(generate=request, received_token_ids=list(whole.token_ids)[:3])
    )
    _, deltas, _ = collect(events)
    assert [t for d in deltas for t in d.token_ids] == list(whole.token_ids)[3:]
    assert stub.Generate(ask("x")).sampling.max_tokens == 100


def test_deltas_hold_whole_characters_only(stub, fake_plane):
    answer = "naïve 你好 👩‍👩‍👧 မြန်မာ"
    fake_plane.answer = answer.encode()
    _, deltas, finished = collect(stub.GenerateStream(ask("say?", max_tokens=100)))
    assert "".join(d.text for d in deltas) == answer
    assert not any("\ufffd" in d.text for d in deltas)
    assert finished.finish_reason == pb.FINISH_REASON_STOP
    assert finished.usage.completion_tokens == len(answer.encode())


def test_a_character_cut_off_by_max_tokens_is_in_the_tokens_and_not_in_the_text(stub, fake_plane):
    answer = "a👩".encode()
    fake_plane.answer = answer
    whole = stub.Generate(ask("say?", max_tokens=3))
    _, deltas, _ = collect(stub.GenerateStream(ask("say?", max_tokens=3)))
    assert whole.text == "".join(d.text for d in deltas) == "a"
    assert list(whole.token_ids) == [t for d in deltas for t in d.token_ids] == list(answer[:3])


def test_token_ids_are_a_prompt_too(stub, expected):
    assert stub.Generate(ask(ids=list(b"abc"), max_tokens=9)).text == expected("abc", 9)


def test_defaults_are_effective_and_a_drawn_seed_is_echoed_and_repeats(stub):
    first = stub.Generate(pb.GenerateRequest(text="x", sampling=pb.SamplingParams(max_tokens=20)))
    assert first.sampling.temperature == 1.0
    assert first.sampling.top_p == pytest.approx(0.9)
    assert first.sampling.HasField("seed")
    assert not first.sampling.ignore_eos
    again = stub.Generate(ask("x", max_tokens=20, seed=first.sampling.seed))
    assert again.text == first.text
    other = stub.Generate(pb.GenerateRequest(text="x", sampling=pb.SamplingParams(max_tokens=20)))
    assert other.sampling.seed != first.sampling.seed


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("request_", "field", "said"),
    [
        (ask("x", temperature=-0.5), "sampling.temperature", ["0 to 2.0", "-0.5"]),
        (ask("x", temperature=2.5), "sampling.temperature", ["2.0", "2.5"]),
        (ask("x", temperature=NAN), "sampling.temperature", ["nan"]),
        (ask("x", temperature=INF), "sampling.temperature", ["inf"]),
        (ask("x", top_p=0.0), "sampling.top_p", ["greater than 0", "0.0"]),
        (ask("x", top_p=1.5), "sampling.top_p", ["at most 1", "1.5"]),
        (ask("x", top_p=NAN), "sampling.top_p", ["nan"]),
        (ask("x", max_tokens=0), "sampling.max_tokens", ["at least 1", "got 0"]),
        (ask("x" * 8, max_tokens=2041), "sampling.max_tokens", ["8", "2041", "2048"]),
        (ask("x", max_tokens=2**32 - 1), "sampling.max_tokens", ["4294967295", "2048"]),
        (ask(""), "prompt", ["empty"]),
        (ask(), "prompt", ["text or token_ids"]),
        (ask(ids=[]), "prompt", ["at least 1 token"]),
        (ask(ids=[1, 259]), "token_ids.ids", ["0 to 258", "got 259 at index 1"]),
        (ask("x" * (2048 * 64 + 1)), "prompt", [str(2048 * 64), str(2048 * 64 + 1)]),
    ],
)
def test_a_bad_request_is_refused_with_field_limit_and_value(stub, request_, field, said):
    for call in (stub.Generate, lambda r: list(stub.GenerateStream(r))):
        with pytest.raises(grpc.RpcError) as caught:
            call(request_)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        (violation,) = details(caught.value)[error_details_pb2.BadRequest].field_violations
        assert violation.field == field
        assert violation.description == caught.value.details()
        assert all(word in violation.description for word in said)


def test_another_model_is_not_found(stub):
    with pytest.raises(grpc.RpcError) as caught:
        stub.Generate(ask("x", model="gpt"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    info = details(caught.value)[error_details_pb2.ErrorInfo]
    assert (info.reason, info.domain) == ("MODEL_NOT_FOUND", "hetero-paged-infer")
    assert stub.Generate(ask("x", model="fake", max_tokens=1)).model == "fake"


def test_a_message_that_is_none_is_the_callers_mistake(channel):
    generate = channel.unary_unary("/hetero.inference.v1.InferenceService/Generate")
    for data in (
        b"\xff\xff\xff",
        pb.GenerateRequest(text="abc").SerializeToString() + b"\x12\x01\xff",
    ):
        with pytest.raises(grpc.RpcError) as caught:
            generate(data)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "the message cannot be read" in caught.value.details()


def test_an_error_that_quotes_a_huge_value_is_still_that_error(stub):
    with pytest.raises(grpc.RpcError) as caught:
        stub.Generate(ask("x", model="模" * 100_000))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_what_can_never_fit_is_a_failed_precondition_and_in_no_count(stub):
    before = metrics_of(stub)
    with pytest.raises(grpc.RpcError) as caught:
        stub.Generate(ask("x", max_tokens=64 * 4 + 1))
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "65 KV blocks" in caught.value.details()
    found = details(caught.value)
    assert found[error_details_pb2.ErrorInfo].reason == "REQUEST_NEVER_FITS"
    assert found[error_details_pb2.BadRequest].field_violations[0].field == "sampling.max_tokens"
    assert metrics_of(stub) == before


@pytest.mark.parametrize("how", ["cancel", "deadline", "disconnect"])
def test_an_abandoned_stream_frees_its_blocks(control_plane, stub, how):
    with grpc.insecure_channel(control_plane.address) as other:
        abandoned = Services(other).GenerateStream(
            ask("x", max_tokens=250), timeout=0.05 if how == "deadline" else None
        )
        if how != "deadline":
            next(abandoned)
        if how == "cancel":
            abandoned.cancel()
        elif how == "disconnect":
            other.close()
        else:
            with pytest.raises(grpc.RpcError):
                list(abandoned)
        # A request that needs the whole pool cannot run beside what was abandoned.
        assert stub.Generate(ask("x", max_tokens=255)).usage.completion_tokens == 255
    assert used_blocks(stub) == 0


@pytest.mark.parametrize("moment", ["prefill", "decode"])
def test_a_cancelled_request_is_in_no_step_after_those_under_way(stub, fake_plane, moment):
    fake_plane.may_run.clear()
    before = metrics_of(stub)
    stream = stub.GenerateStream(ask("x", max_tokens=200))
    assert next(stream).WhichOneof("event") == "started"
    assert fake_plane.steps_seen.acquire(timeout=60)
    if moment == "decode":
        fake_plane.may_run.set()
        next(stream)
        fake_plane.may_run.clear()
    stream.cancel()
    wait_until(lambda: metrics_of(stub).cancelled_requests > before.cancelled_requests)
    num_steps = metrics_of(stub).num_steps
    fake_plane.may_run.set()
    wait_until(lambda: used_blocks(stub) == 0)
    after = metrics_of(stub)
    assert after.num_steps == num_steps  # its blocks waited for two steps at most
    assert after.active_sequences == after.waiting_requests == 0


def test_a_request_cancelled_after_its_end_has_ended(stub):
    before = metrics_of(stub)
    stream = stub.GenerateStream(ask("x", max_tokens=3))
    collect(stream)
    stream.cancel()
    after = metrics_of(stub)
    assert after.cancelled_requests == before.cancelled_requests
    assert after.completed_requests == before.completed_requests + 1


def test_an_abandoned_unary_call_frees_its_blocks(stub, fake_plane):
    before = metrics_of(stub)
    fake_plane.may_run.clear()
    call = stub.Generate.future(ask("x", max_tokens=200))
    fake_plane.steps_seen.acquire(timeout=60)
    call.cancel()
    fake_plane.may_run.set()
    assert stub.Generate(ask("x", max_tokens=255)).usage.completion_tokens == 255
    after = metrics_of(stub)
    assert after.total_requests - before.total_requests == 2
    assert after.cancelled_requests - before.cancelled_requests == 1
    assert used_blocks(stub) == 0


def test_a_poisoned_request_fails_alone_and_typed(stub, fake_plane):
    fake_plane.poisoned_prompt = b"bad"
    with pytest.raises(grpc.RpcError) as caught:
        stub.Generate(ask("bad"))
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert details(caught.value)[error_details_pb2.ErrorInfo].reason == "REQUEST_FAILED"
    assert stub.Generate(ask("good", max_tokens=3)).usage.completion_tokens == 3


def test_model_info_memory_and_metrics_say_what_is_there(stub):
    info = stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (info.model, info.vocab_size, info.max_model_len) == ("fake", 259, 2048)
    assert info.context_length == 4096
    before = metrics_of(stub)
    stub.Generate(ask("abc", max_tokens=10))
    memory = stub.GetMemoryStats(pb.GetMemoryStatsRequest())
    assert (memory.block_size, memory.total_blocks, memory.free_blocks) == (4, 64, 64)
    after = metrics_of(stub)
    assert after.total_requests - before.total_requests == 1
    assert after.completed_requests - before.completed_requests == 1
    assert after.prompt_tokens - before.prompt_tokens == 3
    assert after.generated_tokens - before.generated_tokens == 10
    assert after.num_steps - before.num_steps >= 10
    assert after.average_latency_s > 0
    assert after.tokens_per_second > 0


def test_many_streams_at_once_get_the_text_they_get_alone(stub, expected):
    streams = {i: stub.GenerateStream(ask(f"prompt {i}", max_tokens=12, seed=i)) for i in range(40)}
    for i, stream in streams.items():
        _, deltas, _ = collect(stream)
        assert "".join(d.text for d in deltas) == expected(f"prompt {i}", 12, i)
    assert used_blocks(stub) == 0


def test_health_knows_its_services_and_reflection_lists_them(channel):
    health = health_pb2_grpc.HealthStub(channel)
    for service in ("", "hetero.inference.v1.InferenceService"):
        assert health.Check(health_pb2.HealthCheckRequest(service=service)).status == SERVING
    with pytest.raises(grpc.RpcError) as caught:
        health.Check(health_pb2.HealthCheckRequest(service="nobody"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    # To a watcher an unknown service is no error: it may come, says the protocol.
    watch = health.Watch(health_pb2.HealthCheckRequest(service="nobody"), timeout=60)
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    watch.cancel()
    reflect = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
    (answer,) = reflect(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    names = {service.name for service in answer.list_services_response.service}
    assert {"hetero.inference.v1.InferenceService", "grpc.health.v1.Health"} <= names


def test_a_stream_continues_with_the_same_text_when_the_compute_plane_dies(
    channel, stub, fake_plane, expected
):
    stream = stub.GenerateStream(ask("survivor", max_tokens=120, seed=3))
    events = [next(stream) for _ in range(10)]
    fake_plane.may_run.clear()
    died = threading.Thread(target=fake_plane.kill)
    died.start()
    wait_for_health(channel, NOT_SERVING)
    died.join()
    fake_plane.start()
    wait_for_health(channel, SERVING)
    _, deltas, finished = collect([*events, *stream])
    assert "".join(d.text for d in deltas) == expected("survivor", 120, 3)
    assert finished.usage.completion_tokens == 120
    assert used_blocks(stub) == 0
