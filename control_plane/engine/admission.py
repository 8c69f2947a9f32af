"""From a prompt and its parameters to a request the engine can take; the caller's faults end here.

Pure but for the drawn seed, and safe in any thread.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
import secrets
from collections.abc import Mapping, Sequence

from control_plane.core.errors import PromptTooLongError
from control_plane.core.generation_params import GenerationParams
from control_plane.core.limits import RequestLimits
from control_plane.core.request import Request
from control_plane.text.tokenizer import MAX_BYTES_PER_TOKEN, Tokenizer
from planes.errors import ValidationError


class Admission:
    """Tokenizes, checks, draws the seed and numbers the requests of one engine.

    `vocab_size`: width of the model's logits; every token id is below it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: RequestLimits,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._ids = itertools.count(1)

    @property
    def max_model_len(self) -> int:
        """Prompt and completion tokens of one request."""
        return self._limits.max_model_len

    def check_text(self, text: str) -> None:
        """Raise ValidationError for a text that is not worth tokenizing."""
        if not text:
            raise ValidationError("the prompt must not be empty", field="prompt")
        limit = self._limits.max_model_len * MAX_BYTES_PER_TOKEN
        # Characters first: a text of many has at least as many bytes, and need not be encoded.
        size = len(text) if len(text) > limit else len(text.encode(errors="surrogatepass"))
        if size > limit:
            raise PromptTooLongError(
                f"the prompt has at least {size} bytes, at most {limit} are taken "
                f"({MAX_BYTES_PER_TOKEN} for each of the max_model_len "
                f"{self._limits.max_model_len} tokens)",
                field="prompt",
            )

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a checked text. Takes about 1 ms for 2 kB. Raises EngineError."""
        self.check_text(text)
        return self._tokenizer.encode(text)

    def make_request(
        self, token_ids: Sequence[int], params: GenerationParams, *, arrival_time: float
    ) -> Request:
        """Check tokens and parameters and return a new request with its seed drawn.

        `arrival_time`: the engine's clock. Raises ValidationError, and RequestNeverFitsError for
        what the block pool could not hold even alone.
        """
        params.validate()
        # The scheduler has several samples and beams, but no stream carries them yet.
        if params.n != 1:
            raise ValidationError(f"n must be 1 for this server, got {params.n}", field="n")
        if params.beam_width is not None:
            raise ValidationError(
                f"this server searches no beams, got beam_width {params.beam_width}",
                field="beam_width",
            )
        if params.logit_bias:
            params = dataclasses.replace(params, logit_bias=self._check_bias(params.logit_bias))
        input_tokens = self._check_tokens(token_ids, params.max_tokens)
        if params.seed is None:
            params = dataclasses.replace(params, seed=secrets.randbits(64))
        return Request(
            id=next(self._ids),
            input_tokens=input_tokens,
            params=params,
            eos_token_ids=self._eos_token_ids,
            arrival_time=arrival_time,
        )

    def _check_bias(self, logit_bias: Mapping[int, float]) -> dict[int, float]:
        """Return a copy, which nobody changes while the request runs."""
        for token_id in logit_bias:
            if token_id >= self._vocab_size:
                raise ValidationError(
                    f"logit_bias: token ids must be 0 to {self._vocab_size - 1}, got {token_id}",
                    field="logit_bias",
                )
        return dict(logit_bias)

    def _check_tokens(self, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        """Return the tokens as plain integers, whatever kind a caller or a tokenizer gives."""
        try:
            self._limits.check(len(token_ids), max_tokens)  # first: a mistake may have millions
            tokens = [int(operator.index(token)) for token in token_ids]
        except TypeError as error:
            raise ValidationError(
                f"the prompt must be text or a sequence of token ids: {error}", field="prompt"
            ) from None
        vocab_size = self._vocab_size
        if max(tokens) >= vocab_size or min(tokens) < 0:
            index, bad = next((i, t) for i, t in enumerate(tokens) if not 0 <= t < vocab_size)
            raise ValidationError(
                f"token ids must be 0 to {vocab_size - 1}, got {bad} at index {index}",
                field="token_ids",
            )
        return tokens
