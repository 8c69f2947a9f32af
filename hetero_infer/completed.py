"""What became of the requests of an `InferenceEngine`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from control_plane.core.batch import TokenLogprobs
from control_plane.core.request import FinishReason, Request, RequestState, StateChange
from control_plane.engine.events import RequestEnd, RequestUpdate
from control_plane.engine.sample_text import SampleText
from control_plane.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class CompletedSample:
    """One text of a request. `finish_reason`: stop, length, cancelled or error.

    `logprobs`: one for each token, if they were asked for. `matched_stop`: the text of `stop` or
    token of `stop_token_ids` that ended it, if one did.
    """

    output_text: str
    output_tokens: list[int]
    finish_reason: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    matched_stop: str | int | None = None


@dataclass(frozen=True, slots=True)
class CompletedRequest:
    """A request that ended.

    `output_text`, `output_tokens`, `finish_reason`: of the first of its `samples`; the ids are
    without the end token. `generated_tokens`: of all samples. `success`: it came to its end, by the
    end token or by max_tokens; otherwise `error` says why not, and texts and tokens are what there
    was until then. `duration`: seconds from submission to the end. `finish_reason`: stop, length,
    cancelled or error. `cached_tokens`: tokens of the prompt that had been computed before.
    `history`: every state it entered, and when, on the clock of `time.monotonic`.
    `prompt_logprobs`: one for each token of the prompt but the first, if they were asked for.
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
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(slots=True)
class _Tokens:
    """What came of one sample."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None


class Pending:
    """A request under way: the tokens of its samples so far, and how those that ended did.

    `stop_sample` is told of a sample that a stop string has ended, and its number of tokens.
    """

    def __init__(
        self, request: Request, tokenizer: Tokenizer, stop_sample: Callable[[int, int], None]
    ) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._stop_sample = stop_sample
        self._samples = [_Tokens() for _ in range(request.params.n)]
        self._prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        # Text is made at the end, but stop strings are looked for as tokens come.
        self._watched: list[SampleText] | None = None
        if request.params.stop:
            self._watched = [SampleText(tokenizer, request.params) for _ in self._samples]

    def take(self, update: RequestUpdate) -> None:
        """Note what a step brought."""
        sample = self._samples[update.sample_index]
        sample.token_ids += update.new_token_ids
        sample.logprobs += update.logprobs
        if update.prompt_logprobs is not None:
            self._prompt_logprobs = update.prompt_logprobs
        if update.finish_reason is not None:
            sample.finish_reason = update.finish_reason
            sample.matched_stop = update.matched_stop
        elif self._watched is not None:
            self._watch(self._watched, update)

    def _watch(self, watched: list[SampleText], update: RequestUpdate) -> None:
        """End the sample if a stop string is complete."""
        text = watched[update.sample_index]
        if text.has_ended:
            return
        try:
            text.push(update.new_token_ids)
        # The tokenizer may be the caller's own: `complete` meets its fault again and reports it.
        except Exception:  # noqa: BLE001
            self._watched = None
            return
        if text.has_ended:
            self._stop_sample(update.sample_index, text.num_tokens)

    def complete(self, end: RequestEnd) -> CompletedRequest:
        """Return what the caller gets."""
        error = (
            None if end.state is RequestState.COMPLETED else f"the request was {end.state.value}"
        )
        if end.error is not None:
            error = end.error.message
        samples = []
        for tokens in self._samples:
            try:
                samples.append(self._complete_sample(tokens, end))
            # The tokenizer may be the caller's own; its fault must not cost the other requests.
            except Exception as fault:  # noqa: BLE001
                error = error or f"the tokens could not be turned into text: {fault!r}"
                reason = FinishReason.ERROR.value
                samples.append(CompletedSample("", tokens.token_ids, reason))
        first = samples[0]
        return CompletedRequest(
            request_id=self._request.id,
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
            prompt_logprobs=self._prompt_logprobs,
        )

    def _complete_sample(self, tokens: _Tokens, end: RequestEnd) -> CompletedSample:
        """Return one text, the same as over the wire."""
        text = SampleText(self._tokenizer, self._request.params)
        pieces = [text.push(tokens.token_ids, tokens.logprobs), text.finish()]
        reason = tokens.finish_reason or end.finish_reason
        is_matched = text.matched_stop is not None
        return CompletedSample(
            output_text="".join(piece.text for piece in pieces),
            output_tokens=[token for piece in pieces for token in piece.token_ids],
            finish_reason=(FinishReason.STOP if is_matched else reason).value,
            logprobs=tuple(entry for piece in pieces for entry in piece.logprobs),
            matched_stop=text.matched_stop if is_matched else tokens.matched_stop,
        )
