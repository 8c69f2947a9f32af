"""Which format a model's answers have, as its chat template shows it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final

from control_plane.core.tool_calls import THINK
from control_plane.text import example_call
from control_plane.text.answers.call_readers import HermesReader
from control_plane.text.answers.formats import AUTO, CALL_READERS, HARMONY, NONE, THOUGHT_MARKS
from control_plane.text.answers.harmony_reader import (
    CHANNEL,
    FINAL_OPENING,
    START,
    HarmonyReader,
    HarmonyTextReader,
)
from control_plane.text.answers.parameter_kinds import NO_TOOLS, parameters_of_tools
from control_plane.text.answers.parameter_reader import ParameterReader
from control_plane.text.answers.parser import AnswerFormat, Thinking
from control_plane.text.answers.parts_reader import PartsReader
from control_plane.text.answers.until import SPACE
from control_plane.text.chat_template import ChatTemplate
from control_plane.text.tokenizer import PlainTokenizer, Tokenizer
from planes.errors import TokenizationError

_MOST_READ: Final = 1 << 14
"""Characters that a template writes for a call; it may write millions, and a server would wait."""


class AnswerFormats:
    """How answers of one model are read.

    `calls`: the name of the tool calls' format; None: they are text. `reasoning`: the name of its
    marks; None: it is not split off. `has_channels`: answers are messages in channels, harmony.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        tool_call_parser: str = AUTO,
        reasoning_parser: str = AUTO,
    ) -> None:
        if tool_call_parser == AUTO:
            self.calls = None if template is None else format_of_calls(template, tokenizer)
        else:
            self.calls = None if tool_call_parser == NONE else tool_call_parser
        if reasoning_parser == AUTO:
            self.reasoning = None if template is None else _marks_of(template)
        else:
            self.reasoning = None if reasoning_parser == NONE else reasoning_parser
        self._marks = THOUGHT_MARKS.get(self.reasoning or "")
        self.has_channels = HARMONY in (self.calls, self.reasoning)
        if self.has_channels and self.calls != HARMONY:
            self.calls = None  # what is in no channel is no call
        names = () if self.calls is None else CALL_READERS[self.calls].NAMES
        if self.has_channels:
            names = (*names, *HarmonyReader.NAMES)
        self._spelled = _special_tokens(tokenizer, () if self._marks is None else self._marks.names)
        self._spelled_with_calls = {**self._spelled, **_special_tokens(tokenizer, names)}

    def of(
        self,
        prompt: str,
        *,
        tools: Sequence[Mapping[str, object]],
        messages: Sequence[Mapping[str, object]] = (),
        continued: str | None = None,
    ) -> AnswerFormat | None:
        """Return how the answer to a prompt is read; None: all of it is content.

        `messages`: of the conversation, and `tools`: those that may be called, both as chat
        templates get them. `continued`: what the last message says so far, if the answer goes on
        with it.
        """
        if self.has_channels:
            return self._in_channels(prompt, continued, has_tools=bool(tools))
        reader = CALL_READERS[self.calls] if tools and self.calls is not None else None
        if not (reader or self._marks):
            return None
        thinking = self._thinking(prompt, continued)
        if not reader and thinking is Thinking.IS_OVER:
            return None
        reads = reader is not None and reader.READS_PARAMETERS
        return AnswerFormat(
            thinking,
            reader,
            is_start=continued is None,
            spelled=self._spelled_with_calls if reader else self._spelled,
            parameters=parameters_of_tools(tools) if reads else NO_TOOLS,
            marks=self._marks or THINK,
            num_earlier_calls=_num_calls(messages),
        )

    def _in_channels(self, prompt: str, continued: str | None, *, has_tools: bool) -> AnswerFormat:
        reads_calls = has_tools and self.calls == HARMONY
        opens = continued is None and prompt.rstrip().endswith(f"{START}assistant")
        return AnswerFormat(
            Thinking.MAY_BEGIN if self.reasoning == HARMONY else Thinking.IS_OVER,
            HarmonyReader if reads_calls else HarmonyTextReader,
            is_start=continued is None,
            spelled=self._spelled_with_calls,
            form_opening=FINAL_OPENING if opens else "",
        )

    def _thinking(self, prompt: str, continued: str | None) -> Thinking:
        if self._marks is None:
            return Thinking.IS_OVER
        if continued is not None:
            # As of an answer: reasoning is what it begins with, elsewhere the mark is a word.
            begins = continued.lstrip(SPACE).startswith(self._marks.opening)
            is_inside = begins and self._marks.end not in continued
            return Thinking.HAS_BEGUN if is_inside else self._thinking_later
        end = prompt.rstrip()
        if end.endswith(self._marks.opening):
            return Thinking.HAS_BEGUN
        return self._thinking_later if end.endswith(self._marks.end) else Thinking.MAY_BEGIN

    @property
    def _thinking_later(self) -> Thinking:
        """Where the reasoning is of an answer that does not begin with any."""
        recurs = self._marks is not None and self._marks.recur
        return Thinking.MAY_COME if recurs else Thinking.IS_OVER


