"""What the clients of one server have seen, in the words of its metrics page, and that page."""

from __future__ import annotations

import json
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse

import grpc
from google.rpc import error_details_pb2, status_pb2
from prometheus_client.parser import text_string_to_metric_families

from planes.address import Address
from protos.hetero.inference.v1 import inference_pb2 as pb
from protos.hetero.inference.v1 import inference_pb2_grpc as rpc
from tests.integration.asking import PATIENCE_S

REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


@dataclass
class Seen:
    """`looked_up`: tokens of prompts that were computed; `gaps`: tokens behind a sample's first.

    `firsts`: requests that had a token at all, `begun` of them came to their end.
    """

    requests: Counter = field(default_factory=Counter)
    errors: Counter = field(default_factory=Counter)
    streams: Counter = field(default_factory=Counter)
    ends: Counter = field(default_factory=Counter)
    prompt_tokens: int = 0
    looked_up: int = 0
    cached: int = 0
    tokens: int = 0
    firsts: int = 0
    begun: int = 0
    gaps: int = 0
    cancelled: int = 0

    def note_prompt(
        self, num_tokens: int, num_cached: int = 0, *, is_computed: bool = True
    ) -> None:
        self.prompt_tokens += num_tokens
        self.looked_up += num_tokens * is_computed
        self.cached += num_cached

    def note_tokens(self, *of_samples: int, has_ended: bool = True) -> None:
        """Take in the tokens of each sample of a request; one that ends at once has none."""
        self.tokens += sum(of_samples)
        self.firsts += any(of_samples)
        self.begun += any(of_samples) and has_ended
        self.gaps += sum(max(0, count - 1) for count in of_samples)


