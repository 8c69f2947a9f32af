"""Stops, log-probabilities, resume, chat, tokenizer, administration: over gRPC, on a fake plane."""

from __future__ import annotations

import dataclasses

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from control_plane.api.services import SERVICES
from control_plane.core.generation_params import GenerationParams
from protos.hetero.inference.v1 import inference_pb2 as pb
from tests.control_plane.api.services import Services

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}!{{ c.function.name }}({{ c.function.arguments.x }})"
    "{% endfor %}{% endfor %}{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def fake_plane(fake_plane_class, tmp_path_factory):
    plane = fake_plane_class(f"unix:{tmp_path_factory.mktemp('plane')}/compute.sock")
    plane.features = ("copies", "sampled_slots", "logprobs", "prompt_logprobs")
    plane.start()
    yield plane
    plane.kill()


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    path = tmp_path_factory.mktemp("template") / "chat.jinja"
    path.write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def control_plane(fake_plane, start_control_plane, template):
    process = start_control_plane(fake_plane, f"--chat-template={template}")
    process.ready()
    yield process
    process.close()


@pytest.fixture(autouse=True)
def _calm_plane(fake_plane):
    yield
    fake_plane.calm()


def ask(text, *, max_tokens=12, **sampling):
    sampling.setdefault("seed", 0)
    params = pb.SamplingParams(max_tokens=max_tokens, **sampling)
    return pb.GenerateRequest(text=text, sampling=params)


def events_of(stream):
    """The events by kind; the deltas in order."""
    found = {}
    for message in stream:
        kind = message.WhichOneof("event")
        found.setdefault(kind, []).append(getattr(message, kind))
    return found


def text_of(events):
    return "".join(delta.text for delta in events["delta"])


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


def test_metadata_beyond_its_bound_is_refused_and_the_next_call_served(stub):
    with pytest.raises(grpc.RpcError) as caught:
        stub.GetMetrics(pb.GetMetricsRequest(), metadata=(("x-long", "y" * 64_000),))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    stub.GetMetrics(pb.GetMetricsRequest())


def test_a_conversation_is_answered_as_its_prompt_would_be(stub, expected):
    messages = [
        pb.ChatMessage(role="user", content="hi"),
        pb.ChatMessage(
            role="assistant",
            tool_calls=[pb.ToolCall(id="1", name="f", arguments_json='{"x": 3}')],
        ),
    ]
    tools = [pb.Tool(name="f", description="", parameters_json="{}")]
    prompt = stub.ApplyChatTemplate(pb.ApplyChatTemplateRequest(messages=messages, tools=tools))
    assert prompt.text == "<user>hi<assistant>!f(3)[f]<assistant>"
    assert list(prompt.token_ids) == list(prompt.text.encode())
    request = pb.ChatRequest(
        messages=messages, tools=tools, sampling=pb.SamplingParams(max_tokens=9, seed=3)
    )
    whole = expected(prompt.text, 9, 3)
    assert stub.Chat(request).text == text_of(events_of(stub.ChatStream(request))) == whole
    resumed = pb.ResumeRequest(chat=request, received_token_ids=whole[:4].encode())
    assert text_of(events_of(stub.Resume(resumed))) == whole[4:]
    bare = pb.ApplyChatTemplateRequest(messages=messages[:1], add_generation_prompt=False)
    assert stub.ApplyChatTemplate(bare).text == "<user>hi"


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.ChatRequest(), "messages"),
        (
            pb.ChatRequest(
                messages=[pb.ChatMessage(role="user")], tools=[pb.Tool(parameters_json="[1]")]
            ),
            "tools[0].parameters_json",
        ),
        (
            pb.ChatRequest(
                messages=[
                    pb.ChatMessage(
                        role="assistant", tool_calls=[pb.ToolCall(arguments_json="{" * 32_769)]
                    )
                ]
            ),
            "messages[0].tool_calls[0].arguments_json",
        ),
        (
            pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="x" * 140_000)]),
            "messages",
        ),
        (pb.ChatRequest(messages=[pb.ChatMessage(role="bot", content="x")]), "messages[0].role"),
        (
            pb.ChatRequest(messages=[pb.ChatMessage(role="user")], tools=[pb.Tool()]),
            "tools[0]",
        ),
        (
            pb.ChatRequest(messages=[pb.ChatMessage(role="user")], cache_salt="é" * 129),
            "cache_salt",
        ),
    ],
)
def test_what_is_no_conversation_is_refused(stub, request_, field, field_of):
    with pytest.raises(grpc.RpcError) as caught:
        stub.Chat(request_)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field_of(caught.value) == field