def _num_calls(messages: Sequence[Mapping[str, object]]) -> int:
    calls = (message.get("tool_calls") for message in messages)
    return sum(len(some) for some in calls if isinstance(some, Sequence))


def _marks_of(template: ChatTemplate) -> str | None:
    """Return whose marks a template knows: it may only take reasoning away, or only open it."""
    if CHANNEL in template.source:
        return HARMONY
    for name, marks in THOUGHT_MARKS.items():
        if any(mark in template.source for mark in (marks.opening, marks.end)):
            return name
    return None


def format_of_calls(template: ChatTemplate, tokenizer: Tokenizer) -> str | None:
    """Return the format of a model's calls; None: none that is known, or one of several.

    That is the one in which the template writes a call; of those that write none the one whose
    marks are in what they tell of tools, or in the vocabulary; and of those that know nothing of
    tools, and so are told in a message, Hermes', which many models have learnt elsewhere.
    """
    places = template.tool_places
    if places.writes_calls:
        return _format_as_written(template)
    told = _format_as_told(template) if places.tells else None
    found = told or _format_of_vocabulary(tokenizer)
    if found or places.tells or not places.role_of_told:
        return found
    return HermesReader.FORMAT


def _format_as_told(template: ChatTemplate) -> str | None:
    """Return the one format all of whose marks are in what a template tells of tools.

    Some have another's mark and one more.
    """
    try:
        text = template.render(example_call.ASKING, tools=[example_call.TOOL])
    except TokenizationError:
        return None
    marks = {name: _own_marks(reader) for name, reader in CALL_READERS.items() if reader.MARKERS}
    told = [name for name, those in marks.items() if all(mark in text for mark in those)]
    most = max((len(marks[name]) for name in told), default=0)
    found = [name for name in told if len(marks[name]) == most]
    return found[0] if len(found) == 1 else None


def _own_marks(reader: type[PartsReader]) -> Sequence[str]:
    first = reader.MARKERS[0]
    return (first, reader.PARAMETER) if issubclass(reader, ParameterReader) else (first,)


def _format_of_vocabulary(tokenizer: Tokenizer) -> str | None:
    """Return the one format whose calls begin with a special token of a vocabulary."""
    found = [
        name
        for name, reader in CALL_READERS.items()
        if _special_tokens(tokenizer, reader.MARKERS[:1])
    ]
    return found[0] if len(found) == 1 else None


def _format_as_written(template: ChatTemplate) -> str | None:
    """Return the one format in which a template writes a call; None: none that is known, or two.

    It is given a conversation with a call, and what it writes is read.
    """
    # A template may take no id but those of one kind, or write it where the name belongs.
    named = (reader.call_id(example_call.NAME, 0) for reader in CALL_READERS.values())
    for call_id in (example_call.ID, *filter(None, named)):
        written = _written(template, example_call.calling(call_id=call_id))
        left = {
            name: content
            for name, reader in CALL_READERS.items()
            if (content := _content_beside_the_call(reader, written)) is not None
        }
        # What one of them leaves, and begins a call to another, it does not know.
        markers = {mark for name in left for mark in CALL_READERS[name].MARKERS}
        found = [name for name in left if not any(mark in left[name] for mark in markers)]
        if left:
            return found[0] if len(found) == 1 else None
    return None


def _written(template: ChatTemplate, calling: Mapping[str, object]) -> str:
    """Return what a template writes of a message; nothing where that cannot be told."""
    asking, tools = example_call.ASKING, [example_call.TOOL]
    try:
        whole = template.render([*asking, calling], tools=tools, add_generation_prompt=False)
        # Earlier messages may begin otherwise than answers do: without `<think>`, for one.
        beginnings = [
            template.render(asking, tools=tools, add_generation_prompt=opens)
            for opens in (True, False)
        ]
    except TokenizationError:  # it knows no calls, or wants them otherwise
        return ""
    begun = next((text for text in beginnings if whole.startswith(text)), None)
    return "" if begun is None else whole.removeprefix(begun)[:_MOST_READ]


def _content_beside_the_call(reader: type[PartsReader], written: str) -> str | None:
    """Return the content that is read beside the call; None where that does not come out."""
    parser = AnswerFormat(Thinking.MAY_BEGIN, reader).parser()
    known, rest = parser.push(written), parser.finish()
    calls = known.calls
    if len(calls) != 1 or calls[0].name != example_call.NAME:
        return None
    try:
        is_it = json.loads(calls[0].arguments) == example_call.ARGUMENTS
    except ValueError:
        return None
    return known.content + rest.content if is_it else None


def _special_tokens(tokenizer: Tokenizer, names: tuple[str, ...]) -> dict[int, str]:
    """Return those of the names that are one special token each, which has no text."""
    if not isinstance(tokenizer, PlainTokenizer):
        return {}
    found = {}
    for name in names:
        token_ids = tokenizer.encode_plain(name)
        if len(token_ids) == 1 and not tokenizer.decode(token_ids):
            found[token_ids[0]] = name
    return found
