"""A hundred requests of all kinds: what their clients saw is what the page says."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field

import grpc
import grpc.aio
import pytest

from control_plane.core.generation_params import GenerationParams
from protos.hetero.inference.v1 import inference_pb2 as pb
from tests.control_plane.metrics.whole_plane import reason_of, whole_plane
from tests.waiting import until

STOP_AT = 9
"""Where the fake plane ends first samples."""

REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


@dataclass
class Seen:
    """What the clients counted. `gaps`: further tokens of samples that had one already."""

    requests: Counter = field(default_factory=Counter)
    errors: Counter = field(default_factory=Counter)
    ends: Counter = field(default_factory=Counter)
    streams: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    cached: int = 0
    queried: int = 0
    firsts: int = 0
    gaps: int = 0
    cancelled: int = 0
    times: dict[str, list[float]] = field(default_factory=lambda: {k: [] for k in "etqpd"})

    def note_timings(self, timings) -> None:
        first, queue, total = timings.time_to_first_token_s, timings.queue_s, timings.total_s
        for name, value in zip(
            "etqpd", (total, first, queue, first - queue, total - first), strict=True
        ):
            self.times[name].append(value)


def ask(prompt: str, max_tokens: int = 6, **sampling) -> pb.GenerateRequest:
    sampling.setdefault("seed", 0)
    return pb.GenerateRequest(
        text=prompt, sampling=pb.SamplingParams(max_tokens=max_tokens, **sampling)
    )


class Clients:
    """All of them, adding up what they see."""

    def __init__(self, served) -> None:
        self.served = served
        self.seen = Seen()

    async def stream(self, request, *, stop_tokens: int | None = None) -> None:
        """`stop_tokens`: tokens up to the end of the stop string that is expected."""
        seen, texts, has_started = self.seen, Counter(), False
        seen.requests["grpc"] += 1
        try:
            async for event in self.served.rpc.GenerateStream(request):
                if event.HasField("started"):
                    has_started = True
                    seen.streams += 1
                    seen.prompt_tokens += event.started.prompt_tokens
                    seen.queried += event.started.prompt_tokens
                elif event.HasField("delta"):
                    texts[event.delta.index] += len(event.delta.token_ids)
                elif event.HasField("finished"):
                    self.finish(event.finished)
        except grpc.aio.AioRpcError as error:
            seen.errors[reason_of(error)] += 1
            if reason_of(error) == "REQUEST_FAILED" and not has_started:
                # The news came together: it was admitted all the same.
                seen.prompt_tokens += len(request.text)
                seen.queried += len(request.text)
        seen.tokens += sum(texts.values())
        if texts:
            seen.firsts += 1
        arrived = [stop_tokens] if stop_tokens is not None else texts.values()
        seen.gaps += sum(count - 1 for count in arrived)

    async def whole(self, request) -> None:
        seen = self.seen
        seen.requests["grpc"] += 1
        try:
            answer = await self.served.rpc.Generate(request)
        except grpc.aio.AioRpcError as error:
            seen.errors[reason_of(error)] += 1
            return
        seen.prompt_tokens += answer.usage.prompt_tokens
        seen.queried += answer.usage.prompt_tokens
        seen.tokens += answer.usage.completion_tokens
        seen.firsts += 1
        seen.gaps += sum(len(s.token_ids) - 1 for s in answer.samples or [answer])
        self.finish(answer)

    def finish(self, end) -> None:
        self.seen.ends[REASONS[end.finish_reason]] += 1
        self.seen.cached += end.usage.cached_tokens
        self.seen.note_timings(end.timings)

    async def leave_after(self, prompt: str, num_pieces: int) -> None:
        """Read some pieces at the front end itself, where it is known what was handed over."""
        params = GenerationParams(max_tokens=400, seed=0, ignore_eos=True)
        async with await self.served.frontend.submit(prompt, params) as generation:
            await generation.admitted()
            for _ in range(num_pieces):
                await generation.next_delta()
        tokens = generation.num_generated_tokens
        self.seen.prompt_tokens += generation.num_prompt_tokens
        self.seen.queried += generation.num_prompt_tokens
        self.seen.cancelled += 1
        self.seen.tokens += tokens
        self.seen.firsts += 1
        self.seen.gaps += tokens - 1

    async def leave_in_the_queue(self, prompt: str) -> None:
        """Cancel the RPC when the request is admitted and nothing is computed."""
        self.seen.requests["grpc"] += 1
        call = self.served.rpc.GenerateStream(ask(prompt, 400))
        started = (await call.read()).started
        self.seen.streams += 1
        self.seen.prompt_tokens += started.prompt_tokens
        self.seen.cancelled += 1
        call.cancel()
        assert await call.code() is grpc.StatusCode.CANCELLED


def test_a_hundred_mixed_requests_saw_what_the_page_says(fake_plane, tmp_path, expected):
    """Everything by gRPC first, whose clients learn their timings; then by HTTP."""
    fake_plane.num_blocks = 1024
    fake_plane.sample_lens[0] = STOP_AT
    fake_plane.poisoned_prompt = b"bad"

    async def run() -> None:
        async with whole_plane(
            fake_plane, tmp_path, max_num_seqs=6, max_queued_requests=12
        ) as served:
            clients = Clients(served)
            await ask_by_grpc(clients, expected)
            compare(await served.settled(), clients.seen, fake_plane)
            await crowd(clients, fake_plane)
            compare(await served.settled(), clients.seen, fake_plane)
            await ask_by_http(served, clients.seen)
            compare(await served.settled(), clients.seen, fake_plane)
            num_at_the_front_end = 5  # those who left at once: no request of gRPC or HTTP
            assert clients.seen.requests.total() + num_at_the_front_end >= 100

    asyncio.run(run())


async def ask_by_grpc(clients: Clients, expected) -> None:
    async def well(index: int) -> None:
        a, b = f"a{index}", f"b{index}"
        text = expected(f"s{index}", STOP_AT)
        stop = text[4:6]
        await clients.stream(ask(a))
        await clients.whole(ask(b, 20))
        request = ask(f"s{index}", 20, stop=[stop])
        await clients.stream(request, stop_tokens=text.index(stop) + len(stop))
        await clients.stream(ask(a, 20))
        for tail in (a, b):
            await clients.stream(ask("the same beginning " * 2 + tail, 4))

    async def less_well(index: int) -> None:
        await clients.stream(ask(f"n{index}", 12, n=3))
        await clients.whole(ask(f"m{index}", 5, n=2))
        await clients.stream(ask(f"bad{index}"))
        await clients.whole(ask(f"x{index}", 0))
        await clients.stream(ask(f"y{index}", temperature=9.0))
        await clients.leave_after(f"{index} leaves", 2)

    await asyncio.gather(*(kind(index) for index in range(5) for kind in (well, less_well)))
    seen = clients.seen
    assert seen.errors == {"REQUEST_FAILED": 5, "INVALID_REQUEST": 10}
    assert seen.ends == {"length": 20, "stop": 20}
    assert seen.cached > 0
    assert seen.cancelled == 5


async def crowd(clients: Clients, fake_plane) -> None:
    """More than the queue holds, while nothing is computed; some lose patience."""
    fake_plane.may_run.clear()
    jobs = [asyncio.create_task(clients.stream(ask(f"c{index}"))) for index in range(6)]
    num_before = clients.seen.streams
    await until(lambda: clients.seen.streams == num_before + len(jobs))
    await asyncio.gather(*(clients.leave_in_the_queue(f"q{index}") for index in range(3)))
    late = [asyncio.create_task(clients.stream(ask(f"l{index}"))) for index in range(20)]
    await until(lambda: clients.seen.errors["QUEUE_FULL"] > 0)
    # Nobody may get a token for a client who has left.
    meter = clients.served.plane._instruments.requests
    await until(lambda: meter.num_cancelled == clients.seen.cancelled)
    fake_plane.may_run.set()
    await asyncio.gather(*jobs, *late)


async def ask_by_http(served, seen: Seen) -> None:
    async def post(path: str, body: object) -> object:
        seen.requests["http"] += 1
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        response = await served.http.post(path, content=data, headers=headers)
        if response.headers["content-type"].startswith("text/event-stream"):
            seen.streams += 1
            lines = response.text.split("\n\n")[:-2]
            return [json.loads(line.removeprefix("data: ")) for line in lines]
        if response.status_code != 200:
            seen.errors[response.json()["error"]["code"].upper()] += 1
            return None
        return response.json()

    def note(choices: list, usage: dict, num_prompts: int = 1) -> None:
        seen.prompt_tokens += usage["prompt_tokens"]
        seen.queried += usage["prompt_tokens"]
        seen.tokens += usage["completion_tokens"]
        seen.cached += usage["prompt_tokens_details"]["cached_tokens"]
        seen.gaps += usage["completion_tokens"] - len(choices)
        seen.firsts += num_prompts
        per_prompt = len(choices) // num_prompts
        seen.ends.update(choice["finish_reason"] for choice in choices[::per_prompt])

    body = {"model": "fake", "seed": 0, "temperature": 1, "max_tokens": 5}
    for index in range(8):
        one = await post("/v1/completions", {**body, "prompt": f"h{index}", "n": 2})
        note(one["choices"], one["usage"])
        two = await post("/v1/completions", {**body, "prompt": [f"i{index}", "j"]})
        note(two["choices"], two["usage"], num_prompts=2)
        asked = {**body, "prompt": f"k{index}", "max_tokens": 30, "stream": True}
        chunks = await post("/v1/completions", {**asked, "stream_options": {"include_usage": True}})
        ends = [c for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
        note(ends, chunks[-1]["usage"])
    await post("/v1/completions", {**body, "prompt": "x", "surprise": 1})
    await post("/v1/completions", {**body, "prompt": "x", "max_tokens": -1})
    await post("/v1/completions", b"{")
    await post("/v1/completions", {**body, "prompt": "x", "model": "other"})
    await post("/v1/nowhere/secret", {})
    # Of what fails, nothing but its prompt is counted.
    await post("/v1/completions", {**body, "prompt": "bad"})
    seen.prompt_tokens += len("bad")
    seen.queried += len("bad")


def compare(page, seen: Seen, fake_plane) -> None:
    assert page.by("protocol", "hetero_requests_total") == dict(seen.requests)
    assert page.by("reason", "hetero_errors_total") == dict(seen.errors)
    assert page.total("hetero_inflight_requests") == 0
    assert page.total("hetero_streaming_requests_total") == seen.streams
    assert page.by("finished_reason", "hetero_request_success_total") == dict(seen.ends)
    assert page.total("hetero_requests_cancelled_total") == seen.cancelled
    assert page.total("hetero_prompt_tokens_total") == seen.prompt_tokens
    assert page.total("hetero_generation_tokens_total") == seen.tokens
    assert page.total("hetero_time_to_first_token_seconds_count") == seen.firsts
    assert page.total("hetero_inter_token_latency_seconds_count") == seen.gaps
    assert page.total("hetero_prefix_cache_hits_total") == seen.cached
    num_successes = sum(seen.ends.values())
    names = {
        "e": "e2e_request_latency",
        "q": "request_queue_time",
        "p": "request_prefill_time",
        "d": "request_decode_time",
    }
    for key, name in names.items():
        assert page.total(f"hetero_{name}_seconds_count") == num_successes
        if not seen.requests["http"]:  # which does not say how long things took
            total = page.total(f"hetero_{name}_seconds_sum")
            assert total == pytest.approx(sum(seen.times[key]), abs=1e-9), name
    if seen.firsts == num_successes + 5 and not seen.requests["http"]:
        # Whoever left early has no timings: his first token counts, too.
        assert page.total("hetero_time_to_first_token_seconds_sum") > sum(seen.times["t"])
    # Compute plane and engine thread.
    assert page.total("hetero_prefix_cache_queries_total") == seen.queried
    assert page.total("hetero_iteration_tokens_total_count") == len(fake_plane.batches)
    computed = sum(sum(batch.query_lens) or len(batch.slots) for batch in fake_plane.batches)
    assert page.total("hetero_iteration_tokens_total_sum") == computed
    for name in ("plane_step", "plane_rtt", "scheduler_step"):
        assert page.total(f"hetero_{name}_seconds_count") == len(fake_plane.batches)
    assert page.total("hetero_num_requests_waiting") == 0
    assert page.total("hetero_num_preemptions_total") == 0
    assert page.total("hetero_plane_up") == 1
    assert page.total("hetero_plane_epoch") == fake_plane.epoch
    assert page.total("hetero_plane_losses_total") == 0
