"""In what form chat templates are given earlier messages with calls.

Most want arguments as objects, and spell them as JSON; to most, content that is empty is a text.
Those of DeepSeek V3 and R1 put texts together, and see calls only where there is no content at all:
given an object they fail, and others would spell it in Python's way.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from control_plane.text import example_call
from planes.errors import TokenizationError


class CallForm(NamedTuple):
    """`arguments_are_text`: else objects. `empty_is_none`: content that is empty is None."""

    arguments_are_text: bool = False
    empty_is_none: bool = False

    def of(self, messages: Sequence[Mapping[str, object]]) -> Sequence[Mapping[str, object]]:
        """Return messages, as conversations have them, as a template wants them."""
        if self == CallForm():
            return messages
        return [part for message in messages for part in self._parts(message)]

    def _parts(self, message: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
        """Return a message; content beside calls in one of its own where they must have none."""
        calls = message.get("tool_calls")
        if not calls or not isinstance(calls, Sequence):
            yield message
            return
        found = dict(message)
        if self.arguments_are_text:
            found["tool_calls"] = [_with_text(call) for call in calls]
        if self.empty_is_none:
            if message.get("content"):
                yield {key: value for key, value in message.items() if key != "tool_calls"}
            found["content"] = None
        yield found


def form_of(render: Callable[..., str]) -> CallForm:
    """Return the form in which a template writes a call; the usual one where none shows.

    With objects where those show; then the one of the shortest text: some templates write an empty
    message behind a call that has empty content. `render`: takes messages and `tools`, and raises
    TokenizationError.
    """
    ways = [CallForm(text, none) for none in (False, True) for text in (False, True)]
    with_tools = functools.partial(render, tools=example_call.tools_for(render))
    lengths = {form: length for form in ways if (length := _length_with_call(with_tools, form))}
    return min(
        lengths, key=lambda form: (form.arguments_are_text, lengths[form]), default=CallForm()
    )


def _length_with_call(render: Callable[..., str], form: CallForm) -> int:
    """Return how long a conversation with a call is; 0 where the call does not show."""
    messages = form.of([*example_call.ASKING, example_call.calling()])
    try:
        text = render(messages)
    except TokenizationError:
        return 0
    arguments = example_call.ARGUMENTS
    if form.arguments_are_text:  # text that is spelled as JSON shows, too, and is another
        shows = json.dumps(arguments) in text
    else:
        shows = str(arguments) not in text and all(str(one) in text for one in arguments.values())
    return len(text) if shows else 0


def _with_text(call: object) -> object:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, Mapping):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}
