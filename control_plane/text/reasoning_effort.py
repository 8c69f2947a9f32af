"""OpenAI's `reasoning_effort`: how much a model is to think, as its chat template is told it.

the template reads                        is told
reasoning_effort                          the effort, as it was said (gpt-oss)
enable_thinking, or thinking, alone       false for none, true for any other (Qwen3, Granite)
none of these                             nothing: the request is refused
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Final, Literal, TypeAlias

from control_plane.text.template_kwargs import FIELD
from planes.errors import ValidationError

ReasoningEffort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh"]

EFFORT: Final = "reasoning_effort"
SWITCHES: Final = ("enable_thinking", "thinking")
"""What templates call it that a model thinks at all."""


def with_effort(
    variables: Mapping[str, object], effort: ReasoningEffort, known: Collection[str]
) -> Mapping[str, object]:
    """Return a template's variables and what says the effort. `known`: names the template reads.

    Raises ValidationError if it reads none that could, or `variables` say something else.
    """
    said: dict[str, object] = {EFFORT: effort}
    if EFFORT not in known:
        said = {name: effort != "none" for name in SWITCHES if name in known}
    if not said:
        raise ValidationError(
            f"{EFFORT} must not be given: the model's chat template has no place for it",
            field=EFFORT,
        )
    for name, value in said.items():
        if name in variables and variables[name] != value:
            raise ValidationError(
                f"{EFFORT} is {effort!r}, which {FIELD} contradicts: its {name} must be "
                f"{json.dumps(value)} or be left out",
                field=EFFORT,
            )
    return {**variables, **said}
