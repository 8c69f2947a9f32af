"""How much a model is to think, as its chat template is told it.

OpenAI's `reasoning_effort` is a demand:

the template reads                        is told
reasoning_effort                          the effort, as it was said (gpt-oss)
enable_thinking, or thinking, alone       false for none, true for any other (Qwen3, Granite)
none of these                             nothing: the request is refused

Anthropic's `thinking` and `effort` are a wish: what a template does not read it is not told.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Final, Literal, NamedTuple, TypeAlias

from control_plane.text.template_kwargs import FIELD
from planes.errors import ValidationError

ReasoningEffort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh"]

EFFORT: Final = "reasoning_effort"
SWITCHES: Final = ("enable_thinking", "thinking")
"""What templates call it that a model thinks at all."""


class ThinkingWish(NamedTuple):
    """What would be liked of a model. `thinks`: at all, None: as its template has it.

    `effort`: how much, where it thinks. `name`: of the field in errors.
    """

    thinks: bool | None
    effort: ReasoningEffort | None
    name: str


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
    _check_agreement(variables, said, f"{EFFORT} is {effort!r}", EFFORT)
    return {**variables, **said}


def with_wish(
    variables: Mapping[str, object], wish: ThinkingWish, known: Collection[str]
) -> Mapping[str, object]:
    """Return a template's variables and what says the wish. `known`: names the template reads.

    Where there is a switch of thinking it says that none is wanted, or else an effort of none does.
    Raises ValidationError if `variables` say something else.
    """
    switches = [name for name in SWITCHES if name in known]
    said: dict[str, object] = {}
    if wish.thinks is not None:
        said = dict.fromkeys(switches, wish.thinks)
    if EFFORT in known and wish.thinks is not False and wish.effort is not None:
        said[EFFORT] = wish.effort
    elif EFFORT in known and wish.thinks is False and not switches:
        said[EFFORT] = "none"
    _check_agreement(variables, said, f"{wish.name} is given", wish.name)
    return {**variables, **said}


def _check_agreement(
    variables: Mapping[str, object], said: Mapping[str, object], claim: str, field: str
) -> None:
    for name, value in said.items():
        if name in variables and variables[name] != value:
            raise ValidationError(
                f"{claim}, which {FIELD} contradicts: its {name} must be {json.dumps(value)} or be "
                "left out",
                field=field,
            )
