"""Tokens as gRPC clients meet them: every service, a real engine thread, a fake compute plane."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as aio_health
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from control_plane.access.keyring import Keyring
from control_plane.access.limits import Limits
from control_plane.access.principal import acting_as
from control_plane.access.token_file import add_token, remove_token
from control_plane.api.engine_access import EngineAccess
from control_plane.api.interceptors import RequestInterceptor
from control_plane.api.services import ADMIN_SERVICES, SERVICES, add_services
from control_plane.engine.frontend import EngineFrontend
from control_plane.engine.gate import Gate
from protos.hetero.inference.v1 import inference_pb2 as pb
from protos.hetero.inference.v1 import inference_pb2_grpc
from tests.control_plane.engine.frontend_driver import asking, running_frontend, until

PROMPT = "the same beginning of all prompts"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Deployment:
    """A server with tokens and what its clients need."""

    channel: grpc.aio.Channel
    keyring: Keyring
    path: object
    clock: Clock
    tokens: dict[str, str]
    frontend: EngineFrontend

    def meter(self, name: str):
        return self.keyring._meters[name]

    def metadata(self, name: str | None):
        return () if name is None else (("authorization", f"Bearer {self.tokens[name]}"),)

    def stream(self, name, max_tokens=4, prompt=PROMPT, **fields):
        request = pb.GenerateRequest(
            text=prompt, sampling=pb.SamplingParams(max_tokens=max_tokens, seed=0, n=1), **fields
        )
        stub = inference_pb2_grpc.InferenceServiceStub(self.channel)
        return stub.GenerateStream(request, metadata=self.metadata(name), timeout=60)

    async def generate(self, name, **fields):
        """The last event of a stream read to its end."""
        return [event async for event in self.stream(name, **fields)][-1].finished


PEOPLE = {
    "alice": {},
    "bob": {},
    "carol": {"shares_cache": True},
    "dave": {"shares_cache": True},
    "ops": {"admin": True},
    "one": {"limits": Limits(max_concurrent_requests=1)},
    "poor": {"limits": Limits(max_tokens_per_minute=60)},
}


@pytest.fixture
def on_server(compute_address, tmp_path):
    """Play a story against a server whose clients need tokens."""

    @asynccontextmanager
    async def deployment():
        path, clock = tmp_path / "tokens.json", Clock()
        tokens = {}
        for name, what in PEOPLE.items():
            what = {"limits": Limits(), "admin": False, "shares_cache": False} | what
            tokens[name] = add_token(path, name, **what)
        keyring = Keyring(path, clock=clock)
        interceptor = RequestInterceptor(*SERVICES, keyring=keyring, admin_services=ADMIN_SERVICES)
        server = grpc.aio.server(interceptors=[interceptor])
        access = EngineAccess(Gate())
        add_services(server, access)
        health_pb2_grpc.add_HealthServicer_to_server(aio_health.HealthServicer(), server)
        reflection.enable_server_reflection(SERVICES, server)
        port = server.add_insecure_port("127.0.0.1:0")
        loop = asyncio.get_running_loop()
        async with running_frontend(loop, compute_address, wants_principal=True) as frontend:
            access.attach(frontend)
            await server.start()
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                yield Deployment(channel, keyring, path, clock, tokens, frontend)
            await server.stop(None)

    def play(story):
        async def run():
            async with deployment() as served:
                await story(served)

        asyncio.run(run())

    return play


async def rest_of(call):
    """The events of a stream whose first ones were read one by one."""
    events = []
    while (event := await call.read()) is not grpc.aio.EOF:
        events.append(event)
    return events


async def refusal(call):
    """How an RPC is refused: code, reason, seconds to wait."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    status = rpc_status.from_call(caught.value)
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    for detail in status.details:
        detail.Unpack(info)
        detail.Unpack(retry)
    return caught.value.code().name, info.reason, retry.retry_delay.seconds


UNAUTHENTICATED = "UNAUTHENTICATED"


def test_every_method_of_every_service_wants_a_token(on_server):
    async def story(served):
        methods = {
            (service.full_name, method.name): method
            for service in pb.DESCRIPTOR.services_by_name.values()
            for method in service.methods
        }
        assert len(methods) > 10
        for (service, name), method in methods.items():
            kind = "unary_stream" if method.server_streaming else "unary_unary"
            call = getattr(served.channel, kind)(f"/{service}/{name}")
            for metadata, reason in (
                ((), "TOKEN_MISSING"),
                ((("authorization", "Bearer wrong"),), "TOKEN_UNKNOWN"),
            ):
                made = call(b"\xff not a message", metadata=metadata, timeout=60)
                answer = made.read() if method.server_streaming else made
                assert await refusal(answer) == (UNAUTHENTICATED, reason, 0), name

    on_server(story)


def test_two_authorizations_are_none(on_server):
    async def story(served):
        twice = served.metadata("alice") * 2
        stub = inference_pb2_grpc.ModelServiceStub(served.channel)
        call = stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=twice)
        assert await refusal(call) == (UNAUTHENTICATED, "TOKEN_MISSING", 0)

    on_server(story)