class Bookkeeper:
    """Asks by gRPC and HTTP, and writes down what is answered."""

    def __init__(self, control: Address, http: Address, model: str) -> None:
        self.seen = Seen()
        self.model = model
        self._http = http
        self._channel = grpc.insecure_channel(control.target)
        self._stubs = [
            rpc.InferenceServiceStub(self._channel), rpc.ModelServiceStub(self._channel),
            rpc.TokenizerServiceStub(self._channel), rpc.AdminServiceStub(self._channel),
        ]  # fmt: skip

    def close(self) -> None:
        self._channel.close()

    # gRPC

    def method(self, name: str) -> Callable:
        """Return a method's stub, and count a call of it."""
        self.seen.requests["grpc", name] += 1
        return next(getattr(stub, name) for stub in self._stubs if hasattr(stub, name))

    def refused(self, error: grpc.RpcError) -> None:
        info = error_details_pb2.ErrorInfo()
        for key, value in error.trailing_metadata():
            if key == "grpc-status-details-bin":
                for detail in status_pb2.Status.FromString(value).details:
                    detail.Unpack(info)
        self.seen.errors["grpc", info.reason] += 1

    def call(self, name: str, request: object) -> None:
        """A whole answer, if there is one, or a refusal."""
        try:
            answer = self.method(name)(request, timeout=PATIENCE_S)
        except grpc.RpcError as error:
            self.refused(error)
            return
        if isinstance(answer, pb.GenerateResponse):
            usage, samples = answer.usage, answer.samples or [answer]
            self.seen.note_prompt(usage.prompt_tokens, usage.cached_tokens)
            counts = [len(one.token_ids) for one in samples]
            assert usage.completion_tokens == sum(counts)
            self.seen.note_tokens(*counts)
            self.seen.ends[REASONS[answer.finish_reason]] += 1

    def stream(self, name: str, request: object) -> None:
        """A stream to its end, or a refusal."""
        counts: Counter = Counter()
        received = 0
        try:
            for event in self.method(name)(request, timeout=PATIENCE_S):
                if event.HasField("started"):
                    self.seen.streams["grpc"] += 1
                    prompt, received = event.started.prompt_tokens, event.started.received_tokens
                elif event.HasField("delta"):
                    counts[event.delta.index] += len(event.delta.token_ids)
                elif event.HasField("finished"):
                    usage = event.finished.usage
                    assert usage.completion_tokens == counts.total() + received
                    self.seen.note_prompt(prompt, usage.cached_tokens)
                    self.seen.note_tokens(*counts.values())
                    self.seen.ends[REASONS[event.finished.finish_reason]] += 1
        except grpc.RpcError as error:
            self.refused(error)

    # HTTP

    def open(self, method: str, path: str, body: object = None, kind: str = "application/json"):
        """Send a request; the connection, and the answer as far as its headers."""
        connection = HTTPConnection(self._http.host, self._http.port, timeout=PATIENCE_S)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection.request(method, path, data, {} if data is None else {"Content-Type": kind})
        return connection, connection.getresponse()

    def http(self, method: str, path: str, body: object = None, *, counts_as: str = "",
             kind: str = "application/json") -> object:  # fmt: skip
        """The JSON or the events of an answer; None: refused. `counts_as`: the path's name."""
        self.seen.requests["http", counts_as or path] += 1
        connection, response = self.open(method, path, body, kind)
        data = response.read()
        connection.close()
        if response.status != 200:
            error = json.loads(data)["error"]
            self.seen.errors["http", error["code"].upper()] += 1
            if response.status == 429:
                assert int(response.headers["Retry-After"]) >= 1
            return None
        if response.headers["Content-Type"].startswith("text/event-stream"):
            self.seen.streams["http"] += 1
            return list(events_of(data))
        return json.loads(data)

    def completion(self, path: str, body: dict) -> None:
        """A completion or chat, whole or streamed with its usage."""
        answer = self.http("POST", path, body)
        if answer is None:
            return
        chunks = answer if isinstance(answer, list) else [answer]
        counts: Counter = Counter()
        n = body.get("n", 1)
        for choice in (choice for chunk in chunks for choice in chunk["choices"]):
            counts[choice["index"]] += len(text_of(choice))
            if choice["finish_reason"] and choice["index"] % n == 0:
                self.seen.ends[choice["finish_reason"]] += 1
        usage = chunks[-1]["usage"]
        assert usage["completion_tokens"] == counts.total()
        details = usage["prompt_tokens_details"]
        self.seen.note_prompt(usage["prompt_tokens"], details["cached_tokens"])
        for first in range(0, len(counts), n):
            self.seen.note_tokens(*(counts[index] for index in range(first, first + n)))

    def response(self, body: dict) -> None:
        """A response, whole or streamed."""
        answer = self.http("POST", "/v1/responses", body)
        if isinstance(answer, list):
            answer = answer[-1]["response"]
        usage = answer["usage"]
        self.seen.note_prompt(usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"])
        self.seen.note_tokens(usage["output_tokens"])
        self.seen.ends["length" if answer["status"] == "incomplete" else "stop"] += 1

    # The page

    def page(self) -> Page:
        connection, response = self.open("GET", "/metrics")
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        page = Page(response.read().decode())
        connection.close()
        return page


def text_of(choice: dict) -> str:
    """Of a completion's choice or a chat's, whole or a piece of it; a token is a character."""
    if "text" in choice:
        return choice["text"]
    return choice.get("message", choice.get("delta")).get("content") or ""


def events_of(data: bytes) -> Iterator[dict]:
    for event in data.decode().split("\n\n")[:-1]:
        text = event.rpartition("data: ")[2]
        if text != "[DONE]":
            yield json.loads(text)


class Follower:
    """Reads a stream on a thread of its own, as it comes; `num_tokens` so far."""

    def __init__(self, read: Callable[[Follower], None], leave: Callable[[], None]) -> None:
        self.num_tokens = 0
        self.has_begun = threading.Event()
        self._leave = leave
        self._thread = threading.Thread(target=read, args=(self,), daemon=True)
        self._thread.start()

    def add(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        if num_tokens:
            self.has_begun.set()

    def leave(self) -> None:
        """Cancel the call, or close the connection."""
        self._leave()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


def follow_call(call: grpc.Call) -> Follower:
    def read(follower: Follower) -> None:
        try:
            for event in call:
                follower.add(len(event.delta.token_ids))
        except grpc.RpcError:
            pass  # cancelled by `leave`

    return Follower(read, call.cancel)


def follow_response(connection: HTTPConnection, response: HTTPResponse) -> Follower:
    """A completion's, with log-probabilities: not every token has a text."""

    def read(follower: Follower) -> None:
        try:
            while line := response.readline():
                if line.startswith(b"data: {"):
                    choices = json.loads(line.removeprefix(b"data: "))["choices"]
                    pieces = [choice["logprobs"] for choice in choices if choice["logprobs"]]
                    follower.add(sum(len(piece["tokens"]) for piece in pieces))
        except (OSError, ValueError, AttributeError):
            pass  # closed by `leave`

    def leave() -> None:
        sock = connection.sock or response.fp.raw._sock
        sock.shutdown(2)
        connection.close()
        response.close()

    return Follower(read, leave)


class Page:
    """One look at the page; that it is well-formed is checked at once."""

    def __init__(self, text: str) -> None:
        assert text.endswith("\n")
        self.families = list(text_string_to_metric_families(text))
        names = [family.name for family in self.families]
        assert len(set(names)) == len(names)
        self.samples = {}
        for family in self.families:
            assert family.documentation, family.name
            assert family.type in ("counter", "gauge", "histogram"), family.name
            for sample in family.samples:
                key = (sample.name, frozenset(sample.labels.items()))
                assert key not in self.samples
                self.samples[key] = sample.value
                assert math.isfinite(sample.value)
            if family.type == "histogram":
                self._check_histogram(family)

    def _check_histogram(self, family) -> None:
        """Buckets grow up to the count, and are in order; the last one is +Inf."""
        series: dict[frozenset, list] = {}
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                labels = dict(sample.labels)
                bound = float(labels.pop("le"))
                series.setdefault(frozenset(labels.items()), []).append((bound, sample.value))
        for labels, buckets in series.items():
            bounds, counts = zip(*buckets, strict=True)
            assert list(bounds) == sorted(set(bounds))
            assert bounds[-1] == math.inf
            assert list(counts) == sorted(counts)
            assert counts[-1] == self.samples[f"{family.name}_count", labels]

    def total(self, name: str) -> float:
        return sum(value for (found, _), value in self.samples.items() if found == name)

    def by(self, name: str, *labels: str) -> dict:
        """The values that are not 0, by some labels (by one: its bare value)."""
        found: Counter = Counter()
        for (sample, given), value in self.samples.items():
            if sample == name and value:
                values = dict(given)
                key = tuple(values[label] for label in labels)
                found[key if len(key) > 1 else key[0]] += value
        return dict(found)


@contextmanager
def bookkeeper(control: Address, http: Address, model: str) -> Iterator[Bookkeeper]:
    made = Bookkeeper(control, http, model)
    try:
        yield made
    finally:
        made.close()
