"""Large requests of many small things, on both ports: refused, and nobody else notices."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from hetero_infer.config import EngineConfig
from hetero_infer.local_planes import (
    compute_socket,
    private_directory,
    start_compute_plane,
    start_control_plane,
)
from hetero_infer.plane_process import wait_all_ready
from protos.hetero.inference.v1 import inference_pb2 as pb
from tests.integration.hostile.neighbour import Ports, neighbour
from tests.integration.hostile.raw_http import ask, post

pytestmark = pytest.mark.model

MAX_GROWTH_BYTES = 128 << 20
"""Of the control plane's memory, with all of these sent by several clients at once."""

TIMES = 2
MIB = 1 << 20
INFERENCE = "/hetero.inference.v1.InferenceService/"
REFUSED = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED}


@pytest.fixture(scope="module")
def own() -> Iterator[tuple[Ports, int]]:
    """A deployment whose control plane's memory is looked at, and its process."""
    config = EngineConfig(num_threads=1)  # what computes is not what is looked at
    with private_directory() as directory:
        compute = compute_socket(directory)
        with (
            start_compute_plane(config, compute) as compute_plane,
            start_control_plane(
                config, compute, "--grpc-port=0", "--http", "--http-port=0"
            ) as control_plane,
        ):
            wait_all_ready([compute_plane, control_plane])
            ports = Ports(control_plane.address, control_plane.http_address)
            yield ports, control_plane.pid
            ports.close()


def peak_bytes(pid: int) -> int:
    """The most memory the process has had."""
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) << 10


def large_messages() -> dict[str, tuple[str, bytes]]:
    """By name: the method, and what it is sent."""
    # Requests end to end are one request with the fields of all; to build these would take seconds.
    empty = pb.ChatRequest(messages=[pb.ChatMessage()]).SerializeToString()
    hi = pb.ChatMessage(role="user", content="x")
    calls = pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(name="f")] * 60_000)
    json_text = '{"a": [' + ",".join(["[]"] * 100_000) + "]}"
    bias = pb.SamplingParams(logit_bias=dict.fromkeys(range(50_000), 1.0))
    chats = {
        "messages": pb.ChatRequest(messages=[hi] * 40_000),
        "calls": pb.ChatRequest(messages=[calls]),
        "tools": pb.ChatRequest(messages=[hi], tools=[pb.Tool(name="f")] * 60_000),
        "a tool": pb.ChatRequest(
            messages=[hi], tools=[pb.Tool(name="f", parameters_json=json_text)]
        ),
        "bias": pb.ChatRequest(messages=[hi], sampling=bias),
        "text": pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="x" * 500_000)]),
    }
    generates = {
        "token ids": pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 500_000)),
        "stops": pb.GenerateRequest(text="x", sampling=pb.SamplingParams(stop=["x"] * 100_000)),
        "long text": pb.GenerateRequest(text="x" * 500_000),
        "longest text": pb.GenerateRequest(text="x" * (15 * MIB)),
    }
    resume = pb.ResumeRequest(
        generate=pb.GenerateRequest(text="x"), received_token_ids=[1] * 400_000
    )
    found = {
        "empty messages": (INFERENCE + "Chat", empty * (200 << 10)),
        "more empty messages": (INFERENCE + "Chat", empty * (8 * MIB - 1)),
    }
    for name, chat in chats.items():
        found[name] = (INFERENCE + "Chat", chat.SerializeToString())
    for name, request in generates.items():
        found[name] = (INFERENCE + "Generate", request.SerializeToString())
    return {**found, "received": (INFERENCE + "Resume", resume.SerializeToString())}


def large_bodies(model: str) -> dict[str, tuple[int, bytes]]:
    """By name: the status, and what is sent."""
    hi = {"role": "user", "content": "x"}

    def body(path: str, **fields: object) -> bytes:
        data = json.dumps({"model": model, "max_tokens": 1, **fields}, separators=(",", ":"))
        return post(path, data.encode())

    def chat(**fields: object) -> bytes:
        return body("/v1/chat/completions", **{"messages": [hi], **fields})

    def tool(parameters: object) -> bytes:
        function = {"name": "f", "parameters": {"a": parameters}}
        return chat(tools=[{"type": "function", "function": function}])

    def completion(**fields: object) -> bytes:
        return body("/v1/completions", **{"prompt": "x", **fields})

    unknown = {f"{i:x}": 0 for i in range(15_000)}
    return {
        "a tool of 8 MB": (413, tool([[]] * 2_600_000)),
        "a tool": (413, tool([[]] * 100_000)),
        "a tool that is just taken": (400, tool([[]] * 16_000)),  # the template has no place
        "messages of 8 MB": (413, chat(messages=[hi] * 250_000)),
        "messages": (400, chat(messages=[hi] * 3000)),
        "long messages": (400, chat(messages=[{"role": "user", "content": "x" * 1000}] * 200)),
        "unknown keys of 8 MB": (413, completion(**{f"{i:x}": 0 for i in range(600_000)})),
        "unknown keys": (400, completion(**unknown)),
        "metadata of 8 MB": (413, completion(metadata={f"{i:x}": "" for i in range(600_000)})),
        "metadata": (400, completion(metadata={f"{i:x}": "" for i in range(8000)})),
        "token ids of 8 MB": (413, completion(prompt=[1] * 4_000_000)),
        "token ids": (400, completion(prompt=[1] * 70_000)),
        "tokens": (400, body("/detokenize", tokens=[1] * 70_000, max_tokens=None)),
        "prompts": (400, completion(prompt=["x"] * 8000)),
        "text": (400, completion(prompt="x" * 500_000)),
    }


@pytest.mark.wide
def test_large_requests_of_many_small_things_hold_up_nobody(own):
    ports, pid = own
    messages, bodies = large_messages(), large_bodies(ports.model)
    stalls = ports.server.metrics.num_stalls
    losses = ports.server.metrics.num_plane_losses

    def call(name: str) -> None:
        method, data = messages[name]
        make = ports.channel.unary_stream if "Resume" in method else ports.channel.unary_unary
        sent = make(method, request_serializer=bytes, response_deserializer=bytes)
        with pytest.raises(grpc.RpcError) as refused:
            list(sent(data, timeout=60))  # what is whole has no parts, but is not to come
        assert refused.value.code() in REFUSED, (name, refused.value)

    def request(name: str) -> None:
        expected, data = bodies[name]
        status, answer = ask(ports.http, [data])
        assert status == expected, (name, status, answer[:300])

    with neighbour(ports), ThreadPoolExecutor(TIMES) as pool:
        before = peak_bytes(pid)
        for send, names in ((call, messages), (request, bodies)):
            list(pool.map(send, [name for name in names for _ in range(TIMES)]))
        growth = peak_bytes(pid) - before
        assert growth < MAX_GROWTH_BYTES
    assert ports.server.metrics.num_stalls == stalls
    assert ports.server.metrics.num_plane_losses == losses  # no link was lost
