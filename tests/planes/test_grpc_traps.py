"""Properties of gRPC that cost others days; the options in `planes.transport` settle them."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import grpc.aio
import pytest

from hetero_infer.channel import CLIENT_OPTIONS
from planes.transport import (
    CLIENT_PING_MS,
    MAX_CLIENT_MESSAGE_BYTES,
    MAX_PLANE_MESSAGE_BYTES,
    PING_INTERVAL_MS,
    PING_TIMEOUT_MS,
    client_server_options,
    plane_channel_options,
    plane_server_options,
)
from protos.hetero.compute.v1 import compute_pb2, compute_pb2_grpc
from tests.waiting import wait_until

NUM_STREAMS = 2000
PATIENCE_S = 120.0
"""Without its option a stopped peer is noticed after a minute; with it, this is long."""

PLANE = (sys.executable, "-m", "compute_plane", "--executor=simulated", "--max-num-blocks=16")

RIVAL = """
import sys
from control_plane.engine.compute_client import ComputeClient
from planes.address import parse_address
client = ComputeClient(parse_address(sys.argv[1]), controller="stopped")
assert client.open() == 0
print("open", flush=True)
client.receive(None)
"""


@pytest.fixture
def plane(tmp_path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A compute plane of its own process, and its address."""
    address = f"unix:{tmp_path}/compute.sock"
    with subprocess.Popen(
        [*PLANE, f"--listen={address}"], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert any('"serving"' in line or " serving " in line for line in process.stderr)
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield address, process
        process.send_signal(signal.SIGCONT)
        process.terminate()
        assert process.wait(PATIENCE_S) == 0


def open_stream(channel: grpc.Channel) -> grpc.Call:
    """A stream on which nothing will ever come: no batch is sent."""
    stub = compute_pb2_grpc.ComputeServiceStub(channel)
    stub.Open(compute_pb2.OpenRequest(protocol_version=1), timeout=PATIENCE_S)
    over = threading.Event()
    call = stub.Execute(iter(lambda: over.wait() and None, None), timeout=PATIENCE_S)
    call.add_callback(over.set)
    return call


@pytest.mark.wide
def test_a_peer_that_is_stopped_is_noticed_by_its_silence(plane):
    """Not by our own deadline: the status is that of a lost connection."""
    address, process = plane
    with grpc.insecure_channel(address, plane_channel_options()) as channel:
        call = open_stream(channel)
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(grpc.RpcError) as caught:
            next(call)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "ping timeout" in caught.value.details().lower()


@pytest.mark.wide
def test_a_controller_that_is_stopped_does_not_keep_the_plane(plane):
    address, _ = plane
    with (
        subprocess.Popen(
            [sys.executable, "-c", RIVAL, address], stdout=subprocess.PIPE, text=True
        ) as rival,
        grpc.insecure_channel(address, plane_channel_options()) as channel,
    ):
        try:
            assert rival.stdout is not None
            assert any("open" in line for line in iter(rival.stdout.readline, ""))
            rival.send_signal(signal.SIGSTOP)
            stub = compute_pb2_grpc.ComputeServiceStub(channel)
            request = compute_pb2.OpenRequest(protocol_version=1)

            def is_open() -> bool:
                held = stub.Open.future(request).exception()
                assert held is None or held.code() is grpc.StatusCode.FAILED_PRECONDITION
                return held is None

            wait_until(is_open, "the stopped controller's session")
            describe = stub.Describe(compute_pb2.DescribeRequest())
            assert describe.current_session == 2
        finally:
            rival.kill()


class SlowServer:
    """An aio server on a loop of its own, with the options that clients meet."""

    def __init__(self) -> None:
        self.is_up = threading.Event()
        self.port = 0
        self.thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self.thread.start()
        assert self.is_up.wait(PATIENCE_S)

    async def _serve(self) -> None:
        server = grpc.aio.server(options=client_server_options())
        handlers = {
            "Answer": grpc.unary_stream_rpc_method_handler(self._answer),
            "Wait": grpc.unary_stream_rpc_method_handler(self._wait),
        }
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("trap.Service", handlers),)
        )
        self.port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        self.loop, self.over = asyncio.get_running_loop(), asyncio.Event()
        self.is_up.set()
        await self.over.wait()
        await server.stop(0)

    async def _answer(self, request: bytes, _: object) -> AsyncIterator[bytes]:
        await asyncio.sleep(0)
        yield request

    async def _wait(self, request: bytes, _: object) -> AsyncIterator[bytes]:
        await self.over.wait()
        yield request

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.over.set)
        self.thread.join(PATIENCE_S)


