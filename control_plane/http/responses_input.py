"""What `/v1/responses` takes as `input`: messages, and items that an earlier response had."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import BeforeValidator, Field, JsonValue, Tag

from control_plane.http.chat_schema import FunctionCall, content_text, plain_call
from control_plane.http.wire import Wire, one_of, text_or_list, wrong
from control_plane.text.bounds import MAX_MESSAGES, MAX_PARTS, MAX_TOOL_CALLS
from planes.errors import ValidationError

Status: TypeAlias = Literal["completed", "incomplete", "in_progress"]


class TextItem(Wire):
    """A part of a message; other kinds (images, files) are refused."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[JsonValue] | None = Field(None, max_length=0)
    logprobs: list[JsonValue] | None = None
    parsed: JsonValue = Field(
        None, description="changes nothing: OpenAI's packages leave the text's value beside it"
    )


ItemContent: TypeAlias = Annotated[
    Annotated[str, Tag("~text")]
    | Annotated[
        list[TextItem], Field(fail_fast=True, min_length=1, max_length=MAX_PARTS), Tag("~list")
    ],
    one_of(text_or_list, "a string or a list of input_text and output_text parts"),
]


class InputMessage(Wire):
    """One message of the input, as written by hand or as an earlier response had it."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: ItemContent
    id: str | None = None
    status: Status | None = None


class ReasoningPart(Wire):
    """A part of what the assistant thought."""

    type: Literal["reasoning_text"]
    text: str


class InputReasoning(Wire):
    """What the assistant thought, as an earlier response had it; told to templates that know it."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningPart], Field(fail_fast=True)] | None = Field(
        None, max_length=MAX_PARTS
    )
    summary: list[JsonValue] | None = Field(None, max_length=0)
    id: str | None = None
    status: Status | None = None


class InputCall(FunctionCall):
    """A call that the assistant made in an earlier turn."""

    type: Literal["function_call"]
    call_id: str
    id: str | None = None
    status: Status | None = None


class InputCallOutput(Wire):
    """What a called function returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: ItemContent
    id: str | None = None
    status: Status | None = None


_ITEM_TAGS: Final = {
    None: "~message",
    "message": "~message",
    "reasoning": "~reasoning",
    "function_call": "~call",
    "function_call_output": "~output",
}


def _kind_of_item(given: object) -> str:
    if not isinstance(given, dict):
        return ""
    kind = given.get("type")
    return _ITEM_TAGS.get(kind, "") if kind is None or isinstance(kind, str) else ""


def _refuse_reference(given: object) -> object:
    """Refuse an item that is named, by an id, and not there."""
    if isinstance(given, dict) and (
        given.get("type") == "item_reference"
        or (given.keys() <= {"type", "id"} and given.get("id") is not None)
    ):
        raise wrong("id", "nothing is stored here: send the item itself, as the response had it")
    return given


Item: TypeAlias = Annotated[
    Annotated[InputMessage, Tag("~message")]
    | Annotated[InputReasoning, Tag("~reasoning")]
    | Annotated[InputCall, Tag("~call")]
    | Annotated[InputCallOutput, Tag("~output")],
    one_of(
        _kind_of_item,
        "an item of the type message, reasoning, function_call or function_call_output",
    ),
    BeforeValidator(_refuse_reference),
]

Input: TypeAlias = Annotated[
    Annotated[str, Field(min_length=1), Tag("~text")]
    | Annotated[
        list[Item],
        Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES),
        Tag("~list"),
    ],
    one_of(text_or_list, "a string or a list of items"),
]


def plain_input(given: str | Sequence[Item]) -> list[dict[str, object]]:
    """Return the input as messages for a chat template, in values.

    What the assistant thought, said and called in one turn is one message, as in chats. Raises
    ValidationError for a turn of too many calls.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[dict[str, object]] = []
    turn: dict[str, Any] | None = None  # of the assistant, in which there may be more
    before: Item | None = None
    for item in given:
        if isinstance(item, InputCallOutput):
            text = content_text(item.output)
            messages.append({"role": "tool", "content": text, "tool_call_id": item.call_id})
            turn = None
        elif isinstance(item, InputMessage) and item.role != "assistant":
            messages.append({"role": item.role, "content": content_text(item.content)})
            turn = None
        else:
            # Reasoning begins a turn, and two messages in a row are two.
            is_new = isinstance(item, InputReasoning) or type(item) is type(before) is InputMessage
            if turn is None or is_new:
                turn = {"role": "assistant", "content": ""}
                messages.append(turn)
            _add_to_turn(turn, item)
        before = item
    return messages


def _add_to_turn(turn: dict[str, Any], item: InputReasoning | InputMessage | InputCall) -> None:
    if isinstance(item, InputReasoning):
        thought = "".join(part.text for part in item.content or ())
        if thought:
            turn["reasoning_content"] = thought
    elif isinstance(item, InputMessage):
        turn["content"] += content_text(item.content)
    else:
        calls = turn.setdefault("tool_calls", [])
        if len(calls) == MAX_TOOL_CALLS:
            raise ValidationError(
                f"input must have at most {MAX_TOOL_CALLS} calls in one turn", field="input"
            )
        calls.append(plain_call(item.call_id, item))
