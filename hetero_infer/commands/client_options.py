"""The options of the commands that talk to a server: `chat` and `complete`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterable

from hetero_infer.commands.options import NO, options_of
from hetero_infer.commands.target import (
    ChatGenerationConfig,
    ChatSettings,
    CompleteSettings,
    TargetSettings,
)
from hetero_infer.config import EngineConfig, GenerationConfig
from planes.settings import Setting, settings_of

Heading = Callable[[Setting], str]

SEVERAL = {"n", "beam_width", "length_penalty", "early_stopping", NO + "early_stopping"}
"""Settings that ask for several answers, of which a chat could go on with one only."""

SERVER = {item.name for item in settings_of(TargetSettings)}


def chat_options(heading: Heading) -> list[inspect.Parameter]:
    """Return the options of `chat`. `heading`: of the settings that other commands have too."""
    return [
        *options_of(ChatSettings, _heading),
        *_without({"input", *SEVERAL}, options_of(ChatGenerationConfig, heading)),
        *options_of(EngineConfig, heading),
    ]


def complete_options(heading: Heading) -> list[inspect.Parameter]:
    """Return the options of `complete`. `heading`: as above."""
    return [
        *options_of(CompleteSettings, _heading),
        *_without({"input"}, options_of(GenerationConfig, heading)),
        *options_of(EngineConfig, heading),
    ]


def _heading(item: Setting) -> str:
    if item.name in SERVER:
        return "Server"
    return "Conversation" if item.name == "system" else "Input and output"


def _without(
    names: Container[str], options: Iterable[inspect.Parameter]
) -> list[inspect.Parameter]:
    return [option for option in options if option.name not in names]
