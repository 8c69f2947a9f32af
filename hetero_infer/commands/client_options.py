"""The options of the commands that talk to a server: `chat`, `complete` and `embed`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterable, Mapping

from hetero_infer.commands.command_line import UsageError
from hetero_infer.commands.options import NO, options_of
from hetero_infer.commands.target import (
    ChatGenerationConfig,
    ChatSettings,
    ClientSettings,
    CompleteSettings,
    EmbedSettings,
)
from hetero_infer.config import EngineConfig
from hetero_infer.generation_config import GenerationConfig
from planes.errors import ValidationError
from planes.settings import Setting, settings_of

Heading = Callable[[Setting], str]

SEVERAL = {"n", "beam_width", "length_penalty", "early_stopping", NO + "early_stopping"}
"""Settings that ask for several answers, of which a chat could go on with one only."""

LOGPROBS = {"logprobs", "prompt_logprobs"}
"""Settings whose results only JSON has room for."""

NOT_CHATTED = SEVERAL | LOGPROBS

SERVER = {item.name for item in settings_of(ClientSettings)}


def chat_options(heading: Heading) -> list[inspect.Parameter]:
    """Return the options of `chat`. `heading`: of the settings that other commands have too."""
    return [
        *options_of(ChatSettings, _heading),
        *_without({"input", *NOT_CHATTED}, options_of(ChatGenerationConfig, heading)),
        *options_of(EngineConfig, heading),
    ]


def complete_options(heading: Heading) -> list[inspect.Parameter]:
    """Return the options of `complete`. `heading`: as above."""
    return [
        *options_of(CompleteSettings, _heading),
        *_without({"input"}, options_of(GenerationConfig, heading)),
        *options_of(EngineConfig, heading),
    ]


def embed_options(heading: Heading) -> list[inspect.Parameter]:
    """Return the options of `embed`. `heading`: as above."""
    return [*options_of(EmbedSettings, _heading), *options_of(EngineConfig, heading)]


def refuse_engine_flags(flags: Mapping[str, object]) -> None:
    """Raise ValidationError for a flag of an engine beside --target."""
    for item in settings_of(EngineConfig):
        if flags.get(item.name) is not None:
            raise ValidationError(
                f"{item.flag} means nothing with --target: that server has its own",
                field=item.name,
            )


def message_of(error: UsageError) -> str:
    """Return typer's message; of what has its place behind a command, or in a flag, say where.

    An option that a command takes is not said to be like another one; a word that is like no
    command is taken for a prompt.
    """
    message: str = error.format_message().removesuffix(".")
    if error.ctx is None or error.ctx.parent is not None:
        return message
    option = getattr(error, "option_name", None)
    if option is None:
        is_no_command = message.startswith("No such command") and not message.endswith("?")
        return f"{message}; a prompt is given by --input" if is_no_command else message
    takers = [
        f"`{command}`"
        for command, settings in (
            ("chat", ChatSettings),
            ("complete", CompleteSettings),
            ("embed", EmbedSettings),
        )
        if any(option == item.flag for item in settings_of(settings))
    ]
    if not takers:
        return message
    verb = "take" if len(takers) > 1 else "takes"
    names = " and ".join([", ".join(takers[:-1]), takers[-1]] if takers[1:] else takers)
    place = f"{names} {verb} it, behind the name of the command"
    return f"{error.message}: {place}"


def _heading(item: Setting) -> str:
    if item.name in SERVER:
        return "Server"
    return "Conversation" if item.name == "system" else "Input and output"


def _without(
    names: Container[str], options: Iterable[inspect.Parameter]
) -> list[inspect.Parameter]:
    return [option for option in options if option.name not in names]
