"""Parameters, stops, log-probabilities and streams that are resumed: over gRPC, on a fake plane."""

from __future__ import annotations

import dataclasses

import grpc
import pytest

from control_plane.core.generation_params import GenerationParams
from protos.hetero.inference.v1 import inference_pb2 as pb
from tests.control_plane.api.text_over_grpc import (
    _calm_plane,
    ask,
    control_plane,
    events_of,
    fake_plane,
    template,
    text_of,
)

__all__ = ["_calm_plane", "control_plane", "fake_plane", "template"]


def test_every_parameter_is_on_the_wire_and_comes_back_as_it_takes_effect(stub):
    given = {
        "max_tokens": 3, "temperature": 0.3, "top_p": 0.8, "seed": 2**64 - 1, "ignore_eos": True,
        "n": 1, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.3, "presence_penalty": -0.7,
        "frequency_penalty": 0.2, "logit_bias": {65: -1.5, 66: 2.0}, "num_logprobs": 0,
        "stop": ["##", "\n"], "stop_token_ids": [1, 2], "include_stop": True,
        "num_prompt_logprobs": 1,
    }  # fmt: skip
    unset = {"beam_width", "length_penalty", "early_stopping"}  # of beam searches
    unset |= {"structured_outputs", "min_tokens"}  # which this plane does not keep to
    assert {field.name for field in dataclasses.fields(GenerationParams)} - unset == set(given)
    request = pb.GenerateRequest(text="x", sampling=pb.SamplingParams(**given))
    echoed = stub.Generate(request).sampling
    for name, value in given.items():
        assert getattr(echoed, name) == value, name
    defaults = stub.Generate(ask("x", max_tokens=3)).sampling
    assert (defaults.temperature, defaults.top_p, defaults.repetition_penalty) == (1.0, 0.9, 1.0)
    assert defaults.HasField("include_stop")
    assert not defaults.HasField("num_logprobs")


def test_a_plane_that_keeps_to_no_constraints_holds_nobody_from_ending(stub, field_of):
    with pytest.raises(grpc.RpcError) as caught:
        stub.Generate(ask("x", max_tokens=3, min_tokens=1))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field_of(caught.value) == "sampling.min_tokens"
    assert "for this compute plane, which lacks constraints, got 1" in caught.value.details()


def test_a_stop_string_is_told_and_never_shown(stub, expected):
    whole = expected("hello", 30)
    stop = whole[12:15]
    before = whole[: whole.index(stop)]
    request = ask("hello", max_tokens=30, stop=["##", stop])
    answer = stub.Generate(request)
    events = events_of(stub.GenerateStream(request))
    assert answer.text == text_of(events) == before
    assert list(answer.token_ids) == list(before.encode())
    (finished,) = events["finished"]
    for end in (answer, finished):
        assert (end.finish_reason, end.matched_stop.text) == (pb.FINISH_REASON_STOP, stop)
        assert end.usage.completion_tokens == len(before)
    token = ord(stop[0])
    by_token = stub.Generate(ask("hello", max_tokens=30, stop_token_ids=[token]))
    assert by_token.matched_stop.token_id == token
    assert not stub.Generate(ask("hello")).HasField("matched_stop")


def test_each_sample_says_what_ended_it(stub, expected):
    texts = [expected("hello", 20, 0, sample) for sample in range(2)]
    stop = texts[1][6:9]
    assert stop not in texts[0]
    request = ask("hello", max_tokens=20, n=2, stop=[stop])
    answer = stub.Generate(request)
    assert [sample.text for sample in answer.samples] == [texts[0], texts[1][:6]]
    assert [sample.matched_stop.text for sample in answer.samples] == ["", stop]
    ends = {end.index: end for end in events_of(stub.GenerateStream(request))["sample_finished"]}
    assert [ends[i].matched_stop.text for i in range(2)] == ["", stop]
    assert [ends[i].completion_tokens for i in range(2)] == [20, 6]


def test_log_probabilities_of_the_prompt_come_before_the_first_delta(stub):
    request = ask("hello", num_prompt_logprobs=2)
    kinds = [message.WhichOneof("event") for message in stub.GenerateStream(request)]
    assert kinds[:3] == ["started", "prompt_logprobs", "delta"]
    assert kinds.count("prompt_logprobs") == 1
    entries = stub.Generate(request).prompt_logprobs.logprobs
    assert [entry.logprob for entry in entries] == [-1, -2, -3, -4]
    assert list(entries[0].top_token_ids) == [97, 98]
    assert "prompt_logprobs" not in events_of(stub.GenerateStream(ask("hello")))


