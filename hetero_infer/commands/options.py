"""Command-line options made from declared settings, so that each is described in one place only."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Annotated, Any

import typer

from planes.settings import Setting, settings_of

Command = Callable[..., Any]

NO = "no_"
"""Begins the name of the option that switches a setting off; no setting begins like that."""


def options_of(cls: type, heading: Callable[[Setting], str]) -> list[inspect.Parameter]:
    """Return the options of the settings of a configuration class: one each, two for a switch.

    `heading`: under which heading of the help a setting stands. Values stay text and None means not
    given: `Settings.resolve` parses and checks them, because there flag, environment and file meet.
    """
    options = []
    for item in settings_of(cls):
        if item.kind is not bool:
            options.append(_option(item, item.name, str, item.flag, heading(item)))
        elif item.default:
            spelling = f"{item.flag}/{_negative(item.flag)}"
            options.append(_option(item, item.name, bool, spelling, heading(item)))
        else:  # the help has room for one spelling only, and the other is the default anyway
            options.append(_option(item, item.name, bool, item.flag, heading(item)))
            options.append(_option(item, NO + item.name, bool, _negative(item.flag), None))
    return options


def _negative(flag: str) -> str:
    return flag.replace("--", "--no-", 1)


def _option(
    item: Setting, name: str, kind: type, spelling: str, heading: str | None
) -> inspect.Parameter:
    """Return an option; without a heading it is not in the help."""
    option = typer.Option(
        spelling,
        help=_help(item),
        metavar="" if kind is bool else item.kind.__name__.upper(),
        show_default=False,
        rich_help_panel=heading,
        hidden=heading is None,
    )
    annotation: Any = Annotated[kind | None, option]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def _help(item: Setting) -> str:
    """Say what a setting means, what it may be and what it is if nobody says."""
    text = item.rule.help
    if item.rule.choices:
        text += f": {', '.join(item.rule.choices)}"
    facts = [] if item.rule.range_text is None else [item.rule.range_text]
    if item.default not in (None, False) and not text.startswith(f"{item.default} "):
        facts.append(f"default {item.default}")
    return f"{text} [dim]({'; '.join(facts)})[/dim]" if facts else text


def with_options(options: Collection[inspect.Parameter]) -> Callable[[Command], Command]:
    """Let typer see `options` in place of a command's `**flags`, which get the settings' names."""
    opposites = {option.name for option in options if option.name.startswith(NO)}

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def run(**flags: object) -> object:
            for name in opposites:
                if flags.pop(name):
                    flags[name.removeprefix(NO)] = False
            return command(**flags)

        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        run.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
        return run

    return decorate
