"""Spans of requests by gRPC and HTTP, in memory, and the trace's id in the log."""

from __future__ import annotations

import asyncio
import importlib.util
from concurrent import futures

import grpc
import pytest
import structlog

pytest.importorskip("opentelemetry.sdk", reason="needs the extra `otel`")

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from control_plane.metrics.instruments import Instruments
from control_plane.tracing.provider import Tracing, load_tracing
from planes.errors import ConfigError
from protos.hetero.inference.v1 import inference_pb2 as pb
from tests.control_plane.metrics.whole_plane import whole_plane

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
HEADER = f"00-{TRACE}-{PARENT}-01"


@pytest.fixture
def exporter(monkeypatch):
    """Where the spans of control planes made in this test go."""
    memory = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    tracing = Tracing(provider.get_tracer("test"), provider.shutdown)
    monkeypatch.setattr("control_plane.app.load_tracing", lambda _: tracing)
    return memory


@pytest.mark.wide
def test_a_request_leaves_one_span_below_its_callers(fake_plane, tmp_path, exporter):
    fake_plane.poisoned_prompt, fake_plane.adapters = b"bad", ("poet",)

    async def run() -> tuple[float, list]:
        async with whole_plane(fake_plane, tmp_path) as served:
            with structlog.testing.capture_logs(
                processors=[structlog.contextvars.merge_contextvars]
            ) as logs:
                request = pb.GenerateRequest(
                    text="hello", sampling=pb.SamplingParams(max_tokens=5, seed=0)
                )
                call = served.rpc.Generate(request, metadata=(("traceparent", HEADER),))
                total_s = (await call).timings.total_s
                body = {"model": "poet", "prompt": "bad", "max_tokens": 3, "stream": True}
                answer = await served.http.post(
                    "/v1/completions", json=body, headers={"traceparent": HEADER}
                )
                assert "error" in answer.text
                await served.settled()
        return total_s, logs

    total_s, logs = asyncio.run(run())
    ended = [line for line in logs if line["event"] in ("rpc ended", "http request ended")]
    assert [line["trace_id"] for line in ended if "/metrics" not in line["method"]] == [TRACE] * 2
    good, bad = exporter.get_finished_spans()
    for span in (good, bad):
        assert (span.name, span.kind) == ("llm_request", SpanKind.SERVER)
        assert f"{span.context.trace_id:032x}" == TRACE
        assert f"{span.parent.span_id:016x}" == PARENT
    assert good.status.status_code is StatusCode.UNSET
    assert (good.end_time - good.start_time) / 1e9 == pytest.approx(total_s, abs=1e-6)
    assert [event.name for event in good.events] == ["queue", "prefill", "decode"]
    times = [good.start_time, *(event.timestamp for event in good.events), good.end_time]
    assert times == sorted(times)
    found = good.attributes
    assert found["gen_ai.request.model"] == "fake"
    assert found["gen_ai.usage.input_tokens"] == found["gen_ai.usage.output_tokens"] == 5
    assert found["gen_ai.response.finish_reasons"] == ("length",)
    assert found["gen_ai.latency.e2e"] == total_s
    assert bad.attributes["gen_ai.request.model"] == "poet"
    assert bad.status.status_code is StatusCode.ERROR
    assert bad.attributes["error.type"] == "REQUEST_FAILED"


@pytest.mark.wide
def test_who_leaves_has_a_span_up_to_then_and_a_trace_of_its_own(fake_plane, tmp_path, exporter):
    async def run() -> None:
        async with whole_plane(fake_plane, tmp_path) as served:
            request = pb.GenerateRequest(
                text="hello", sampling=pb.SamplingParams(max_tokens=200, seed=0)
            )
            call = served.rpc.GenerateStream(request)
            await call.read()
            await call.read()
            call.cancel()
            await served.settled()

    asyncio.run(run())
    (span,) = exporter.get_finished_spans()
    assert span.parent is None
    assert span.attributes["gen_ai.response.finish_reasons"] == ("cancelled",)
    assert 1 <= span.attributes["gen_ai.usage.output_tokens"] < 200


def test_a_provider_of_the_process_gets_the_spans(monkeypatch):
    provider = TracerProvider()
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    tracing = load_tracing(None)
    assert tracing is not None
    assert Instruments(tracing).watch("m") is not None
    provider.shutdown()


def test_spans_are_written_only_where_somebody_wants_them():
    assert load_tracing(None) is None  # the process has no provider of its own
    assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
    instruments = Instruments(None)
    assert instruments.watch("m") == instruments.requests.watch


def test_an_endpoint_without_what_writes_spans_is_refused(monkeypatch):
    find_spec = importlib.util.find_spec
    missing = "opentelemetry.sdk"
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else find_spec(name)
    )
    with pytest.raises(ConfigError, match=r"opentelemetry-sdk.*otel"):
        load_tracing("http://127.0.0.1:4317")


def test_an_endpoint_gets_the_spans_and_the_process_no_provider():
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc.trace_exporter")
    from opentelemetry.proto.collector.trace.v1 import (
        trace_service_pb2,
        trace_service_pb2_grpc,
    )

    received = []

    class Collector(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request, context):  # noqa: ARG002, N802 - gRPC's
            received.append(request)
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(futures.ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Collector(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    tracing = load_tracing(f"http://127.0.0.1:{port}")
    assert tracing is not None
    tracing.tracer.start_span("llm_request").end()
    tracing.close()  # sends it
    server.stop(None).wait()
    (request,) = received
    (spans,) = request.resource_spans
    names = {a.key: a.value.string_value for a in spans.resource.attributes}
    assert names["service.name"] == "hetero-paged-infer"
    assert [span.name for span in spans.scope_spans[0].spans] == ["llm_request"]
    assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
