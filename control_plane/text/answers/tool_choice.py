"""What a caller says of calls: whether an answer must be some, and of which tools.

The surfaces have spellings of their own, which come together here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

from control_plane.core.generation_params import GenerationParams
from control_plane.core.tool_calls import TOOL_CHOICE, CallableTool, Thought, ToolCalls
from control_plane.text.answers.parser import AnswerFormat, Thinking
from control_plane.text.conversation import MAX_TOOL_NAME_CHARACTERS
from planes.errors import ValidationError

Mode: TypeAlias = Literal["auto", "none", "required"]

_THOUGHTS: Final[Mapping[Thinking, Thought]] = {
    Thinking.IS_OVER: "none",
    Thinking.MAY_COME: "none",
    Thinking.MAY_BEGIN: "may begin",
    Thinking.HAS_BEGUN: "has begun",
}

_NO_PARAMETERS: Final = {"type": "object", "additionalProperties": False}
"""OpenAI's: a function without parameters has an empty list of them."""


_ANY_PARAMETERS: Final = {"type": "object"}

STRICT: Final = "strict"

PARAMETERS: Final = "tools[{}].function.parameters"
"""What chats call the schema of a tool."""


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether tools are called, and which.

    `mode`: the model decides, none are, one at least is. `names`: only these of the tools are
    called where one is; none: any. `is_single`: at most one call. `strict`: names of tools whose
    arguments keep to their schema also where the model decides; a call that must be always does.
    """

    mode: Mode = "auto"
    names: tuple[str, ...] = ()
    is_single: bool = False
    strict: tuple[str, ...] = ()

    @property
    def is_forced(self) -> bool:
        """Whether the answer must be calls."""
        return self.mode == "required"

    @property
    def is_kept_to(self) -> bool:
        """Whether it says anything of calls that the answer may have."""
        return self.mode != "none" and bool(self.is_forced or self.names or self.strict)


def with_calls(
    params: GenerationParams,
    choice: ToolChoice,
    tools: Sequence[Mapping[str, object]],
    answer: AnswerFormat | None,
    *,
    place: str = PARAMETERS,
) -> GenerationParams:
    """Return the parameters of a request whose answer calls what it must, and as it must.

    `tools`: as chat templates get them. `answer`: how the answer to the prompt is read. `place`:
    what the surface calls the schema of a tool. An answer that has another form anyway has no
    calls, unless it must. Raises ValidationError.
    """
    if not choice.is_kept_to:
        return params
    name = TOOL_CHOICE if choice.is_forced or choice.names else STRICT
    wanted = _wanted(choice, tools)
    if answer is None or answer.calls is None or not answer.calls.READS_CALLS:
        raise ValidationError(
            f"{name} must be {'auto or none' if name == TOOL_CHOICE else 'false'} for this model: "
            "the format of its calls is not known; the server's --tool-call-parser says which it "
            "is",
            field=name,
        )
    other = params.structured_outputs
    if other is not None and not choice.is_forced:
        return params
    if other is not None:
        raise ValidationError(
            f"{other.name} must be unset with a {TOOL_CHOICE} that has tools called: the answer "
            "cannot be both",
            field=other.name,
        )
    calls = ToolCalls(
        format=answer.calls.FORMAT,
        tools=tuple(_callable(index, tool, place, choice) for index, tool in wanted),
        may_say=not choice.is_forced,
        is_single=choice.is_single,
        thought=_THOUGHTS[answer.thinking],
        thought_marks=answer.marks,
        is_start=answer.is_start,
        tokens=tuple((name, token) for token, name in answer.spelled.items()),
        name=name,
    )
    return replace(params, structured_outputs=calls)


def _wanted(
    choice: ToolChoice, tools: Sequence[Mapping[str, object]]
) -> list[tuple[int, Mapping[str, object]]]:
    """Return the functions that may be called, and their places among the tools."""
    functions = [(index, _function(tool)) for index, tool in enumerate(tools)]
    if not functions:
        raise ValidationError(
            f"{TOOL_CHOICE} must be auto or none where there are no tools", field=TOOL_CHOICE
        )
    known = {function.get("name") for _, function in functions}
    for name in choice.names:
        if name not in known:
            raise ValidationError(
                f"{TOOL_CHOICE} names {name!r}, which is none of the tools", field=TOOL_CHOICE
            )
    if not choice.names:
        return functions
    return [(index, function) for index, function in functions if function["name"] in choice.names]


def _function(tool: Mapping[str, object]) -> Mapping[str, object]:
    function = tool.get("function")
    return function if isinstance(function, Mapping) else {}


def _callable(
    index: int, function: Mapping[str, object], place: str, choice: ToolChoice
) -> CallableTool:
    """Return a tool with a schema that allows objects only, which is what arguments are."""
    name, place = str(function["name"]), place.format(index)
    if len(json.dumps(name, ensure_ascii=False)) - 2 > MAX_TOOL_NAME_CHARACTERS:
        raise ValidationError(
            f"tools[{index}] must have a name of at most {MAX_TOOL_NAME_CHARACTERS} characters as "
            "JSON spells it",
            field=f"tools[{index}]",
        )
    given = function.get("parameters")
    schema = dict(given) if isinstance(given, Mapping) else dict(_NO_PARAMETERS)
    if not choice.is_forced and name not in choice.strict:
        schema = dict(_ANY_PARAMETERS)
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise ValidationError(
            f"{place} must be of objects, which arguments are, got the type {kind!r:.60}",
            field=place,
        )
    schema["type"] = "object"
    try:
        return CallableTool(name, json.dumps(schema), place)
    except RecursionError:  # another thread, with more room on its stack, may have read it
        raise ValidationError(f"{place} is nested too deep", field=place) from None
