"""One OpenTelemetry span for every request that the engine was given, written when it has ended.

Needs opentelemetry-api; see `control_plane.tracing.provider` for where spans go.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from opentelemetry.context import Context
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    Tracer,
    TraceState,
    set_span_in_context,
)

from control_plane.core.request import Request, RequestState
from control_plane.engine.events import RequestEnd
from control_plane.engine.watch import StreamWatch, WatchMaker
from control_plane.tracing.trace_context import TraceContext, current_trace
from planes.errors import EngineError

SPAN_NAME = "llm_request"

_EVENTS = {
    RequestState.PENDING: "queue",
    RequestState.PREFILL: "prefill",
    RequestState.DECODE: "decode",
}
"""States that begin something; the others are the end of the span."""


class SpanMaker:
    """Makes watches that write a span, besides what others do.

    `models`: the model's name, then those of its adapters.
    """

    def __init__(self, tracer: Tracer, models: Sequence[str], then: WatchMaker) -> None:
        self._tracer = tracer
        self._models = models
        self._then = then

    def watch(self, request: Request) -> StreamWatch:
        """Return the watch of a request of the trace that this task works for."""
        return _SpanWatch(self, request, current_trace(), self._then(request))

    def write(
        self,
        request: Request,
        trace: TraceContext | None,
        end: RequestEnd | None,
        error: EngineError | None,
        num_tokens: int,
    ) -> None:
        """Write the span of a request that is over; `end`: None if it was not waited for."""
        wall_ns, now = time.time_ns(), time.monotonic()  # of this clock are a request's times

        def wall(at: float) -> int:
            return wall_ns + round((at - now) * 1e9)

        arrival = request.arrival_time
        span = self._tracer.start_span(
            SPAN_NAME, _parent(trace), SpanKind.SERVER, start_time=wall(arrival)
        )
        history = end.history if end is not None and end.history else tuple(request.history)
        if span.is_recording():
            span.set_attributes(self._attributes(request, end, num_tokens))
            for change in history:
                if change.state in _EVENTS:
                    span.add_event(_EVENTS[change.state], timestamp=wall(change.at))
            if error is not None:
                span.set_attribute("error.type", error.reason)
                span.set_status(Status(StatusCode.ERROR, error.message))
        span.end(wall(now if end is None else arrival + end.timings.total_s))

    def _attributes(
        self, request: Request, end: RequestEnd | None, num_tokens: int
    ) -> dict[str, str | int | float | list[str]]:
        params = request.params
        found: dict[str, str | int | float | list[str]] = {
            "gen_ai.request.model": self._models[request.adapter],
            "gen_ai.request.id": request.name,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.choice.count": params.n,
            "gen_ai.usage.input_tokens": request.num_prompt_tokens,
            "gen_ai.usage.output_tokens": num_tokens,
        }
        reason = "cancelled" if end is None else end.finish_reason.value
        found["gen_ai.response.finish_reasons"] = [reason]
        if end is not None:
            timings = end.timings
            found["gen_ai.latency.e2e"] = timings.total_s
            if timings.queue_s is not None:
                found["gen_ai.latency.time_in_queue"] = timings.queue_s
            if timings.time_to_first_token_s is not None:
                found["gen_ai.latency.time_to_first_token"] = timings.time_to_first_token_s
        return found


class _SpanWatch:
    """Follows one request; see `control_plane.engine.watch.StreamWatch` for who calls when."""

    __slots__ = ("_is_over", "_maker", "_num_tokens", "_request", "_then", "_trace")

    def __init__(
        self, maker: SpanMaker, request: Request, trace: TraceContext | None, then: StreamWatch
    ) -> None:
        self._maker = maker
        self._request = request
        self._trace = trace
        self._then = then
        self._num_tokens = 0
        self._is_over = False

    def admit(self) -> None:
        """Pass it on."""
        self._then.admit()

    def take(self, sample_index: int, num_tokens: int, at: float) -> None:
        """Count tokens."""
        self._num_tokens += num_tokens
        self._then.take(sample_index, num_tokens, at)

    def give(self, num_tokens: int) -> None:
        """Count tokens."""
        self._num_tokens += num_tokens
        self._then.give(num_tokens)

    def end(self, end: RequestEnd) -> None:
        """Write the span."""
        self._then.end(end)
        self._write(end, end.error)

    def fail(self, error: EngineError) -> None:
        """Write the span, up to now."""
        self._then.fail(error)
        self._write(None, error)

    def leave(self) -> None:
        """Write the span, up to now, if the request goes on."""
        self._then.leave()
        self._write(None, None)

    def _write(self, end: RequestEnd | None, error: EngineError | None) -> None:
        if not self._is_over:
            self._is_over = True
            self._maker.write(self._request, self._trace, end, error, self._num_tokens)


def _parent(trace: TraceContext | None) -> Context:
    """Return the caller's span as OpenTelemetry knows it; without one, the trace begins here."""
    if trace is None:
        return Context()
    context = SpanContext(
        int(trace.trace_id, 16),
        int(trace.parent_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(TraceFlags.SAMPLED if trace.is_sampled else TraceFlags.DEFAULT),
        trace_state=TraceState.from_header([trace.state] if trace.state else []),
    )
    return set_span_in_context(NonRecordingSpan(context), Context())
