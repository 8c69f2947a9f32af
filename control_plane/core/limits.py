"""How large a request may be: one rule for whoever takes requests in and for the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from control_plane.core.beam import num_candidates
from control_plane.core.errors import PromptTooLongError, RequestNeverFitsError
from control_plane.core.generation_params import MAX_LOGPROBS
from planes.errors import ValidationError


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What every request must satisfy, whatever else runs.

    `max_model_len`: prompt and completion tokens together. `num_blocks`: KV blocks of the whole
    pool, of `block_size` tokens each. `max_beams`: sequences that run at once; None: any number.
    """

    max_model_len: int
    block_size: int
    num_blocks: int
    max_beams: int | None = None

    def check(self, num_prompt_tokens: int, max_tokens: int, num_beams: int = 1) -> None:
        """Refuse what can never run; `num_beams` sequences of that length must run together.

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
        # The last token is never computed. Beams share blocks, but may have to be computed apart.
        num_blocks = -(-(total - 1) // self.block_size) * num_beams
        if num_blocks > self.num_blocks:
            of_all = f" for {num_beams} beams" if num_beams > 1 else ""
            raise RequestNeverFitsError(
                f"{asked}{of_all} needs {num_blocks} KV blocks of {self.block_size} tokens, "
                f"the pool has {self.num_blocks}",
                field="max_tokens",
            )

    def check_beams(self, width: int, num_end_tokens: int) -> None:
        """Refuse a beam search that can never run: its beams are judged together, in each step.

        Raises ValidationError.
        """
        if self.max_beams is not None and width > self.max_beams:
            raise ValidationError(
                f"beam_width must be at most {self.max_beams}, the sequences that run at once, "
                f"got {width}",
                field="beam_width",
            )
        num_wanted = num_candidates(width, num_end_tokens)
        if num_wanted > MAX_LOGPROBS:
            raise ValidationError(
                f"beam_width {width} with {num_end_tokens} end tokens looks at {num_wanted} "
                f"continuations a beam, at most {MAX_LOGPROBS} are given",
                field="beam_width",
            )
