"""What a client asks for: one text to go on with, or one conversation to answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from control_plane.core.generation_params import GenerationParams
from hetero_infer.client.arguments import check_flag, check_text, object_of, refuse, tokens_of
from hetero_infer.client.conversation import Message, Tool, messages_of, tools_of
from hetero_infer.client.tool_choice import AnyToolChoice, tool_choice_of
from planes.errors import ValidationError


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A prompt, text or token ids. `params`: None takes the server's defaults.

    `priority`: lower ones are served first. `cache_salt`: only requests of the same salt share
    cached prompts. `model`: the one that is loaded or an adapter of it; empty: the former.

    Raises ValidationError for a value of the wrong class.
    """

    prompt: str | tuple[int, ...]
    params: GenerationParams | None = None
    priority: int = 0
    cache_salt: str = ""
    model: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", prompt_of(self.prompt))
        _check_rest(self)


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A conversation, which the model's chat template makes a prompt of.

    `chat_template_kwargs`: variables of the template, such as `{"enable_thinking": False}`; None:
    the server's defaults, which are also those of names that it does not have.
    `continue_final_message`: go on with the last message, which is the assistant's.
    `add_generation_prompt`: begin a new one; None: unless the last one is gone on with.
    `tool_choice`: whether tools are called, and which, in OpenAI's words and objects; None: the
    model decides. `parallel_tool_calls`: there may be several calls. The rest as above.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    params: GenerationParams | None = None
    priority: int = 0
    cache_salt: str = ""
    model: str = ""
    chat_template_kwargs: Mapping[str, Any] | None = None
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None
    tool_choice: AnyToolChoice | None = None
    parallel_tool_calls: bool = True

    def __post_init__(self) -> None:
        check_flag(self.parallel_tool_calls, "parallel_tool_calls")
        object.__setattr__(self, "tool_choice", tool_choice_of(self.tool_choice))
        check_prompt_end(self.continue_final_message, self.add_generation_prompt)
        object.__setattr__(self, "messages", messages_of(self.messages))
        object.__setattr__(self, "tools", tools_of(self.tools))
        variables = object_of(self.chat_template_kwargs, "chat_template_kwargs")
        object.__setattr__(self, "chat_template_kwargs", variables or None)
        _check_rest(self)


Request = TextRequest | ChatRequest


def prompt_of(prompt: str | Sequence[int]) -> str | tuple[int, ...]:
    """Return a prompt as a request holds it. Raises ValidationError for what is none."""
    if isinstance(prompt, str):
        return prompt
    return tokens_of(prompt, "prompt", "text or a sequence of token ids")


def check_prompt_end(continue_final_message: object, add_generation_prompt: object) -> None:
    """Raise ValidationError for what does not say where the prompt of a conversation ends."""
    check_flag(continue_final_message, "continue_final_message")
    if add_generation_prompt is not None:
        check_flag(add_generation_prompt, "add_generation_prompt")


def check_request(request: object) -> None:
    """Raise ValidationError for what is no request of ours."""
    if not isinstance(request, TextRequest | ChatRequest):
        refuse(request, "request", "a TextRequest or a ChatRequest")


def _check_rest(request: Request) -> None:
    """Check what both kinds have."""
    if request.params is not None and not isinstance(request.params, GenerationParams):
        refuse(request.params, "params", "GenerationParams")
    if isinstance(request.priority, bool) or not isinstance(request.priority, int):
        refuse(request.priority, "priority", "an integer")
    check_text(request.cache_salt, "cache_salt")
    check_text(request.model, "model")


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
