"""A hundred mixed requests to real processes, over both ports: the page says what they saw."""

from __future__ import annotations

import time
from dataclasses import replace

import grpc
import pytest

from control_plane.metrics.families import MODEL, PLANE, PREFIX, SERVICE, VLLM_PREFIX, sample_names
from hetero_infer.config import EngineConfig
from protos.hetero.inference.v1 import inference_pb2 as pb
from tests.faults.deployment import PATIENCE_S, Deployment, deployed, happens
from tests.integration.hostile.books import (
    Bookkeeper,
    Page,
    bookkeeper,
    follow_call,
    follow_response,
)

NUM_RUNNING, NUM_QUEUED = 4, 6
TEMPLATE = "{% for m in messages %}{{ m.role + ': ' + m.content }}\n{% endfor %}"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
FOREVER = 20_000
CONFIG = EngineConfig(
    executor="simulated", block_size=16, max_num_blocks=8192, max_model_len=30_000,
    max_num_seqs=NUM_RUNNING, max_queued_requests=NUM_QUEUED, compute_grace=PATIENCE_S,
)  # fmt: skip
IDLE = ("inflight_requests", "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    flags = ("--http", "--http-port=0", "--metrics-compat=vllm", f"--chat-template={template}")
    with deployed(replace(CONFIG), *flags) as made, made.explained():
        yield made


def sampling(max_tokens: int = 6, **fields) -> pb.SamplingParams:
    return pb.SamplingParams(max_tokens=max_tokens, seed=1, **fields)


def ask(text: str, max_tokens: int = 6, **fields) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, sampling=sampling(max_tokens, **fields))


def say(text: str) -> pb.ChatRequest:
    messages = [pb.ChatMessage(role="user", content=text)]
    return pb.ChatRequest(messages=messages, sampling=sampling())


def ask_by_grpc(keeper: Bookkeeper) -> None:
    for i in range(4):
        keeper.call("Generate", ask(f"g{i} " * 9))
        keeper.call("Generate", ask(f"g{i} " * 9, 5, n=2))
        keeper.stream("GenerateStream", ask(f"g{i} " * 9))
        keeper.stream("GenerateStream", ask(f"n{i}", 7, n=3))
        # One in 64 is the stop's first letter.
        keeper.stream("GenerateStream", ask(f"s{i}", 400, stop=["a", "b"], include_stop=True))
        keeper.call("Generate", ask(f"t{i}", 400, stop_token_ids=[99, 100, 101]))
        keeper.call("Chat", say(f"c{i}"))
        keeper.stream("ChatStream", say(f"c{i}"))
        keeper.call("Generate", ask("x", 0))
        keeper.stream("GenerateStream", ask("x", temperature=9.0))
    keeper.stream("Resume", pb.ResumeRequest(generate=ask("resumed"), received_token_ids=[97, 98]))
    keeper.call("Generate", pb.GenerateRequest(text="x", model="another"))
    keeper.call("Abort", pb.AbortRequest(request_id="nobody"))
    keeper.call("ListModels", pb.ListModelsRequest())
    keeper.call("Tokenize", pb.TokenizeRequest(text="x"))
    keeper.call("Detokenize", pb.DetokenizeRequest(token_ids=pb.TokenIds(ids=[999])))