def test_health_and_reflection_ask_for_no_token(on_server):
    async def story(served):
        health = health_pb2_grpc.HealthStub(served.channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=60)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        stub = reflection_pb2_grpc.ServerReflectionStub(served.channel)
        call = stub.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        assert (await call.read()).list_services_response.service
        await call.done_writing()

    on_server(story)


def test_a_token_lets_in_until_it_is_revoked(on_server, expected):
    async def story(served):
        assert (await served.generate("alice")).usage.completion_tokens == 4
        running = served.stream("alice", max_tokens=200)
        await running.read()
        remove_token(served.path, "alice")
        assert await refusal(served.generate("alice")) == (UNAUTHENTICATED, "TOKEN_UNKNOWN", 0)
        events = await rest_of(running)  # what is under way goes on
        assert "".join(e.delta.text for e in events) == expected(PROMPT, 200)

    on_server(story)


def test_operators_methods_want_an_operators_token(on_server):
    async def story(served):
        stub = inference_pb2_grpc.AdminServiceStub(served.channel)
        for name in ("alice", "ops"):
            call = stub.ListRequests(pb.ListRequestsRequest(), metadata=served.metadata(name))
            if name == "ops":
                await call
            else:
                assert await refusal(call) == ("PERMISSION_DENIED", "ADMIN_TOKEN_REQUIRED", 0)

    on_server(story)


@pytest.mark.parametrize("end", ["cancel", "finish", "fail"])
def test_a_place_comes_back_however_the_request_ends(on_server, fake_plane, end):
    async def story(served):
        fake_plane.poisoned_prompt = b"poison"
        fake_plane.may_run.clear()
        prompt = "poison" if end == "fail" else PROMPT
        held = served.stream("one", max_tokens=30, prompt=prompt)
        assert (await held.read()).WhichOneof("event") == "started"
        for _ in range(2):
            assert await refusal(served.generate("one")) == (
                "RESOURCE_EXHAUSTED", "TOO_MANY_CONCURRENT_REQUESTS", 1,
            )  # fmt: skip
        assert served.meter("one").num_requests == 1
        if end == "cancel":
            held.cancel()
            await until(lambda: served.meter("one").num_requests == 0)
        fake_plane.may_run.set()
        if end == "finish":
            assert (await rest_of(held))[-1].HasField("finished")
        elif end == "fail":
            assert (await refusal(held.read()))[1] == "REQUEST_FAILED"
        await served.generate("one")
        assert served.meter("one").num_requests == 0

    on_server(story)


def test_a_request_that_is_refused_later_keeps_no_place(on_server):
    async def story(served):
        for prompt, reason in (("x" * 5000, "CONTEXT_LENGTH_EXCEEDED"), ("", "INVALID_REQUEST")):
            call = served.generate("one", prompt=prompt)
            assert (await refusal(call))[:2] == ("INVALID_ARGUMENT", reason)
        call = served.generate("one", cache_salt="x" * 257)
        assert (await refusal(call))[0] == "INVALID_ARGUMENT"
        assert served.meter("one").num_requests == 0

    on_server(story)


def test_tokens_of_prompts_and_answers_are_paid_for_by_the_minute(on_server):
    async def story(served):
        assert len(PROMPT) == 33
        await served.generate("poor", max_tokens=27)  # 60 tokens: all there are
        assert await refusal(served.generate("poor")) == (
            "RESOURCE_EXHAUSTED", "TOKENS_PER_MINUTE_USED_UP", 1,
        )  # fmt: skip
        await served.generate("alice")  # nobody else's affair
        served.clock.now += 1
        await served.generate("poor", max_tokens=27)  # 59 more than there are
        assert (await refusal(served.generate("poor")))[2] == 60
        served.clock.now += 60
        await served.generate("poor")

    on_server(story)


def test_what_was_generated_before_a_cancel_is_paid_for(on_server):
    async def story(served):
        held = served.stream("poor", max_tokens=200)
        events = 0
        async for event in held:
            events += len(event.delta.token_ids)
            if events >= 27:
                break
        held.cancel()
        await until(lambda: served.meter("poor").num_requests == 0)
        _, reason, wait_s = await refusal(served.generate("poor"))
        assert reason == "TOKENS_PER_MINUTE_USED_UP"
        assert wait_s >= 33 + events - 60

    on_server(story)


def test_what_nobody_has_read_yet_is_paid_for_at_the_end(on_server):
    async def story(served):
        principal = served.keyring.authenticate(f"Bearer {served.tokens['poor']}")
        with acting_as(principal):
            generation = await served.frontend.submit(PROMPT, asking(60))
        async with generation:
            await generation.admitted()
            await until(lambda: generation.has_ended)
        assert (await refusal(served.generate("poor")))[2] == 33 + 60 - 60 + 1

    on_server(story)


def test_cached_prompts_stay_with_their_token_unless_it_shares_them(on_server):
    async def story(served):
        async def cached(name, **fields):
            return (await served.generate(name, **fields)).usage.cached_tokens

        assert await cached("alice") == 0
        own = await cached("alice")
        assert own > 0
        assert await cached("bob") == 0
        assert await cached("alice", cache_salt="x") == 0
        assert await cached("carol") == 0
        assert await cached("dave") == own
        assert await cached("bob") == own

    on_server(story)
