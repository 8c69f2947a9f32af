"""From a prompt and its parameters to a request the engine can take; the caller's faults end here.

Pure but for the drawn seed, and safe in any thread.
"""

from __future__ import annotations

import dataclasses
import itertools
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from control_plane.core.generation_params import GenerationParams
from control_plane.core.request import Request
from control_plane.errors import PromptTooLongError
from control_plane.text.tokenizer import MAX_BYTES_PER_TOKEN, Tokenizer
from planes.errors import ValidationError


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """What a prompt must satisfy. `max_model_len`: prompt and completion tokens together."""

    max_model_len: int
    vocab_size: int

    @property
    def max_prompt_bytes(self) -> int:
        """A longer text is refused before it is tokenized."""
        return self.max_model_len * MAX_BYTES_PER_TOKEN


class Admission:
    """Tokenizes, checks, draws the seed and numbers the requests of one engine."""

    def __init__(
        self, tokenizer: Tokenizer, limits: PromptLimits, *, eos_token_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._eos_token_ids = frozenset(eos_token_ids)
        self._ids = itertools.count(1)

    @property
    def limits(self) -> PromptLimits:
        """What a prompt must satisfy."""
        return self._limits

    def check_text(self, text: str) -> None:
        """Raise ValidationError for a text that is not worth tokenizing."""
        if not text:
            raise ValidationError("the prompt must not be empty", field="prompt")
        limit = self._limits.max_prompt_bytes
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

        `arrival_time`: the engine's clock. Raises ValidationError.
        """
        params.validate()
        self._check_tokens(token_ids, params)
        if params.seed is None:
            params = dataclasses.replace(params, seed=secrets.randbits(64))
        return Request(
            id=next(self._ids),
            input_tokens=list(token_ids),
            params=params,
            eos_token_ids=self._eos_token_ids,
            arrival_time=arrival_time,
        )

    def _check_tokens(self, token_ids: Sequence[int], params: GenerationParams) -> None:
        limits = self._limits
        if not token_ids:
            raise ValidationError("the prompt must have at least 1 token, got 0", field="prompt")
        if max(token_ids) >= limits.vocab_size or min(token_ids) < 0:
            index, bad = next(
                (i, t) for i, t in enumerate(token_ids) if not 0 <= t < limits.vocab_size
            )
            raise ValidationError(
                f"token ids must be 0 to {limits.vocab_size - 1}, got {bad} at index {index}",
                field="token_ids",
            )
        total = len(token_ids) + params.max_tokens
        if total > limits.max_model_len:
            raise PromptTooLongError(
                f"prompt ({len(token_ids)} tokens) + max_tokens ({params.max_tokens}) = {total} "
                f"must be at most max_model_len ({limits.max_model_len})",
                field="max_tokens",
            )
