"""Chat templates: Jinja2 source from the model's files, rendered in a sandbox.

The environment is the one transformers gives a template: immutable sandbox, `trim_blocks`,
`lstrip_blocks`, loop controls, `{% generation %}`, `raise_exception`, `strftime_now`, a `dict` that
only makes one, and a `tojson` that keeps non-ASCII text and escapes no HTML.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser

from control_plane.text.call_form import CallForm, form_of
from control_plane.text.template_kwargs import FIELD, OWN_VARIABLES
from control_plane.text.template_limits import (
    MAX_RENDERED_CHARACTERS,
    LimitedEnvironment,
    with_clock,
)
from control_plane.text.tool_places import ToolPlaces, places_of
from planes.errors import TokenizationError, ValidationError

MAX_TEMPLATE_CHARACTERS = 1 << 20

NO_TEMPLATE: Final = "the model has no chat template"
"""What conversations with a model that comes without one are told."""

MAX_TOLD: Final = 32
"""Characters of an unknown name, and names that a template reads, in a message."""

NONE: Final[Mapping[str, object]] = MappingProxyType({})


class ChatTemplate:
    """A compiled template. Rendering is pure but for `strftime_now`.

    `source` comes from the model's files and is not trusted: it can reach nothing but its
    arguments. `defaults`: variables for conversations that do not set them, checked already; those
    that the template does not read are left out. Raises TokenizationError, also from `render`.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        defaults: Mapping[str, object] = NONE,
    ) -> None:
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise TokenizationError(
                f"the chat template has at most {MAX_TEMPLATE_CHARACTERS} characters, "
                f"got {len(source)}"
            )
        self.source = source
        self._special = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        environment = _environment()
        try:
            tree = environment.parse(source)
            read = jinja2.meta.find_undeclared_variables(tree)
            self._template = environment.limited(tree)
        except jinja2.TemplateError as error:
            raise TokenizationError(f"the model's chat template is invalid: {error}") from None
        self.variables = frozenset(read) - OWN_VARIABLES
        """Names that the template reads and callers may set; those that it sets itself in one
        branch and reads in another are among them."""
        self._defaults = {name: defaults[name] for name in defaults if name in self.variables}

    def check_variables(self, names: Iterable[str]) -> None:
        """Raise ValidationError for a variable that would be ignored without a word."""
        for name in names:
            if name not in self.variables:
                raise ValidationError(f"{FIELD}: {self._says_what_it_reads(name)}", field=FIELD)

    def _says_what_it_reads(self, name: str) -> str:
        known = ", ".join(sorted(self.variables)[:MAX_TOLD]) or "no other variable"
        return f"the model's chat template does not read {name[:MAX_TOLD]!r}; it reads {known}"

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        variables: Mapping[str, object] = NONE,
    ) -> str:
        """Return the prompt text of a conversation; each message has a `role` and a `content`.

        `add_generation_prompt` ends it where the assistant's answer begins. `variables`: what else
        the template is told, over the defaults. The text holds its own special tokens, BOS included
        where the model wants one.
        """
        if any(message.get("tool_calls") for message in messages):
            messages = self._call_form.of(messages)
        return self._rendered(
            messages,
            tools=tools,
            variables=variables,
            add_generation_prompt=add_generation_prompt,
        )

    @functools.cached_property
    def _call_form(self) -> CallForm:
        return form_of(functools.partial(self._rendered, add_generation_prompt=False))

    @functools.cached_property
    def tool_places(self) -> ToolPlaces:
        """What of conversations with tools the template has places for."""
        return places_of(functools.partial(self.render, add_generation_prompt=False))

    def _rendered(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None,
        variables: Mapping[str, object] = NONE,
        add_generation_prompt: bool,
    ) -> str:
        context = {
            "documents": None,
            **self._defaults,
            **variables,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            **self._special,
        }
        pieces: list[str] = []
        length = 0
        try:
            for piece in self._template.generate(with_clock(context)):
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


_END: Final = "END_OF_THE_LAST_MESSAGE "
"""Ends in a space, so that it shows whether a template takes space away there."""


def up_to_the_end_of_the_last(
    render: Callable[..., str], messages: Sequence[Mapping[str, object]], **arguments: object
) -> str:
    """Return what `render` makes of messages as far as the content of the last one reaches.

    As transformers does for `continue_final_message`: space at its end goes where the template
    takes it away. Raises TokenizationError for a template that leaves the content out.
    """
    last = messages[-1]
    marked = {**last, "content": f"{last['content']}{_END}"}
    text = render([*messages[:-1], marked], **arguments)
    end = text.rfind(_END.strip())
    if end < 0:
        raise TokenizationError(
            "the model's chat template leaves out what the last message says, so that no answer "
            "can go on with it",
            field="continue_final_message",
        )
    return text[:end] if text.startswith(_END, end) else text[:end].rstrip()


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`: marks what the assistant said, for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - the base class has it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Return what stands between the tags; names set there are unknown behind them."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class _Dict:
    """`dict`, with which a template can make one; the class's methods would change others."""

    def __call__(self, *args: Any, **kwargs: object) -> dict[Any, Any]:  # noqa: ANN401 - as of `dict`
        return dict(*args, **kwargs)


def _environment() -> LimitedEnvironment:
    environment = LimitedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["dict"] = _Dict()
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
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Spell a value as JSON: unlike Jinja2's own filter it escapes no HTML characters."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
