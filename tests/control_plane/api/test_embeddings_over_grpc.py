"""`Embed` over gRPC, on a fake plane."""

from __future__ import annotations

import math

import grpc
import pytest

from protos.hetero.inference.v1 import inference_pb2 as pb
from tests.control_plane.conftest import hidden_states


@pytest.fixture(scope="module")
def fake_plane(fake_plane_class, tmp_path_factory):
    plane = fake_plane_class(f"unix:{tmp_path_factory.mktemp('plane')}/compute.sock")
    plane.features = ("copies", "sampled_slots", "embeddings")
    plane.pooling = "mean"
    plane.start()
    yield plane
    plane.kill()


@pytest.fixture(scope="module")
def control_plane(fake_plane, start_control_plane):
    process = start_control_plane(fake_plane, "--pooling=last", "--max-model-len=64")
    process.ready()
    yield process
    process.close()


@pytest.fixture(autouse=True)
def _calm_plane(fake_plane):
    yield
    fake_plane.calm()


def inputs(*given):
    return [
        pb.EmbedInput(text=one)
        if isinstance(one, str)
        else pb.EmbedInput(token_ids=pb.TokenIds(ids=one))
        for one in given
    ]


def test_texts_and_tokens_have_an_embedding_each_and_are_counted(stub):
    texts = [f"text {number}" for number in range(70)]
    answer = stub.Embed(pb.EmbedRequest(inputs=inputs(*texts, list(b"tokens"))))
    assert answer.model == "fake"
    assert answer.request_id
    expected = [hidden_states(list(text.encode())) for text in [*texts, "tokens"]]
    for found, values in zip(answer.embeddings, expected, strict=True):
        length = math.hypot(*values)
        assert list(found.values) == pytest.approx([value / length for value in values])
        assert found.prompt_tokens == values[0]
    assert answer.usage.prompt_tokens == sum(values[0] for values in expected)
    assert answer.usage.completion_tokens == 0
    metrics = stub.GetMetrics(pb.GetMetricsRequest())
    assert metrics.completed_requests >= 71
    assert metrics.generated_tokens == 0
    ended = stub.ListRequests(pb.ListRequestsRequest(include_ended=True)).requests[-1]
    assert ended.request_id == f"{answer.request_id}-70"
    assert (ended.state, list(ended.completion_tokens)) == (pb.REQUEST_STATE_COMPLETED, [0])


def test_fewer_dimensions_and_lengths_as_they_are(stub):
    request = pb.EmbedRequest(inputs=inputs("hello"), dimensions=2, normalize=False)
    assert list(stub.Embed(request).embeddings[0].values) == hidden_states(list(b"hello"))[:2]


@pytest.mark.parametrize(
    ("request_", "code", "field"),
    [
        (pb.EmbedRequest(), "INVALID_ARGUMENT", "inputs"),
        (pb.EmbedRequest(inputs=inputs("")), "INVALID_ARGUMENT", "inputs"),
        (pb.EmbedRequest(inputs=inputs("a", "b" * 65)), "INVALID_ARGUMENT", "inputs[1]"),
        (pb.EmbedRequest(inputs=inputs("a", [999])), "INVALID_ARGUMENT", "inputs[1]"),
        (pb.EmbedRequest(inputs=[pb.EmbedInput()]), "INVALID_ARGUMENT", "inputs[0]"),
        (pb.EmbedRequest(inputs=inputs("a"), dimensions=4), "INVALID_ARGUMENT", "dimensions"),
        (
            pb.EmbedRequest(inputs=inputs("a"), cache_salt="x" * 257),
            "INVALID_ARGUMENT",
            "cache_salt",
        ),
        (pb.EmbedRequest(inputs=inputs("a"), model="other"), "NOT_FOUND", "model"),
    ],
)
def test_what_is_wrong_is_refused_by_name(stub, field_of, request_, code, field):
    with pytest.raises(grpc.RpcError) as caught:
        stub.Embed(request_)
    assert caught.value.code().name == code
    assert field_of(caught.value) == field


def test_a_text_whose_hidden_states_are_no_numbers_fails_the_call(stub, fake_plane):
    fake_plane.poisoned_prompt = b"bad"
    with pytest.raises(grpc.RpcError, match="NaN hidden states") as caught:
        stub.Embed(pb.EmbedRequest(inputs=inputs("good", "bad")))
    assert caught.value.code() is grpc.StatusCode.INTERNAL


def test_a_deadline_ends_all_texts_of_a_call(stub, fake_plane):
    fake_plane.may_run.clear()
    with pytest.raises(grpc.RpcError) as caught:
        stub.Embed(pb.EmbedRequest(inputs=inputs("one", "two")), timeout=0.3)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    fake_plane.may_run.set()
    stub.Embed(pb.EmbedRequest(inputs=inputs("three")))
    assert stub.GetMemoryStats(pb.GetMemoryStatsRequest()).used_blocks == 0
