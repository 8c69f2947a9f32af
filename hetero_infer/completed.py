"""What became of the requests of an `InferenceEngine`."""

from __future__ import annotations

from dataclasses import dataclass, field

from control_plane.core.request import FinishReason, Request, RequestState, StateChange
from control_plane.engine.events import RequestEnd, RequestUpdate
from control_plane.text.detokenizer import make_detokenizer
from control_plane.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class CompletedSample:
    """One text of a request. `finish_reason`: stop, length, cancelled or error."""

    output_text: str
    output_tokens: list[int]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class CompletedRequest:
    """A request that ended.

    `output_text`, `output_tokens`, `finish_reason`: of the first of its `samples`; the ids are
    without the end token. `generated_tokens`: of all samples. `success`: it came to its end, by the
    end token or by max_tokens; otherwise `error` says why not, and texts and tokens are what there
    was until then. `duration`: seconds from submission to the end. `finish_reason`: stop, length,
    cancelled or error. `cached_tokens`: tokens of the prompt that had been computed before.
    `history`: every state it entered, and when, on the clock of `time.monotonic`.
    """

    request_id: int
    output_text: str
    output_tokens: list[int]
    generated_tokens: int
    success: bool
    error: str | None
    duration: float
    finish_reason: str
    samples: tuple[CompletedSample, ...] = ()
    cached_tokens: int = 0
    history: tuple[StateChange, ...] = ()


@dataclass(slots=True)
class Pending:
    """A request under way: the tokens of its samples so far, and how those that ended did."""

    request: Request
    output_tokens: list[list[int]]
    finish_reasons: dict[int, FinishReason] = field(default_factory=dict)

    def take(self, update: RequestUpdate) -> None:
        """Note what a step brought."""
        self.output_tokens[update.sample_index] += update.new_token_ids
        if update.finish_reason is not None:
            self.finish_reasons[update.sample_index] = update.finish_reason

    def complete(self, end: RequestEnd, tokenizer: Tokenizer) -> CompletedRequest:
        """Return what the caller gets."""
        error = (
            None if end.state is RequestState.COMPLETED else f"the request was {end.state.value}"
        )
        if end.error is not None:
            error = end.error.message
        samples = []
        for index, tokens in enumerate(self.output_tokens):
            text, reason = "", self.finish_reasons.get(index, end.finish_reason)
            try:
                detokenizer = make_detokenizer(tokenizer)  # the same text as over the wire
                text = detokenizer.push(tokens) + detokenizer.finish()
            # The tokenizer may be the caller's own; its fault must not cost the other requests.
            except Exception as fault:  # noqa: BLE001
                error = error or f"the tokens could not be turned into text: {fault!r}"
                reason = FinishReason.ERROR
            samples.append(CompletedSample(text, tokens, reason.value))
        first = samples[0]
        return CompletedRequest(
            request_id=self.request.id,
            output_text=first.output_text,
            output_tokens=first.output_tokens,
            generated_tokens=sum(len(sample.output_tokens) for sample in samples),
            success=error is None,
            error=error,
            duration=end.timings.total_s,
            finish_reason=first.finish_reason,
            samples=tuple(samples),
            cached_tokens=end.cached_tokens,
            history=end.history,
        )
