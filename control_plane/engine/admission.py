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
from control_plane.core.request_options import PLAIN, RequestOptions
from control_plane.engine.plane import BEAMS, SAMPLES
from control_plane.text.tokenizer import MAX_BYTES_PER_TOKEN, Tokenizer
from planes.errors import ValidationError


class Admission:
    """Tokenizes, checks, draws the seed and numbers the requests of one engine.

    `vocab_size`: width of the model's logits; every token id is below it. `features`: of the
    compute plane, in the words of Describe; None: it does everything.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: RequestLimits,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        features: frozenset[str] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._features = features
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
        self,
        token_ids: Sequence[int],
        params: GenerationParams,
        *,
        arrival_time: float,
        options: RequestOptions = PLAIN,
    ) -> Request:
        """Check tokens and parameters and return a new request with its seed drawn.

        `arrival_time`: the engine's clock. Raises ValidationError, and RequestNeverFitsError for
        what the block pool could not hold even alone.
        """
        params.validate()
        options.validate()
        self._check_search(params)
        if params.logit_bias:
            params = dataclasses.replace(params, logit_bias=self._check_bias(params.logit_bias))
        input_tokens = self._check_tokens(token_ids, params)
        if params.seed is None:
            params = dataclasses.replace(params, seed=secrets.randbits(64))
        return Request(
            id=next(self._ids),
            input_tokens=input_tokens,
            params=params,
            eos_token_ids=self._eos_token_ids,
            arrival_time=arrival_time,
            priority=options.priority,
            cache_salt=options.cache_salt,
            name=options.name,
        )

    def _check_search(self, params: GenerationParams) -> None:
        """Refuse samples and beams that the compute plane, or its slots, cannot have."""
        width, features = params.beam_width, self._features
        if width is not None:
            num_end_tokens = 0 if params.ignore_eos else len(self._eos_token_ids)
            self._limits.check_beams(width, num_end_tokens)
        if features is None:
            return
        if width is not None and not features >= BEAMS:
            raise ValidationError(
                f"beam_width must be unset for this compute plane, which lacks "
                f"{', '.join(sorted(BEAMS - features))}, got {width}",
                field="beam_width",
            )
        if params.n > 1 and not features >= SAMPLES:
            raise ValidationError(
                f"n must be 1 for this compute plane, which lacks "
                f"{', '.join(sorted(SAMPLES - features))}, got {params.n}",
                field="n",
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

    def _check_tokens(self, token_ids: Sequence[int], params: GenerationParams) -> list[int]:
        """Return the tokens as plain integers, whatever kind a caller or a tokenizer gives."""
        try:
            # First: a mistake may have millions.
            self._limits.check(len(token_ids), params.max_tokens, params.beam_width or 1)
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
