"""What the requests experience, counted where their readers are served: on the event loop.

Everything here is about what was handed to a request's stream. What the engine computes for nobody
(behind a stop string, after a client has left) is in no sum, so that these numbers are those that
the clients have.
"""

from __future__ import annotations

from control_plane.core.request import FinishReason, Request, RequestState
from control_plane.engine.events import RequestEnd
from control_plane.metrics import buckets
from control_plane.metrics.histogram import BatchedHistogram, Histogram
from planes.errors import EngineError


class RequestMeter:
    """Sums over all requests that the engine was given; used on the event loop only.

    A request with several samples is one request. `num_successes`: completed requests, by the
    finish reason of their first sample; the time histograms of whole requests are of these, too.
    `num_cancelled`: requests that their clients left, and those ended by an operator or by the
    server's shutdown. `inter_token`: between two arrivals of tokens of one sample, on the engine's
    clock.
    """

    def __init__(self) -> None:
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.num_cancelled = 0
        self.num_successes = {FinishReason.STOP: 0, FinishReason.LENGTH: 0}
        self.time_to_first_token = Histogram(buckets.TIME_TO_FIRST_TOKEN_S)
        self.inter_token = BatchedHistogram(buckets.INTER_TOKEN_S)
        self.e2e = Histogram(buckets.REQUEST_S)
        self.queue = Histogram(buckets.REQUEST_S)
        self.prefill = Histogram(buckets.REQUEST_S)
        self.decode = Histogram(buckets.REQUEST_S)

    def watch(self, request: Request) -> RequestWatch:
        """Return what is to be told of one request."""
        return RequestWatch(self, request)

    def note_success(self, end: RequestEnd) -> None:
        """Take in the end of a completed request."""
        timings = end.timings
        reason = end.finish_reason
        self.num_successes[reason] = self.num_successes.get(reason, 0) + 1
        self.e2e.observe(timings.total_s)
        if timings.queue_s is not None:
            self.queue.observe(timings.queue_s)
            if timings.time_to_first_token_s is not None:
                self.prefill.observe(timings.time_to_first_token_s - timings.queue_s)
        if timings.time_to_first_token_s is not None:
            self.decode.observe(timings.total_s - timings.time_to_first_token_s)


class RequestWatch:
    """Follows one request; see `control_plane.engine.watch.StreamWatch` for who calls when."""

    __slots__ = (
        "_arrival_time",
        "_has_begun",
        "_is_over",
        "_last_at",
        "_meter",
        "_num_prompt_tokens",
    )

    def __init__(self, meter: RequestMeter, request: Request) -> None:
        self._meter = meter
        self._arrival_time = request.arrival_time
        self._num_prompt_tokens = request.num_prompt_tokens
        self._last_at: list[float | None] = [None] * request.params.n
        self._has_begun = False
        self._is_over = False

    def admit(self) -> None:
        """Count its prompt."""
        self._meter.num_prompt_tokens += self._num_prompt_tokens

    def take(self, sample_index: int, num_tokens: int, at: float) -> None:
        """Count tokens, and the time since the last ones of the sample."""
        meter, last_at = self._meter, self._last_at
        meter.num_generation_tokens += num_tokens
        last = last_at[sample_index]
        if last is not None:
            meter.inter_token.observe(at - last)
        elif not self._has_begun:
            self._has_begun = True
            meter.time_to_first_token.observe(at - self._arrival_time)
        last_at[sample_index] = at

    def give(self, num_tokens: int) -> None:
        """Count tokens that came before."""
        self._meter.num_generation_tokens += num_tokens

    def end(self, end: RequestEnd) -> None:
        """Count how it ended."""
        self._is_over = True
        if end.state is RequestState.COMPLETED:
            self._meter.note_success(end)
        elif end.state is RequestState.CANCELLED:
            self._meter.num_cancelled += 1

    def fail(self, error: EngineError) -> None:  # noqa: ARG002 - the answer's error is counted
        """Note that it cannot go on."""
        self._is_over = True

    def leave(self) -> None:
        """Count it as cancelled if it goes on."""
        if not self._is_over:
            self._is_over = True
            self._meter.num_cancelled += 1
