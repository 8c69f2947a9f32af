"""What `/v1/messages` takes as a conversation: messages of blocks, as an answer had them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Annotated, Any, Final, Literal, Self, TypeAlias

from pydantic import Field, JsonValue, Tag, model_validator

from control_plane.http.chat_schema import check_json, content_text, plain_call
from control_plane.http.wire import Wire, one_of, text_or_list, word_of, wrong
from control_plane.text.bounds import MAX_MESSAGES, MAX_PARTS, MAX_TOOL_CALLS

INVALID_JSON: Final = "INVALID_JSON"
"""What the input of a call has where the model wrote no object: all that it wrote."""

CacheControl: TypeAlias = Annotated[
    dict[str, JsonValue],
    Field(description="changes nothing: equal beginnings of prompts are found without it"),
]


class _Cached(Wire):
    """What may say where a cached prompt is to end."""

    cache_control: CacheControl | None = None


class TextBlock(_Cached):
    """A text; other kinds (images, documents) are refused."""

    type: Literal["text"]
    text: str
    citations: list[JsonValue] | None = Field(None, max_length=0)


class ThinkingBlock(Wire):
    """What the assistant thought; told to templates that know it. `signature`: of no meaning."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Wire):
    """What a model elsewhere thought, which nobody else can read: it is left out."""

    type: Literal["redacted_thinking"]
    data: str


class DirectCaller(Wire):
    """Who called a tool: the model itself."""

    type: Literal["direct"]


class ToolUseBlock(_Cached):
    """A call that the assistant made in an earlier turn."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, JsonValue]
    caller: DirectCaller | None = None

    @model_validator(mode="after")
    def _check_numbers(self) -> Self:
        check_json("input", self.input, "a JSON object")
        return self

    @property
    def parsed_arguments(self) -> dict[str, Any] | str:
        """The input as chat templates want it, or what the model wrote in its place."""
        spoilt = self.input.get(INVALID_JSON) if len(self.input) == 1 else None
        return spoilt if isinstance(spoilt, str) else self.input


def _kind(given: object) -> str:
    """Tell blocks apart for `one_of`."""
    kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
    return f"~{kind}" if isinstance(kind, str) else ""


_IsText: TypeAlias = Annotated[TextBlock, word_of("type", ("text",))]

Texts: TypeAlias = Annotated[
    Annotated[str, Tag("~text")]
    | Annotated[list[_IsText], Field(fail_fast=True, max_length=MAX_PARTS), Tag("~list")],
    one_of(text_or_list, "a string or a list of text blocks"),
]


class ToolResultBlock(_Cached):
    """What a called tool returned."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = None
    is_error: bool | None = Field(None, description="true: the text begins with `Error: ` then")

    @property
    def text(self) -> str:
        """What the model is told."""
        said = content_text(self.content)
        return f"Error: {said}" if self.is_error else said


UserBlock: TypeAlias = Annotated[
    Annotated[TextBlock, Tag("~text")] | Annotated[ToolResultBlock, Tag("~tool_result")],
    one_of(_kind, "a text or tool_result block"),
    word_of("type", ("text", "tool_result")),
]

