"""How large a request may be: one rule for whoever takes requests in and for the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from control_plane.core.errors import PromptTooLongError, RequestNeverFitsError
from planes.errors import ValidationError


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What every request must satisfy, whatever else runs.

    `max_model_len`: prompt and completion tokens together. `num_blocks`: KV blocks of the whole
    pool, of `block_size` tokens each.
    """

    max_model_len: int
    block_size: int
    num_blocks: int

    def check(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Refuse what can never run.

        Raises ValidationError for an empty prompt, PromptTooLongError for too many tokens,
        RequestNeverFitsError for a request that the pool could not hold even alone.
        """
        if num_prompt_tokens < 1:
            raise ValidationError("the prompt must have at least 1 token, got 0", field="prompt")
        total = num_prompt_tokens + max_tokens
        asked = f"prompt ({num_prompt_tokens} tokens) + max_tokens ({max_tokens})"
        if total > self.max_model_len:
            raise PromptTooLongError(
                f"{asked} = {total} must be at most max_model_len ({self.max_model_len})",
                field="max_tokens",
            )
        num_blocks = -(-(total - 1) // self.block_size)  # the last token is never computed
        if num_blocks > self.num_blocks:
            raise RequestNeverFitsError(
                f"{asked} needs {num_blocks} KV blocks of {self.block_size} tokens, "
                f"the pool has {self.num_blocks}",
                field="max_tokens",
            )
