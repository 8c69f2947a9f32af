"""What a caller may ask of one generation."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from control_plane.core.structured_outputs import FIELD, StructuredOutputs
from control_plane.core.tool_calls import ToolCalls
from planes.default_int import DefaultInt
from planes.errors import ValidationError

MAX_TEMPERATURE = 2.0
MAX_SEED = 2**64 - 1
MAX_TOP_K = 2**32 - 1
MAX_REPETITION_PENALTY = 100.0
MAX_PENALTY = 2.0
MAX_LOGIT_BIAS = 100.0
MAX_LOGIT_BIASES = 1024
MAX_LOGPROBS = 20
MAX_SAMPLES = 128
MAX_BEAM_WIDTH = 10
MAX_LENGTH_PENALTY = 10.0
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKENS = 64

NOT_WITH_BEAMS = (
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "min_tokens",
    "num_logprobs",
    "stop",
    "stop_token_ids",
)
"""What a beam search does not keep to; `temperature` and what else says how tokens are drawn mean
nothing where none are, as with a temperature of 0."""


@dataclass(frozen=True, slots=True)
class GenerationParams:
    """Parameters controlling text generation.

    `max_tokens`: tokens to generate at most, ≥ 1. As a `DefaultInt` (nobody gave it) it becomes
    `min_tokens` where that is more, and what the context has room for, where that is less.
    `temperature`: 0 is greedy, at most 2.
    `top_p`: nucleus sampling threshold in (0, 1]; 1 keeps the whole vocabulary.
    `seed`: key of the random generator, 0 to 2^64 − 1; None: one is drawn as the request comes in.
    `ignore_eos`: go on to `max_tokens` past an end-of-sequence token.
    `min_tokens`: tokens of a sample before which neither an end token of the model nor one of
    `stop_token_ids` may come, and a text of `stop` that is complete ends nothing; at most
    `max_tokens`. A form (`structured_outputs`) behind which nothing may follow ends it before.
    `top_k`: draw from the k most likely tokens only; 0: from all.
    `min_p`: draw only from tokens at least so many times as likely as the best, 0 to 1; 0: off.
    `repetition_penalty`: what the logits of tokens in prompt and output are divided by (multiplied,
    where negative), greater than 0, at most 100; 1: off.
    `presence_penalty`, `frequency_penalty`: subtracted from the logits of tokens in the output,
    once and for each time they occur; −2 to 2; 0: off.
    `logit_bias`: token id → what is added to its logit, −100 to 100; at most 1024 entries.
    `num_logprobs`: return the log-probability of each token and of this many most likely ones, at
    most 20; None: no log-probabilities.
    `n`: independent samples of the same prompt, 1 to 128; with `beam_width`, the best `n` answers.
    `beam_width`: beams of a beam search, 1 to 10, which takes the place of sampling; None: none.
    Not with penalties, bias, log-probabilities of the answer, stops, or `min_tokens`.
    `length_penalty`: what a beam's score is divided by is its length to this power, −10 to 10.
    `early_stopping`: end the search as soon as `beam_width` beams have ended. Neither may be given
    without `beam_width`, other than as its default.
    `stop`: texts that end a sample where the first of them is complete, at most 16 of 1 to 256
    characters; the text before it is all that is returned.
    `stop_token_ids`: tokens that end a sample like the model's own, `ignore_eos` or not; at most
    64.
    `include_stop`: return what ended the sample, text of `stop` or token of `stop_token_ids`, too.
    `num_prompt_logprobs`: return the log-probability of each token of the prompt but the first, and
    of this many most likely ones in its place, at most 20; None: none. Such a prompt is computed
    whole, whatever is cached.

    `structured_outputs`: what the answer must be, by a JSON Schema, a regular expression and the
    like. It ends, with the reason "stop", where nothing may follow; an end token of the model may
    come where it may end, but with `ignore_eos` it does not. `max_tokens`, `stop` and
    `stop_token_ids` may end it before it is whole. Not with `beam_width`. (`ToolCalls`: what the
    server makes of a `tool_choice`.)

    Order and exact meaning: bias, repetition, frequency, presence, structure; then temperature,
    top-k, top-p, min-p (`kernels.reference.sampling`). Log-probabilities are those of the model's
    own logits, before all that.
    """

    max_tokens: int = DefaultInt(100)
    temperature: float = 1.0
    top_p: float = 0.9
    seed: int | None = None
    ignore_eos: bool = False
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    num_logprobs: int | None = None
    n: int = 1
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool = False
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop: bool = False
    num_prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputs | ToolCalls | None = None
    min_tokens: int = 0

    def __new__(cls, *_: object, **given: object) -> Self:
        """Name the parameter that an unknown name may mean: OpenAI's `logprobs` is one of them."""
        for name in given:
            if name not in cls.__match_args__:
                near = difflib.get_close_matches(name, cls.__match_args__, n=1)
                hint = f": did you mean {near[0]!r}?" if near else ""
                raise TypeError(f"GenerationParams has no {name!r}{hint}")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        """Take lists as plain values."""
        for name in ("stop", "stop_token_ids"):
            given = getattr(self, name)
            if isinstance(given, list):
                object.__setattr__(self, name, tuple(given))

    def validate(self) -> None:
        """Raise ValidationError naming the first field out of range, its limit and its value."""
        if isinstance(self.max_tokens, bool) or not isinstance(self.max_tokens, int):
            raise ValidationError(
                f"max_tokens must be an integer, got {self.max_tokens!r}", field="max_tokens"
            )
        if self.max_tokens < 1:
            raise ValidationError(
                f"max_tokens must be at least 1, got {self.max_tokens}", field="max_tokens"
            )
        if not _is_integer(self.min_tokens) or self.min_tokens < 0:
            raise ValidationError(
                f"min_tokens must be an integer of at least 0, got {self.min_tokens!r}",
                field="min_tokens",
            )
        if self.min_tokens > self.max_tokens and not isinstance(self.max_tokens, DefaultInt):
            raise ValidationError(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}",
                field="min_tokens",
            )
        if not _is_real(self.temperature) or not 0.0 <= self.temperature <= MAX_TEMPERATURE:
            raise ValidationError(
                f"temperature must be in 0 to {MAX_TEMPERATURE}, got {self.temperature!r}",
                field="temperature",
            )
        if not _is_real(self.top_p) or not 0.0 < self.top_p <= 1.0:
            raise ValidationError(
                f"top_p must be greater than 0 and at most 1, got {self.top_p!r}", field="top_p"
            )
        if self.seed is not None and (
            isinstance(self.seed, bool)
            or not isinstance(self.seed, int)
            or not 0 <= self.seed <= MAX_SEED
        ):
            raise ValidationError(
                f"seed must be an integer in 0 to {MAX_SEED}, got {self.seed!r}", field="seed"
            )
        if not _is_integer(self.n) or not 1 <= self.n <= MAX_SAMPLES:
            raise ValidationError(
                f"n must be an integer in 1 to {MAX_SAMPLES}, got {self.n!r}", field="n"
            )
        self._validate_cuts()
        self._validate_adjustments()
        self._validate_beams()
        self._validate_stops()
        self._validate_structure()

    def _validate_stops(self) -> None:
        """Check what ends a sample."""
        stop, token_ids = self.stop, self.stop_token_ids
        if not isinstance(stop, tuple) or not all(isinstance(text, str) for text in stop):
            raise ValidationError(
                f"stop must be a list or tuple of texts, got {stop!r}", field="stop"
            )
        if len(stop) > MAX_STOP_STRINGS:
            raise ValidationError(
                f"stop must have at most {MAX_STOP_STRINGS} texts, got {len(stop)}", field="stop"
            )
        for text in stop:
            if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
                raise ValidationError(
                    f"stop must be texts of 1 to {MAX_STOP_CHARACTERS} characters, "
                    f"got one of {len(text)}",
                    field="stop",
                )
        if not isinstance(token_ids, tuple) or not all(
            _is_integer(token_id) and token_id >= 0 for token_id in token_ids
        ):
            raise ValidationError(
                f"stop_token_ids must be a list or tuple of token ids, got {token_ids!r}",
                field="stop_token_ids",
            )
        if len(token_ids) > MAX_STOP_TOKENS:
            raise ValidationError(
                f"stop_token_ids must have at most {MAX_STOP_TOKENS} entries, got {len(token_ids)}",
                field="stop_token_ids",
            )
        if not isinstance(self.include_stop, bool):
            raise ValidationError(
                f"include_stop must be true or false, got {self.include_stop!r}",
                field="include_stop",
            )

    def _validate_structure(self) -> None:
        """Check what the answer must be, as far as that is seen without compiling it."""
        structure = self.structured_outputs
        if structure is None:
            return
        if not isinstance(structure, StructuredOutputs | ToolCalls):
            raise ValidationError(
                f"{FIELD} must be StructuredOutputs, got {structure!r:.100}", field=FIELD
            )
        structure.validate()
        if self.beam_width is not None:
            raise ValidationError(
                f"{structure.name} must be unset with beam_width ({self.beam_width})",
                field=structure.name,
            )

    def _validate_beams(self) -> None:
        """Check what says how a beam search goes."""
        width, penalty = self.beam_width, self.length_penalty
        if width is not None:
            if not _is_integer(width) or not 1 <= width <= MAX_BEAM_WIDTH:
                raise ValidationError(
                    f"beam_width must be an integer in 1 to {MAX_BEAM_WIDTH}, got {width!r}",
                    field="beam_width",
                )
            if self.n > width:
                raise ValidationError(
                    f"n must be at most beam_width ({width}), got {self.n}", field="n"
                )
        if not _is_real(penalty) or not -MAX_LENGTH_PENALTY <= penalty <= MAX_LENGTH_PENALTY:
            raise ValidationError(
                f"length_penalty must be in {-MAX_LENGTH_PENALTY} to {MAX_LENGTH_PENALTY}, "
                f"got {penalty!r}",
                field="length_penalty",
            )
        if not isinstance(self.early_stopping, bool):
            raise ValidationError(
                f"early_stopping must be true or false, got {self.early_stopping!r}",
                field="early_stopping",
            )
        for name in ("length_penalty", "early_stopping"):
            value = getattr(self, name)
            if width is None and value != getattr(_PLAIN, name):
                raise ValidationError(
                    f"{name} means nothing without beam_width, got {value!r}", field=name
                )
        for name in NOT_WITH_BEAMS:
            value = getattr(self, name)
            if width is not None and value != getattr(_PLAIN, name):
                raise ValidationError(
                    f"{name} must be unset with beam_width ({width}), got {value!r:.100}",
                    field=name,
                )

    def _validate_cuts(self) -> None:
        """Check what says which tokens may be drawn, and what is returned of them."""
        if not _is_integer(self.top_k) or not 0 <= self.top_k <= MAX_TOP_K:
            raise ValidationError(
                f"top_k must be an integer in 0 to {MAX_TOP_K}, got {self.top_k!r}", field="top_k"
            )
        if not _is_real(self.min_p) or not 0.0 <= self.min_p <= 1.0:
            raise ValidationError(f"min_p must be in 0 to 1, got {self.min_p!r}", field="min_p")
        for name in ("num_logprobs", "num_prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and (not _is_integer(count) or not 0 <= count <= MAX_LOGPROBS):
                raise ValidationError(
                    f"{name} must be an integer in 0 to {MAX_LOGPROBS}, got {count!r}", field=name
                )

    def _validate_adjustments(self) -> None:
        """Check what changes the logits."""
        repetition = self.repetition_penalty
        if not _is_real(repetition) or not 0.0 < repetition <= MAX_REPETITION_PENALTY:
            raise ValidationError(
                f"repetition_penalty must be greater than 0 and at most {MAX_REPETITION_PENALTY}, "
                f"got {repetition!r}",
                field="repetition_penalty",
            )
        for name in ("presence_penalty", "frequency_penalty"):
            penalty = getattr(self, name)
            if not _is_real(penalty) or not -MAX_PENALTY <= penalty <= MAX_PENALTY:
                raise ValidationError(
                    f"{name} must be in {-MAX_PENALTY} to {MAX_PENALTY}, got {penalty!r}",
                    field=name,
                )
        if not isinstance(self.logit_bias, Mapping):
            raise ValidationError(
                f"logit_bias must map token ids to numbers, got {self.logit_bias!r}",
                field="logit_bias",
            )
        if len(self.logit_bias) > MAX_LOGIT_BIASES:
            raise ValidationError(
                f"logit_bias must have at most {MAX_LOGIT_BIASES} entries, "
                f"got {len(self.logit_bias)}",
                field="logit_bias",
            )
        for token_id, bias in self.logit_bias.items():
            if not _is_integer(token_id) or token_id < 0:
                raise ValidationError(
                    f"logit_bias must have token ids as keys, got {token_id!r}", field="logit_bias"
                )
            if not _is_real(bias) or not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
                raise ValidationError(
                    f"logit_bias must be in {-MAX_LOGIT_BIAS} to {MAX_LOGIT_BIAS}, "
                    f"got {bias!r} for token {token_id}",
                    field="logit_bias",
                )


_PLAIN = GenerationParams()


def _is_integer(value: object) -> bool:
    """Whether `value` is an integer and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    """Whether `value` is a finite number and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