def ask_by_http(keeper: Bookkeeper) -> None:
    base = {"model": keeper.model, "seed": 1}
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    for i in range(4):
        text = {**base, "prompt": f"h{i} " * 9, "max_tokens": 5}
        chat = {**base, "messages": [{"role": "user", "content": f"c{i}"}], "max_tokens": 5}
        said = {**base, "input": f"r{i}", "max_output_tokens": 5}
        keeper.completion(COMPLETIONS, text)
        keeper.completion(COMPLETIONS, {**text, "n": 2})
        keeper.completion(COMPLETIONS, {**text, "prompt": [f"i{i}", "j"]})
        keeper.completion(COMPLETIONS, {**text, **streamed, "n": 2})
        keeper.completion(CHAT, chat)
        keeper.completion(CHAT, {**chat, **streamed})
        keeper.response(said)
        keeper.response({**said, "stream": True})
        keeper.http("POST", COMPLETIONS, {**text, "surprise": 1})
        keeper.http("POST", COMPLETIONS, {**text, "max_tokens": -1})
        keeper.http("POST", CHAT, {**chat, "max_tokens": 2**31 - 1})
    keeper.http("POST", COMPLETIONS, b"{")
    keeper.http("POST", COMPLETIONS, b"{}", kind="text/plain")
    keeper.http("POST", COMPLETIONS, {**text, "model": "another"})
    keeper.http("POST", "/tokenize", {"prompt": "x"})
    keeper.http("POST", "/detokenize", {"tokens": [999]})
    keeper.http("GET", "/v1/models")
    keeper.http("GET", "/v1/models/another", counts_as="/v1/models/{model}")
    keeper.http("GET", "/nowhere/secret", counts_as="other")