AssistantBlock: TypeAlias = Annotated[
    Annotated[TextBlock, Tag("~text")]
    | Annotated[ThinkingBlock, Tag("~thinking")]
    | Annotated[RedactedThinkingBlock, Tag("~redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("~tool_use")],
    one_of(_kind, "a text, thinking, redacted_thinking or tool_use block"),
    word_of("type", ("text", "thinking", "redacted_thinking", "tool_use")),
]


class UserMessage(Wire):
    """What the user said, and what called tools returned."""

    role: Literal["user"]
    content: Annotated[
        Annotated[str, Tag("~text")]
        | Annotated[
            list[UserBlock], Field(fail_fast=True, min_length=1, max_length=MAX_PARTS), Tag("~list")
        ],
        one_of(text_or_list, "a string or a list of blocks"),
    ]


class AssistantMessage(Wire):
    """What the assistant thought, said and called, as an earlier answer had it."""

    role: Literal["assistant"]
    content: Annotated[
        Annotated[str, Tag("~text")]
        | Annotated[
            list[AssistantBlock], Field(fail_fast=True, max_length=MAX_PARTS), Tag("~list")
        ],
        one_of(text_or_list, "a string or a list of blocks"),
    ]

    @model_validator(mode="after")
    def _check_calls(self) -> Self:
        if isinstance(self.content, str):
            return self
        num_calls = sum(isinstance(block, ToolUseBlock) for block in self.content)
        if num_calls > MAX_TOOL_CALLS:
            raise wrong(
                "content",
                f"content must have at most {MAX_TOOL_CALLS} tool_use blocks, got {num_calls}",
            )
        return self


class SystemMessage(Wire):
    """What the assistant is told in the middle of a conversation, where its template allows it."""

    role: Literal["system"]
    content: Texts


def _role(given: object) -> str:
    role = given.get("role") if isinstance(given, dict) else getattr(given, "role", None)
    return f"~{role}" if isinstance(role, str) else ""


Message: TypeAlias = Annotated[
    Annotated[UserMessage, Tag("~user")]
    | Annotated[AssistantMessage, Tag("~assistant")]
    | Annotated[SystemMessage, Tag("~system")],
    one_of(_role, "a message whose role is user, assistant or system"),
    word_of("role", ("user", "assistant", "system")),
]

Messages: TypeAlias = Annotated[
    list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)
]


def plain_conversation(
    system: str | Sequence[TextBlock] | None, messages: Sequence[Message]
) -> list[dict[str, object]]:
    """Return what is said as messages for a chat template, in values.

    As Anthropic has it, what the user says in several messages is one, with a blank line between.
    """
    found: list[dict[str, object]] = []
    told = content_text(system)
    if told:
        found.append({"role": "system", "content": told})
    plain = (one for message in messages for one in _PLAIN[message.role](message))
    for role, run in groupby(plain, itemgetter("role")):
        if role == "user":
            said = "\n\n".join(str(one["content"]) for one in run)
            found.append({"role": "user", "content": said})
        else:
            found += run
    return found


def with_results_joined(messages: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """Return a conversation in which what the user says behind a tool's result is a part of it.

    For templates in which user and assistant must take turns, whatever tools say between.
    """
    found: list[dict[str, object]] = []
    for message in messages:
        before = found[-1] if found else {}
        if message["role"] == "user" and before.get("role") == "tool":
            joined = f"{before['content']}\n\n{message['content']}"
            found[-1] = {**before, "content": joined}
        else:
            found.append(message)
    return found


def _of_system(message: SystemMessage) -> Iterator[dict[str, object]]:
    yield {"role": "system", "content": content_text(message.content)}


def _of_user(message: UserMessage) -> Iterator[dict[str, object]]:
    """Yield results of tools one by one, and what is said beside them."""
    if isinstance(message.content, str):
        yield {"role": "user", "content": message.content}
        return
    texts: list[TextBlock] = []
    for block in message.content:
        if isinstance(block, TextBlock):
            texts.append(block)
            continue
        if texts:
            yield {"role": "user", "content": content_text(texts)}
            texts = []
        yield {"role": "tool", "content": block.text, "tool_call_id": block.tool_use_id}
    if texts:
        yield {"role": "user", "content": content_text(texts)}


@dataclass
class _Turn:
    """One of the messages of an assistant's."""

    thoughts: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[dict[str, object]] = field(default_factory=list)

    @property
    def says_something(self) -> bool:
        return any(self.texts) or bool(self.calls)

    def plain(self) -> dict[str, object]:
        plain: dict[str, object] = {"role": "assistant", "content": "".join(self.texts)}
        if self.thoughts:
            plain["reasoning_content"] = "".join(self.thoughts)
        if self.calls:
            plain["tool_calls"] = self.calls
        return plain


def _of_assistant(message: AssistantMessage) -> Iterator[dict[str, object]]:
    """Yield one message, or several: what is thought behind other things begins another.

    What was thought last, with nothing said or called behind it, is told of only where it is all:
    it would stand between calls and their results.
    """
    if isinstance(message.content, str):
        yield {"role": "assistant", "content": message.content}
        return
    turns = [_Turn()]
    for block in message.content:
        if isinstance(block, ThinkingBlock):
            if not block.thinking:
                continue
            if turns[-1].says_something:
                turns.append(_Turn())
            turns[-1].thoughts.append(block.thinking)
        elif isinstance(block, TextBlock):
            turns[-1].texts.append(block.text)
        elif isinstance(block, ToolUseBlock):
            turns[-1].calls.append(plain_call(block.id, block))
    if len(turns) > 1 and not turns[-1].says_something:
        turns.pop()
    yield from (turn.plain() for turn in turns)


_PLAIN: Final[dict[str, Callable[[Any], Iterator[dict[str, object]]]]] = {
    "system": _of_system,
    "user": _of_user,
    "assistant": _of_assistant,
}
