"""How large a request may be: one rule for whoever takes requests in and for the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from control_plane.core.beam import num_candidates
from control_plane.core.errors import ContextLengthError, RequestNeverFitsError
from control_plane.core.generation_params import MAX_LOGPROBS
from planes.errors import ValidationError


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What every request must satisfy, whatever else runs.

    `max_model_len`: prompt and completion tokens together. `num_blocks`: KV blocks of the whole
    pool, of `block_size` tokens each. `max_beams`: sequences that run at once, the
    effective `max_num_seqs`; None: any number. `shares_prompts`: the beams of a search hold the
    full blocks of their prompt once; not so in models with states.
    """

    max_model_len: int
    block_size: int
    num_blocks: int
    max_beams: int | None = None
    shares_prompts: bool = True

    def check(self, num_prompt_tokens: int, max_tokens: int, num_beams: int = 1) -> None:
        """Refuse what can never run; `num_beams` sequences of that length must run together.

        `max_tokens` 0: nothing is generated. The error's field is `prompt` if the prompt is too
        long whatever `max_tokens` is, else `max_tokens`. Raises ValidationError for an empty
        prompt, ContextLengthError for too many tokens, RequestNeverFitsError for a request that the
        pool could not hold even alone.
        """
        if num_prompt_tokens < 1:
            raise ValidationError("the prompt must have at least 1 token, got 0", field="prompt")
        longest = self.max_model_len
        if num_prompt_tokens + min(max_tokens, 1) > longest:
            room = f"{longest - 1} and one to generate" if max_tokens else f"{longest}"
            raise ContextLengthError(
                f"the prompt has {_spell_tokens(num_prompt_tokens)}, max_model_len ({longest}) "
                f"leaves room for at most {room}",
                field="prompt",
            )
        if num_prompt_tokens + max_tokens > longest:
            raise ContextLengthError(
                f"max_tokens must be at most {longest - num_prompt_tokens} after a prompt of "
                f"{_spell_tokens(num_prompt_tokens)} (max_model_len is {longest}), "
                f"got {max_tokens}",
                field="max_tokens",
            )
        if self.num_blocks_for(num_prompt_tokens, max_tokens, num_beams) > self.num_blocks:
            raise self._never_fits(num_prompt_tokens, max_tokens, num_beams)

    def room(self, num_prompt_tokens: int, num_beams: int = 1) -> int:
        """Return how many tokens may follow a prompt at most; 0 or less: it is too long."""
        in_pool = self._room(num_prompt_tokens, num_beams)
        return min(self.max_model_len - num_prompt_tokens, in_pool)

    def num_blocks_for(self, num_prompt_tokens: int, max_tokens: int, num_beams: int = 1) -> int:
        """Return the KV blocks that a request takes when it is at its longest, alone."""
        # The last token is never computed.
        num_each = -(-(num_prompt_tokens + max(max_tokens, 1) - 1) // self.block_size)
        num_shared = num_prompt_tokens // self.block_size if self.shares_prompts else 0
        return num_shared + (num_each - num_shared) * num_beams

    def _never_fits(
        self, num_prompt_tokens: int, max_tokens: int, num_beams: int
    ) -> RequestNeverFitsError:
        """Say what of a request is too large for the pool."""
        of_all = f" with {num_beams} beams" if num_beams > 1 else ""
        prompt = f"a prompt of {_spell_tokens(num_prompt_tokens)}{of_all}"
        pool = f"KV blocks of {self.block_size} tokens, the pool has {self.num_blocks}"
        num_least = self.num_blocks_for(num_prompt_tokens, 1, num_beams)
        if num_least > self.num_blocks:
            return RequestNeverFitsError(f"{prompt} needs {num_least} {pool}", field="prompt")
        num_needed = self.num_blocks_for(num_prompt_tokens, max_tokens, num_beams)
        return RequestNeverFitsError(
            f"max_tokens must be at most {self._room(num_prompt_tokens, num_beams)} after "
            f"{prompt}, got {max_tokens}, which needs {num_needed} {pool}",
            field="max_tokens",
        )

    def _room(self, num_prompt_tokens: int, num_beams: int) -> int:
        """Return the most tokens that the pool lets be generated; 1 at least fits."""
        num_shared = num_prompt_tokens // self.block_size if self.shares_prompts else 0
        num_each = num_shared + (self.num_blocks - num_shared) // num_beams
        return num_each * self.block_size + 1 - num_prompt_tokens

    def check_beams(self, width: int, num_end_tokens: int) -> None:
        """Refuse a beam search that can never run: its beams are judged together, in each step.

        Raises ValidationError.
        """
        if self.max_beams is not None and width > self.max_beams:
            raise ValidationError(
                f"beam_width must be at most max_num_seqs ({self.max_beams}), the sequences that "
                f"run at once, got {width}",
                field="beam_width",
            )
        if num_candidates(width, num_end_tokens) > MAX_LOGPROBS:
            raise ValidationError(
                f"beam_width must be at most {MAX_LOGPROBS - num_end_tokens} with "
                f"{num_end_tokens} end tokens: of each beam the {MAX_LOGPROBS} likeliest next "
                f"tokens are known, got {width}",
                field="beam_width",
            )


def _spell_tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"