def crowd(keeper: Bookkeeper, deployment: Deployment) -> None:
    """All places taken for ever, the queue full, the rest refused; then everybody leaves."""
    seen, (plane,) = keeper.seen, deployment.compute
    tokens_before = seen.tokens
    followers = []
    for i in range(NUM_RUNNING):
        prompt = f"forever {i}"
        num_prompt_tokens = len(prompt.encode())
        if i % 2:
            call = keeper.method("GenerateStream")(ask(prompt, FOREVER, ignore_eos=True))
            followers.append(follow_call(call))
            seen.streams["grpc"] += 1
        else:
            body = {"model": keeper.model, "prompt": prompt, "max_tokens": FOREVER, "stream": True,
                    "ignore_eos": True, "logprobs": 0}  # fmt: skip
            seen.requests["http", COMPLETIONS] += 1
            followers.append(follow_response(*keeper.open("POST", COMPLETIONS, body)))
            seen.streams["http"] += 1
        seen.note_prompt(num_prompt_tokens)
    for follower in followers:
        assert follower.has_begun.wait(PATIENCE_S)
    plane.stop()
    try:
        waiting = []
        for i in range(NUM_QUEUED // 2):
            call = keeper.method("GenerateStream")(ask(f"queue {i}", 9))
            assert next(call).started.prompt_tokens == 7
            body = {"model": keeper.model, "prompt": f"queue {i}", "stream": True}
            seen.requests["http", COMPLETIONS] += 1
            waiting += [call.cancel, follow_response(*keeper.open("POST", COMPLETIONS, body)).leave]
            seen.streams.update(grpc=1, http=1)
            seen.note_prompt(7, is_computed=False)
            seen.note_prompt(7, is_computed=False)
        for i in range(3):
            keeper.call("Generate", ask(f"late {i}"))
            keeper.stream("GenerateStream", ask(f"late {i}"))
            for stream in (False, True):
                body = {"model": keeper.model, "prompt": "late", "stream": stream}
                keeper.http("POST", COMPLETIONS, body)
        # Every token that was given to a request is on its way to its client.
        given = keeper.page().total("hetero_generation_tokens_total") - tokens_before

        def num_read() -> int:
            return sum(follower.num_tokens for follower in followers)

        assert happens(lambda: num_read() == given, PATIENCE_S), (num_read(), given)
        for leave in waiting:
            leave()
        for follower in followers:
            follower.leave()
            seen.note_tokens(follower.num_tokens, has_ended=False)
        seen.cancelled += len(waiting) + len(followers)
        cancelled = "hetero_requests_cancelled_total"
        assert happens(lambda: keeper.page().total(cancelled) == seen.cancelled, PATIENCE_S)
    finally:
        plane.wake()


def settled(keeper: Bookkeeper) -> Page:
    """The page once nobody is served any more."""
    deadline = time.monotonic() + PATIENCE_S
    while any(map((page := keeper.page()).total, (PREFIX + name for name in IDLE))):
        assert time.monotonic() < deadline
    return page


def compare(keeper: Bookkeeper, page: Page) -> None:
    seen = keeper.seen
    assert page.by("hetero_requests_total", "protocol", "method") == dict(seen.requests)
    assert page.by("hetero_errors_total", "protocol", "reason") == dict(seen.errors)
    assert page.by("hetero_streaming_requests_total", "protocol") == dict(seen.streams)
    assert page.by("hetero_request_success_total", "finished_reason") == dict(seen.ends)
    counts = {
        "requests_cancelled_total": seen.cancelled,
        "prompt_tokens_total": seen.prompt_tokens,
        "generation_tokens_total": seen.tokens,
        "prefix_cache_queries_total": seen.looked_up,
        "prefix_cache_hits_total": seen.cached,
        "time_to_first_token_seconds_count": seen.firsts,
        "inter_token_latency_seconds_count": seen.gaps,
        "num_preemptions_total": 0, "num_swaps_total": 0, "plane_up": 1,
    }  # fmt: skip
    for name in ("e2e_request_latency", "request_queue_time"):
        counts[f"{name}_seconds_count"] = seen.ends.total()
    for name in ("request_prefill_time", "request_decode_time"):
        counts[f"{name}_seconds_count"] = seen.begun
    assert {name: page.total(PREFIX + name) for name in counts} == counts


@pytest.mark.wide
def test_a_hundred_mixed_requests_saw_what_the_page_says(deployment):
    with bookkeeper(deployment.address, deployment.control.http_address, "simulated") as keeper:
        ask_by_grpc(keeper)
        compare(keeper, settled(keeper))
        ask_by_http(keeper)
        compare(keeper, settled(keeper))
        crowd(keeper, deployment)
        page = settled(keeper)
        compare(keeper, page)
        seen = keeper.seen
        assert seen.requests.total() > 100
        # All kinds were among them.
        assert set(seen.ends) == {"stop", "length"}
        assert seen.cached > 0
        assert seen.cancelled == NUM_RUNNING + NUM_QUEUED
        assert seen.errors["grpc", "QUEUE_FULL"] == seen.errors["http", "QUEUE_FULL"] == 6
        # Steps are no client's; the operator is told of them elsewhere, too.
        told = keeper.method("GetMetrics")(pb.GetMetricsRequest())
        page = settled(keeper)
        for name in (
            "iteration_tokens_total",
            "plane_step_seconds",
            "plane_rtt_seconds",
            "scheduler_step_seconds",
        ):
            assert page.total(f"{PREFIX}{name}_count") == told.num_steps
        assert page.total("hetero_plane_losses_total") == told.num_plane_losses
        assert page.total("hetero_plane_stalls_total") == told.num_stalls
        compare(keeper, page)


@pytest.mark.wide
def test_vllms_names_have_the_same_numbers(deployment):
    with bookkeeper(deployment.address, deployment.control.http_address, "simulated") as keeper:
        page = settled(keeper)
        families = [*SERVICE.values(), *MODEL.values(), *PLANE.values()]
        twice = sample_names((f for f in families if f.is_vllms), VLLM_PREFIX)
        assert {name for name, _ in page.samples if name.startswith(VLLM_PREFIX)} == twice
        for name in twice:
            ours = PREFIX + name.removeprefix(VLLM_PREFIX)
            label = {"le"} if name.endswith("_bucket") else {"model_name"}
            if name.endswith("success_total"):
                label = {"finished_reason"}
            assert page.by(name, *label) == page.by(ours, *label)
        with pytest.raises(grpc.RpcError):
            keeper.method("Generate")(ask("x", 0))
        after = settled(keeper)
        assert after.total("hetero_errors_total") == page.total("hetero_errors_total") + 1
