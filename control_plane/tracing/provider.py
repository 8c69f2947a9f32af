"""Where spans go: to the collector that is configured, or to where the process is told otherwise.

OpenTelemetry is imported here and in `spans` only, and only where it is installed.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from planes.errors import ConfigError
from planes.extras import the_extra

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

    from control_plane.engine.watch import WatchMaker

SERVICE_NAME = "hetero-paged-infer"
EXTRA = "otel"

_NEEDED = {
    "opentelemetry.sdk": "opentelemetry-sdk",
    "opentelemetry.exporter.otlp.proto.grpc": "opentelemetry-exporter-otlp-proto-grpc",
}


@dataclass(frozen=True, slots=True)
class Tracing:
    """Writes spans. `close` sends what was not sent yet; it may wait for the collector."""

    tracer: Tracer
    close: Callable[[], None]

    def watch(self, models: Sequence[str], then: WatchMaker) -> WatchMaker:
        """Return what makes watches that write a span and pass everything on to `then`'s.

        `models`: the model's name, then those of its adapters.
        """
        from control_plane.tracing.spans import SpanMaker

        return SpanMaker(self.tracer, models, then).watch


def load_tracing(endpoint: str | None) -> Tracing | None:
    """Return what writes spans; None if nobody wants any.

    `endpoint`: of an OTLP collector (gRPC). Without one, spans go where the process's own tracer
    provider sends them, if it has one: that is how `opentelemetry-instrument` sets it up. Raises
    ConfigError if there is an endpoint, and what it takes is not installed.
    """
    if endpoint is not None:
        return _to_collector(endpoint)
    if "opentelemetry.trace" not in sys.modules:  # who sets a provider has imported it
        return None
    from opentelemetry import trace

    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
        return None
    return Tracing(provider.get_tracer(SERVICE_NAME), lambda: None)


def _to_collector(endpoint: str) -> Tracing:
    for module, package in _NEEDED.items():
        if not _has(module):
            raise ConfigError(
                f"otlp_traces_endpoint: spans need {package}, of {the_extra(EXTRA)}",
                field="otlp_traces_endpoint",
            )
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create({"service.name": SERVICE_NAME})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return Tracing(provider.get_tracer(SERVICE_NAME), provider.shutdown)


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even its parent is there
        return False
