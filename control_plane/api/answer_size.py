"""How many log-probabilities one answer may have: they are a hundred times the tokens' bytes."""

from __future__ import annotations

from typing import Final

from control_plane.core.generation_params import MAX_LOGPROBS
from control_plane.engine.frontend import Generation
from planes.errors import ValidationError

MAX_HELD_LOGPROBS: Final = 1 << 20
"""Those of other likely tokens included; or all that one sample of the model's length has."""


class AnswerSize:
    """Adds up what will be held of the generations of one answer.

    `num_samples`: of each, that are collected before they are sent; 0: they are streamed.
    `num_echoes`: how often the prompts' come in what is collected.
    """

    def __init__(
        self,
        max_model_len: int,
        *,
        num_samples: int,
        num_echoes: int = 1,
    ) -> None:
        self._num_samples = num_samples
        self._num_echoes = num_echoes
        self._num_logprobs = 0
        self._limit = max(MAX_HELD_LOGPROBS, max_model_len * (1 + MAX_LOGPROBS))

    def add(self, generation: Generation) -> None:
        """Add a generation. Raises ValidationError where that is too much."""
        params = generation.params
        if params.num_logprobs is not None:
            num_tokens = self._num_samples * params.max_tokens
            self._num_logprobs += num_tokens * (1 + params.num_logprobs)
        if params.num_prompt_logprobs is not None:
            num_tokens = self._num_echoes * generation.num_prompt_tokens
            self._num_logprobs += num_tokens * (1 + params.num_prompt_logprobs)
        if self._num_logprobs > self._limit:
            advice = ", or stream them" if self._num_samples else ""
            raise ValidationError(
                f"one answer has at most {self._limit} log-probabilities, those of other likely "
                f"tokens included, and this one may have {self._num_logprobs}: ask for fewer, for "
                f"fewer tokens or samples{advice}",
                field="num_logprobs",
            )