@pytest.mark.wide
def test_a_burst_of_streams_loses_none_as_cancelled():
    server = SlowServer()
    all_sent = threading.Event()
    server.loop.call_soon_threadsafe(all_sent.wait, PATIENCE_S)  # it is busy: they pile up
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        answer = channel.unary_stream("/trap.Service/Answer")
        calls = [answer(b"x", timeout=PATIENCE_S) for _ in range(NUM_STREAMS)]
        all_sent.set()
        ends = Counter(outcome(call) for call in calls)
    server.close()
    assert ends == {"answered": NUM_STREAMS}
    given = dict(client_server_options())  # how many it takes is a matter of luck
    for limit in ("max_pending_requests", "max_pending_requests_hard_limit"):
        assert given[f"grpc.server.{limit}"] > 100 * NUM_STREAMS


@pytest.mark.slow
def test_a_client_that_pings_while_it_waits_is_not_sent_away():
    """A request that waits, or is answered whole, has no data for longer than clients ping."""
    server = SlowServer()
    pings = [
        ("grpc.keepalive_time_ms", CLIENT_PING_MS + 500),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_permit_without_calls", 1),
    ]
    with grpc.insecure_channel(f"127.0.0.1:{server.port}", pings) as channel:
        call = channel.unary_stream("/trap.Service/Wait")(b"x", timeout=9 * CLIENT_PING_MS / 1000)
        end = outcome(call)
    server.close()
    assert end == "DEADLINE_EXCEEDED"  # its own; it was UNAVAILABLE after the fifth ping


def test_clients_may_ping_as_often_as_go_and_java_do():
    """Both ping every ten seconds at most, however they are told."""
    given = dict(client_server_options())
    assert given["grpc.http2.min_ping_interval_without_data_ms"] == CLIENT_PING_MS < 10_000
    assert given["grpc.keepalive_permit_without_calls"] == 1


def outcome(call: Iterator[bytes]) -> str:
    try:
        return "answered" if list(call) == [b"x"] else "cut off"
    except grpc.RpcError as error:
        return str(error.code().name)


@pytest.mark.parametrize("options", [plane_server_options, client_server_options])
def test_a_second_server_on_the_same_port_is_refused(options):
    pool = ThreadPoolExecutor(1)
    first, second = (grpc.server(pool, options=options()) for _ in range(2))
    port = first.add_insecure_port("127.0.0.1:0")
    first.start()
    try:
        with pytest.raises(RuntimeError):
            second.add_insecure_port(f"127.0.0.1:{port}")
    finally:
        first.stop(None).wait()
        second.stop(None).wait()
        pool.shutdown()


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        (plane_server_options, MAX_PLANE_MESSAGE_BYTES),
        (plane_channel_options, MAX_PLANE_MESSAGE_BYTES),
        (client_server_options, MAX_CLIENT_MESSAGE_BYTES),
    ],
)
def test_message_sizes_are_given_for_both_directions(options, limit):
    given = dict(options())
    for direction in ("send", "receive"):
        assert given[f"grpc.max_{direction}_message_length"] == limit


def test_a_plane_that_is_back_is_connected_to_within_a_quarter_of_a_second():
    given = dict(plane_channel_options())
    assert given["grpc.initial_reconnect_backoff_ms"] <= 50
    assert given["grpc.max_reconnect_backoff_ms"] <= 250


def test_no_channel_makes_a_call_again_by_itself():
    for options in (plane_channel_options(), CLIENT_OPTIONS):
        assert dict(options)["grpc.enable_retries"] == 0


@pytest.mark.wide
def test_both_ends_of_the_link_ping_each_other():
    for options in (plane_server_options(), plane_channel_options()):
        given = dict(options)
        assert given["grpc.keepalive_time_ms"] == PING_INTERVAL_MS
        assert given["grpc.http2.ping_timeout_ms"] == PING_TIMEOUT_MS
    policed = dict(plane_server_options())["grpc.http2.min_ping_interval_without_data_ms"]
    assert policed < PING_INTERVAL_MS