def test_text_becomes_tokens_and_tokens_text(stub, field_of):
    assert stub.Tokenize(pb.TokenizeRequest(text="")).token_ids == []
    ids = stub.Tokenize(pb.TokenizeRequest(text="hé")).token_ids
    assert list(ids) == list("hé".encode())
    detokenize = pb.DetokenizeRequest(token_ids=pb.TokenIds(ids=ids))
    assert stub.Detokenize(detokenize).text == "hé"
    for call, request, field in (
        (stub.Detokenize, pb.DetokenizeRequest(token_ids=pb.TokenIds(ids=[259])), "token_ids.ids"),
        (stub.Tokenize, pb.TokenizeRequest(text="x" * 200_000), "text"),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            call(request)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert field_of(caught.value) == field


def test_the_models_are_listed_and_another_one_is_not_found(stub):
    (info,) = stub.ListModels(pb.ListModelsRequest()).models
    assert info == stub.GetModelInfo(pb.GetModelInfoRequest(model="fake"))
    assert (info.model, info.has_chat_template) == ("fake", True)
    for call, request in (
        (stub.GetModelInfo, pb.GetModelInfoRequest(model="other")),
        (stub.Tokenize, pb.TokenizeRequest(model="other", text="x")),
        (stub.Chat, pb.ChatRequest(model="other")),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            call(request)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_request_is_aborted_by_its_name(stub, fake_plane):
    fake_plane.may_run.clear()
    stream = stub.GenerateStream(ask("x", max_tokens=50))
    request_id = next(stream).started.request_id
    stub.Abort(pb.AbortRequest(request_id=request_id))
    fake_plane.may_run.set()
    (finished,) = events_of(stream)["finished"]
    assert finished.finish_reason == pb.FINISH_REASON_CANCELLED
    for unknown, code in (
        (request_id, grpc.StatusCode.NOT_FOUND),
        ("", grpc.StatusCode.INVALID_ARGUMENT),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            stub.Abort(pb.AbortRequest(request_id=unknown))
        assert caught.value.code() is code


def test_the_prefix_cache_is_flushed(stub):
    request = ask("a prompt that is long enough", max_tokens=2)
    stub.Generate(request)
    assert stub.Generate(request).usage.cached_tokens > 0
    assert stub.FlushPrefixCache(pb.FlushPrefixCacheRequest()).num_blocks > 0
    assert stub.Generate(request).usage.cached_tokens == 0


def test_each_service_has_its_health(channel):
    health = health_pb2_grpc.HealthStub(channel)
    assert len(SERVICES) == 4
    for service in SERVICES:
        request = health_pb2.HealthCheckRequest(service=service)
        assert health.Check(request).status == SERVING
        watch = health.Watch(request, timeout=60)
        assert next(watch).status == SERVING
        watch.cancel()


def test_a_drained_server_takes_nothing_new_and_finishes_what_runs(
    launch_with_template, fake_plane, expected
):
    process = launch_with_template()
    with grpc.insecure_channel(process.address) as channel:
        stub = Services(channel)
        fake_plane.may_run.clear()
        stream = stub.GenerateStream(ask("hello", max_tokens=20))
        assert next(stream).HasField("started")
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service=SERVICES[0]), timeout=60
        )
        assert next(watch).status == SERVING
        assert stub.Drain(pb.DrainRequest()).num_requests == 1
        assert next(watch).status == NOT_SERVING
        with pytest.raises(grpc.RpcError) as caught:
            stub.Generate(ask("hello"))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        fake_plane.may_run.set()
        assert text_of(events_of(stream)) == expected("hello", 20)


@pytest.fixture
def launch_with_template(fake_plane, start_control_plane, template):
    """A control plane of its own takes the plane over: it comes last in this file."""
    started = []

    def start():
        process = start_control_plane(fake_plane, f"--chat-template={template}")
        process.ready()
        started.append(process)
        return process

    yield start
    for process in started:
        process.close()
