"""`/v1/completions` on the wire."""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypeAlias

from pydantic import BaseModel, Field, Tag, model_validator

from control_plane.core.generation_params import MAX_LOGPROBS
from control_plane.http.fields import (
    MAX_TOKENS,
    HarmlessFields,
    Samples,
    SamplingFields,
    StreamFields,
)
from control_plane.http.logprobs import CompletionLogprobs
from control_plane.http.prompt_schema import KINDS, Text, TokenIds, all_of, kind_of_prompt
from control_plane.http.usage import CompletionUsage
from control_plane.http.wire import one_of, wrong
from planes.default_int import DefaultInt

MAX_PROMPTS = 256
MAX_CHOICES = 2048
"""Prompts times samples."""

DEFAULT_MAX_TOKENS = DefaultInt(16)
"""OpenAI's."""

Prompt: TypeAlias = Annotated[
    Annotated[Text, Tag("~text")]
    | Annotated[
        list[Text],
        Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS),
        Tag("~texts"),
    ]
    | Annotated[TokenIds, Tag("~tokens")]
    | Annotated[
        list[TokenIds],
        Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS),
        Tag("~token_lists"),
    ],
    one_of(kind_of_prompt, KINDS),
]


class CompletionRequest(SamplingFields, StreamFields, HarmlessFields):
    """A text, or several, to go on with."""

    model: str
    prompt: Prompt
    max_tokens: int | None = Field(
        None, ge=0, le=MAX_TOKENS, description=f"default {DEFAULT_MAX_TOKENS}; 0 only with echo"
    )
    n: Samples | None = None
    best_of: int | None = Field(None, description="must equal n: no more samples are drawn")
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.best_of is not None and self.best_of != self.num_samples:
            raise wrong(
                "best_of",
                f"best_of must equal n ({self.num_samples}): samples are not ranked, "
                f"got {self.best_of}",
            )
        num_choices = len(self.prompts) * self.num_samples
        if num_choices > MAX_CHOICES:
            raise wrong(
                "n",
                f"at most {MAX_CHOICES} choices, prompts times n, in one answer, got {num_choices}",
            )
        if self.max_tokens == 0 and not self.echo:
            raise wrong("max_tokens", "max_tokens must be at least 1 without echo, got 0")
        return self

    @property
    def num_samples(self) -> int:
        """Samples of each prompt."""
        return 1 if self.n is None else self.n

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Every prompt."""
        return all_of(self.prompt)


class CompletionChoice(BaseModel):
    """One sample of one prompt; in a stream, a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class Completion(BaseModel):
    """All samples of all prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: CompletionUsage


class CompletionChunk(BaseModel):
    """One event of a stream; the last, which alone has a usage, has no choices."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: CompletionUsage | None = None
