"""Command-line options made from declared settings, so that each is described in one place only."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Annotated, Any

import typer

from planes.settings import Setting, settings_of

Command = Callable[..., Any]


def options_of(cls: type, heading: Callable[[Setting], str]) -> list[inspect.Parameter]:
    """Return one option for each setting of a configuration class.

    `heading`: under which heading of the help a setting stands. Values stay text and None means not
    given: `Settings.resolve` parses and checks them, because there flag, environment and file meet.
    """
    return [_option(item, heading(item)) for item in settings_of(cls)]


def _option(item: Setting, heading: str) -> inspect.Parameter:
    is_switch = item.kind is bool
    spelling = f"{item.flag}/{item.flag.replace('--', '--no-', 1)}" if is_switch else item.flag
    kind: Any = bool | None if is_switch else str | None
    option = typer.Option(
        spelling,
        help=_help(item),
        metavar="" if is_switch else item.kind.__name__.upper(),
        show_default=False,
        rich_help_panel=heading,
    )
    return inspect.Parameter(
        item.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind, option],
    )


def _help(item: Setting) -> str:
    text = item.rule.help
    if item.rule.choices:
        text += f": {', '.join(item.rule.choices)}"
    if item.default in (None, False) or text.startswith(f"{item.default} "):
        return text
    return f"{text} [dim](default {item.default})[/dim]"


def with_options(options: Collection[inspect.Parameter]) -> Callable[[Command], Command]:
    """Let typer see `options` in place of a command's `**flags`."""

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        command.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
        return command

    return decorate
