"""Which chat template is used: the operator's file, or the model's own; and with which defaults."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import structlog

from control_plane.engine.bring_up import ConnectedPlane
from control_plane.text.answers.formats import AUTO
from control_plane.text.answers.recognition import AnswerFormats
from control_plane.text.assets import make_chat_template
from control_plane.text.chat_template import MAX_TEMPLATE_CHARACTERS, NO_TEMPLATE, ChatTemplate
from control_plane.text.conversation import json_object
from planes.errors import ConfigError, TokenizationError

_log = structlog.get_logger(__name__)


class Chosen(NamedTuple):
    """The template; None: there is none to be used, and `why_none` says why."""

    template: ChatTemplate | None
    why_none: str = ""


class TemplateChoice:
    """Reads the operator's file at once, compiles when the model is known.

    `defaults`: variables for conversations that do not set them, the JSON text of an object.
    `tool_call_parser` and `reasoning_parser`: how answers are read, `auto`: as the template shows.
    Raises ConfigError if there is a file and it cannot be read or is no template.
    """

    def __init__(
        self,
        file_name: str | None,
        defaults: str | None = None,
        *,
        tool_call_parser: str = AUTO,
        reasoning_parser: str = AUTO,
    ) -> None:
        self._parsers = (tool_call_parser, reasoning_parser)
        self._defaults = json_object(defaults or "")
        self._source: str | None = None
        if file_name is not None:
            self._source = _read(file_name)
            try:
                ChatTemplate(self._source)
            except TokenizationError as error:
                raise ConfigError(
                    f"chat_template: {file_name}: {error.message}", field="chat_template"
                ) from None

    def make(self, connected: ConnectedPlane) -> Chosen:
        """Return the template; if the model's own is unusable there is a line in the log, too."""
        try:
            template = make_chat_template(
                connected.assets, connected.tokenizer, self._source, self._defaults
            )
        except TokenizationError as error:
            _log.warning("chat is not served", error=error.message)
            return Chosen(None, error.message)
        known = frozenset() if template is None else template.variables
        unread = sorted(self._defaults.keys() - known)
        if unread:
            _log.warning(
                "the chat template does not read what --chat-template-kwargs sets",
                unread=unread,
                reads=sorted(known),
            )
        return Chosen(template, NO_TEMPLATE if template is None else "")

    def formats(
        self, connected: ConnectedPlane, template: ChatTemplate | None
    ) -> AnswerFormats | None:
        """Return how answers to conversations are read; None: there are none."""
        if template is None:
            return None
        found = AnswerFormats(connected.tokenizer, template, *self._parsers)
        if found.calls is not None or found.reasoning is not None:
            _log.info(
                "answers of chats come in parts",
                tool_calls=found.calls or "no",
                reasoning=found.reasoning or "no",
            )
        return found


def _read(file_name: str) -> str:
    try:
        with Path(file_name).open(encoding="utf-8") as file:
            return file.read(MAX_TEMPLATE_CHARACTERS + 1)  # one that is longer is refused, not cut
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"chat_template: cannot read {file_name}: {error}", field="chat_template"
        ) from None
