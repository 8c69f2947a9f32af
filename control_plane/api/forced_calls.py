"""What is said of calls of tools, as a part of the parameters; spelled off the event loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from control_plane.apart import run_apart
from control_plane.core.generation_params import GenerationParams
from control_plane.text.answers.parser import AnswerFormat
from control_plane.text.answers.tool_choice import ToolChoice, with_calls


async def calls_in_params(
    params: GenerationParams,
    choice: ToolChoice,
    tools: Sequence[Mapping[str, object]],
    answer: AnswerFormat | None,
    place: str,
) -> GenerationParams:
    """Do as `with_calls` does, apart where there is something to do: 80 ms for the longest tools.

    Raises ValidationError.
    """
    if not choice.is_kept_to:
        return params
    return await run_apart(with_calls, params, choice, tools, answer, place=place)
