"""From a conversation to the prompt the model was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from control_plane.http.backend import LoadedEngine
from planes.errors import ValidationError


async def prompt_of_conversation(
    engine: LoadedEngine,
    messages: Sequence[Mapping[str, object]],
    tools: Sequence[Mapping[str, object]] | None = None,
    *,
    add_generation_prompt: bool = True,
) -> list[int]:
    """Return the token ids of the prompt.

    Raises ValidationError if the model has no chat template, or its template no place for tools:
    they would be ignored without a word.
    """
    frontend = engine.frontend
    prompt = await frontend.apply_chat_template(
        messages, tools, add_generation_prompt=add_generation_prompt
    )
    if tools:
        without = await frontend.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt
        )
        if without.text == prompt.text:
            raise ValidationError(
                f"the chat template of model {engine.model!r} has no place for tools",
                field="tools",
            )
    return prompt.token_ids
