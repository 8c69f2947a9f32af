"""`/tokenize`, `/detokenize` and `/tokenizer_info` on the wire."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Self

from pydantic import BaseModel, Field, model_validator

from control_plane.http.chat_schema import Messages, Tool, plain_messages, plain_tools
from control_plane.http.fields import Conversation, TemplateKwargs, TokenId
from control_plane.http.wire import Wire, wrong
from control_plane.text.conversation import MAX_TOOLS


class TokenizeRequest(Wire):
    """A text, or a conversation as the chat template makes it one."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = Field(None, max_length=MAX_TOOLS)
    chat_template_kwargs: TemplateKwargs | None = None
    add_generation_prompt: bool | None = Field(
        None, description="only with messages; default: unless continue_final_message"
    )
    continue_final_message: bool | None = Field(
        None, description="only with messages: end where the last one ends"
    )
    add_special_tokens: bool | None = Field(
        None, description="default true with prompt; false with messages, which have their own"
    )
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise wrong("prompt", "one of prompt and messages must be given, and not both")
        for name in (
            "tools",
            "chat_template_kwargs",
            "add_generation_prompt",
            "continue_final_message",
        ):
            if self.messages is None and getattr(self, name) is not None:
                raise wrong(name, f"{name} is only allowed with messages")
        if self.prompt is None and self.add_special_tokens:
            raise wrong(
                "add_special_tokens",
                "add_special_tokens must be false with messages: their template adds its own",
            )
        return self

    @cached_property
    def conversation(self) -> Conversation:
        """The conversation as values."""
        messages, tools = plain_messages(self.messages or []), plain_tools(self.tools or [])
        return messages, tools, self.chat_template_kwargs

    def prepare(self) -> None:
        """Make the conversation."""
        self.conversation  # noqa: B018 - it is kept

    def forget(self) -> None:
        """Let go of the text."""
        self.prompt = self.messages = self.tools = None
        self.__dict__.pop("conversation", None)


class TokenizeResponse(BaseModel):
    """The token ids, and their names if they were asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(Wire):
    """Token ids."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
    skip_special_tokens: bool | None = Field(
        None, description="leave special tokens out, as answers do, or else name them; default true"
    )


class DetokenizeResponse(BaseModel):
    """Their text."""

    prompt: str


class TokenizerInfo(BaseModel):
    """The names of the special tokens; null for what the tokenizer does not have."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