def test_log_probabilities_stay_beside_their_tokens(stub):
    request = ask("hello", num_logprobs=2, n=2, stop=["never there"])
    answer = stub.Generate(request)
    for sample in answer.samples:
        assert [entry.logprob for entry in sample.logprobs] == [-t / 8 for t in sample.token_ids]
        assert list(sample.logprobs[0].top_token_ids) == [0, 1]
    assert answer.logprobs == answer.samples[0].logprobs
    for delta in events_of(stub.GenerateStream(request))["delta"]:
        assert [entry.logprob for entry in delta.logprobs] == [-t / 8 for t in delta.token_ids]


@pytest.mark.parametrize("num_received", [0, 1, 11, 19, 20])
def test_a_broken_stream_goes_on_as_it_would_have(stub, expected, num_received):
    whole = expected("hello", 20, 5)
    request = pb.ResumeRequest(
        generate=ask("hello", max_tokens=20, seed=5),
        received_token_ids=whole[:num_received].encode(),
    )
    events = events_of(stub.Resume(request))
    (started,), (finished,) = events["started"], events["finished"]
    assert started.received_tokens == num_received
    deltas = events.get("delta", [])
    assert "".join(delta.text for delta in deltas) == whole[num_received:]
    offsets = [delta.offset for delta in deltas]
    assert offsets == sorted(offsets)
    assert offsets[:1] == [num_received][: len(offsets)]
    assert finished.finish_reason == pb.FINISH_REASON_LENGTH
    assert finished.usage.completion_tokens == 20


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.ResumeRequest(), "request"),
        (pb.ResumeRequest(generate=ask("x", n=2), received_token_ids=[97]), "sampling.n"),
        (
            pb.ResumeRequest(
                generate=pb.GenerateRequest(text="x"),
                received_token_ids=[97],
            ),
            "sampling.seed",
        ),
        (
            pb.ResumeRequest(generate=ask("x", max_tokens=1), received_token_ids=[97, 98]),
            "received_token_ids",
        ),
        (pb.ResumeRequest(generate=ask("x"), received_token_ids=[9999]), "received_token_ids"),
    ],
)
def test_what_cannot_be_resumed_is_refused(stub, request_, field, field_of):
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Resume(request_))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field_of(caught.value) == field


@pytest.mark.parametrize(
    ("sampling", "field", "said"),
    [
        ({"stop": ["a"] * 17}, "stop", "at most 16 texts, got 17"),
        ({"stop": ["a" * 257]}, "stop", "got one of 257"),
        ({"stop": [""]}, "stop", "got one of 0"),
        ({"stop_token_ids": [1] * 65}, "stop_token_ids", "at most 64"),
        ({"stop_token_ids": [5000]}, "stop_token_ids", "0 to 258, got 5000"),
        ({"num_logprobs": 21}, "num_logprobs", "0 to 20, got 21"),
        ({"num_prompt_logprobs": 21}, "num_prompt_logprobs", "0 to 20, got 21"),
        ({"min_p": 1.5}, "min_p", "0 to 1, got 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty", "greater than 0"),
        ({"logit_bias": {65: 101.0}}, "logit_bias", "-100.0 to 100.0, got 101.0"),
        ({"temperature": float("nan")}, "temperature", "0 to 2.0, got nan"),
        ({"n": 129}, "n", "1 to 128, got 129"),
        ({"min_tokens": 4, "max_tokens": 3}, "min_tokens", "at most max_tokens (3), got 4"),
    ],
)
def test_limits_are_checked_before_the_prompt_is_read(stub, sampling, field, said, field_of):
    request = ask("x" * 200_000, **sampling)  # itself too long
    if field == "stop_token_ids" and "258" in said:
        request.text = "x"  # how many tokens there are is checked with the prompt's
    with pytest.raises(grpc.RpcError) as caught:
        stub.Generate(request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field_of(caught.value) == f"sampling.{field}"
    assert said in caught.value.details()
