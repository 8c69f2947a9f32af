"""A client who does nothing wrong while others do: his text, and what they leave behind."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from http.client import HTTPConnection

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from planes.address import Address
from protos.hetero.inference.v1 import inference_pb2 as pb
from tests.integration.asking import PATIENCE_S, Server

PROMPT = "The capital of France is"
NUM_TOKENS = 4
PAUSE_S = 0.2
"""Between one round and the next: the tests share two cores with what they test."""


class Ports:
    """Both ports of one deployment, as its clients see them; `model`: the name of its model."""

    def __init__(self, control: Address, http: Address) -> None:
        self.http = http
        self.url = f"http://{http}"
        self.server = Server(control)
        self.channel = grpc.insecure_channel(control.target)
        self.model = self.get_json("/v1/models")["data"][0]["id"]

    def close(self) -> None:
        self.channel.close()
        self.server.__exit__()

    def connect(self) -> HTTPConnection:
        return HTTPConnection(self.http.host, self.http.port, timeout=PATIENCE_S)

    def request(self, method: str, path: str, body: object = None) -> tuple[int, dict, bytes]:
        """The status, headers and body of one request on a connection of its own."""
        connection = self.connect()
        headers = {} if body is None else {"Content-Type": "application/json"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        data = response.read()
        connection.close()
        return response.status, dict(response.headers), data

    def get_json(self, path: str) -> dict:
        status, _, data = self.request("GET", path)
        assert status == 200, (path, status, data)
        return json.loads(data)

    def completion(self, **fields: object) -> dict:
        """A body of `/v1/completions`."""
        return {
            "model": self.model, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0,
            "ignore_eos": True, **fields,
        }  # fmt: skip

    def ways(self) -> list[Callable[[], str]]:
        """All ways to ask for the same text."""
        sampling = pb.SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
        request = pb.GenerateRequest(text=PROMPT, sampling=sampling)
        stub = self.server.stub

        def by_stream() -> str:
            events = stub.GenerateStream(request, timeout=PATIENCE_S)
            return "".join(event.delta.text for event in events)

        def by_http() -> str:
            status, _, data = self.request("POST", "/v1/completions", self.completion())
            assert status == 200, data
            return json.loads(data)["choices"][0]["text"]

        def by_http_stream() -> str:
            body = self.completion(stream=True)
            status, _, data = self.request("POST", "/v1/completions", body)
            assert status == 200, data
            events = data.decode().split("\n\n")
            assert events[-2:] == ["data: [DONE]", ""]
            chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
            return "".join(chunk["choices"][0]["text"] for chunk in chunks)

        return [
            lambda: stub.Generate(request, timeout=PATIENCE_S).text, by_stream,
            by_http, by_http_stream,
        ]  # fmt: skip

    @cached_property
    def text(self) -> str:
        """What each way has given in peace; asked for once."""
        texts = {way() for way in self.ways()}
        assert len(texts) == 1, texts
        return texts.pop()

    def check_at_rest(self) -> None:
        """Nothing is left of anybody's requests, and the next one is answered."""
        server = self.server
        server.wait_until(lambda: server.memory.used_blocks == 0)
        server.wait_until(
            lambda: server.metrics.active_sequences == server.metrics.waiting_requests == 0
        )
        memory = server.memory
        assert memory.free_blocks == memory.total_blocks
        assert memory.num_sequences == memory.used_host_blocks == 0
        assert not server.admin.ListRequests(pb.ListRequestsRequest()).requests
        health = health_pb2_grpc.HealthStub(self.channel)
        for service in ("", "hetero.inference.v1.InferenceService"):
            answer = health.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert self.get_json("/readyz") == {"status": "ok", "state": "open"}
        assert {way() for way in self.ways()} == {self.text}


@contextmanager
def neighbour(ports: Ports, least: int = 4) -> Iterator[None]:
    """Ask for the same text again and again while the block runs; it must always be the same.

    `least`: so many answers at least must have come in the time. The deployment must be at rest
    afterwards.
    """
    in_peace = ports.text
    texts: list[str] = []
    errors: list[BaseException] = []
    is_over = threading.Event()

    def go_on_asking() -> None:
        try:
            while not is_over.wait(PAUSE_S) or len(texts) < least:
                texts.extend(way() for way in ports.ways())
        except BaseException as error:  # noqa: BLE001 - raised below, on the thread of the test
            errors.append(error)

    asking = threading.Thread(target=go_on_asking)
    asking.start()
    try:
        yield
    finally:
        is_over.set()
        asking.join()
    if errors:
        raise errors[0]
    assert set(texts) == {in_peace}
    ports.check_at_rest()
