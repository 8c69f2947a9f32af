"""What a client asks for: one text to go on with, or one conversation to answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from control_plane.core.generation_params import GenerationParams
from hetero_infer.client.conversation import Message, Tool
from planes.errors import ValidationError


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A prompt, text or token ids. `params`: None takes the server's defaults.

    `priority`: lower ones are served first. `cache_salt`: only requests of the same salt share
    cached prompts. `model`: empty: the one that is loaded; another one is refused.
    """

    prompt: str | tuple[int, ...]
    params: GenerationParams | None = None
    priority: int = 0
    cache_salt: str = ""
    model: str = ""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A conversation, which the model's chat template makes a prompt of. The rest as above."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    params: GenerationParams | None = None
    priority: int = 0
    cache_salt: str = ""
    model: str = ""


Request = TextRequest | ChatRequest


def prompt_of(prompt: str | Sequence[int]) -> str | tuple[int, ...]:
    """Return a prompt as a request holds it."""
    return prompt if isinstance(prompt, str) else tuple(prompt)


def can_resume(params: GenerationParams | None) -> bool:
    """Whether a stream with these parameters may go on after it broke."""
    return params is None or (params.n <= 1 and params.beam_width is None)


def check_resumable(params: GenerationParams | None) -> None:
    """Raise ValidationError, naming the field, if a stream could not go on after it broke."""
    if params is None or can_resume(params):
        return
    name = "beam_width" if params.beam_width is not None else "n"
    raise ValidationError(
        f"resume is for one sample and no beams, got {name} {getattr(params, name)}", field=name
    )
