"""Chat templates: Jinja2 source from the model's files, rendered in a sandbox.

The environment is the one transformers gives a template: immutable sandbox, `trim_blocks`,
`lstrip_blocks`, loop controls, `raise_exception`, `strftime_now`, and a `tojson` that keeps
non-ASCII text and escapes no HTML.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox

from planes.errors import TokenizationError

MAX_TEMPLATE_CHARACTERS = 1 << 20
MAX_RENDERED_CHARACTERS = 16 << 20


class ChatTemplate:
    """A compiled template. Rendering is pure but for `strftime_now`.

    `source` comes from the model's files and is not trusted: it can reach nothing but its
    arguments. Raises TokenizationError, also from `render`.
    """

    def __init__(
        self, source: str, *, bos_token: str | None = None, eos_token: str | None = None
    ) -> None:
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise TokenizationError(
                f"the chat template has at most {MAX_TEMPLATE_CHARACTERS} characters, "
                f"got {len(source)}"
            )
        self._special = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise TokenizationError(f"the model's chat template is invalid: {error}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        documents: Sequence[Mapping[str, object]] | None = None,
    ) -> str:
        """Return the prompt text of a conversation; each message has a `role` and a `content`.

        `add_generation_prompt` ends it where the assistant's answer begins. The text holds its own
        special tokens, BOS included where the model wants one.
        """
        pieces: list[str] = []
        length = 0
        try:
            for piece in self._template.generate(
                messages=messages,
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                **self._special,
            ):
                length += len(piece)
                if length > MAX_RENDERED_CHARACTERS:
                    raise TokenizationError(
                        f"the rendered conversation has at most {MAX_RENDERED_CHARACTERS} "
                        "characters, and the chat template goes on"
                    )
                pieces.append(piece)
        except TokenizationError:
            raise
        # A template is a program: given messages it did not expect it may raise anything.
        except Exception as error:  # noqa: BLE001
            raise TokenizationError(
                f"the chat template refused the messages: {error}", field="messages"
            ) from None
        return "".join(pieces)


def hides_tool_calls(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, object]],
    text: str,
    *,
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, object]] | None,
) -> bool:
    """Whether the template leaves out the tool calls of a conversation that it made `text` of."""
    if not any(message.get("tool_calls") for message in messages):
        return False
    without = [
        {key: value for key, value in message.items() if key != "tool_calls"}
        for message in messages
    ]
    try:
        same = template.render(without, add_generation_prompt=add_generation_prompt, tools=tools)
    except TokenizationError:  # it wants them
        return False
    return same == text


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: str) -> NoReturn:
    """Let a template refuse a conversation."""
    raise jinja2.TemplateError(message)


def _strftime_now(date_format: str) -> str:
    """Return the local date, as templates that mention today expect."""
    return datetime.datetime.now().astimezone().strftime(date_format)


def _to_json(
    value: object,
    *,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Spell a value as JSON: unlike Jinja2's own filter it escapes no HTML characters."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
