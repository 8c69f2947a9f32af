"""Command-line options made from declared settings, so that each is described in one place only."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Annotated, Any, Final

import typer

from planes.errors import ValidationError
from planes.settings import Setting, settings_of

Command = Callable[..., Any]

NO = "no_"
"""Begins the name of the option that switches a setting off; no setting begins like that."""

AS_GIVEN = "options_taken_as_given"

REPEATED: Final[Any] = list[str] | None
"""The type of an option that may be given again."""

TEXTS: Final[Any] = (str | None, bool | None, REPEATED)
"""The types of what is handed on as it was given: text, texts or a switch."""


def options_of(cls: type, heading: Callable[[Setting], str]) -> list[inspect.Parameter]:
    """Return the options of the settings of a configuration class: one each, two for a switch.

    `heading`: under which heading of the help a setting stands. Values stay text, or a list of
    texts where an option may be given again, and None means not given: `Settings.resolve` parses
    and checks them, because there flag, environment and file meet.
    """
    options = []
    for item in settings_of(cls):
        if item.rule.read is not None:
            options.append(_option(item, item.name, REPEATED, item.flag, heading(item)))
        elif item.kind is not bool:
            options.append(_option(item, item.name, str | None, item.flag, heading(item)))
        elif item.default:
            spelling = f"{item.flag}/{_negative(item.flag)}"
            options.append(_option(item, item.name, bool | None, spelling, heading(item)))
        else:  # the help has room for one spelling only, and the other is the default anyway
            options.append(_option(item, item.name, bool | None, item.flag, heading(item)))
            options.append(_option(item, NO + item.name, bool | None, _negative(item.flag), None))
    return options


def _negative(flag: str) -> str:
    return flag.replace("--", "--no-", 1)


def _option(
    item: Setting,
    name: str,
    kind: Any,  # noqa: ANN401 - a type, which may be a union
    spelling: str,
    heading: str | None,
) -> inspect.Parameter:
    """Return an option; without a heading it is not in the help."""
    option = typer.Option(
        spelling,
        help=_help(item),
        metavar="" if item.kind is bool else item.rule.metavar or item.kind.__name__.upper(),
        show_default=False,
        rich_help_panel=heading,
        hidden=heading is None,
    )
    annotation: Any = Annotated[kind, option]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def _help(item: Setting) -> str:
    """Say what a setting means, what it may be and what it is if nobody says."""
    text = item.rule.help
    if item.rule.choices:
        text += f": {', '.join(item.rule.choices)}"
    facts = [] if item.rule.range_text is None else [item.rule.range_text]
    is_told = item.default is not None and item.default is not False and item.default != ()
    if is_told and not text.startswith(f"{item.default} "):
        facts.append(f"default {item.default}")
    return f"{text} [dim]({'; '.join(facts)})[/dim]" if facts else text


def with_options(options: Collection[inspect.Parameter]) -> Callable[[Command], Command]:
    """Let typer see `options` in place of a command's `**flags`, which get the settings' names."""
    opposites = {option.name for option in options if option.name.startswith(NO)}
    repeated = {option.name for option in options if option.annotation.__origin__ == REPEATED}

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def run(**flags: object) -> object:
            for name in opposites:
                if flags.pop(name):
                    flags[name.removeprefix(NO)] = False
            for name in repeated:  # typer has an empty list where nothing was given
                flags[name] = flags[name] or None
            return command(**flags)

        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        run.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
        kinds = {p.name: getattr(p.annotation, "__origin__", None) for p in (*own, *options)}
        setattr(run, AS_GIVEN, {name for name, kind in kinds.items() if kind in TEXTS})
        return run

    return decorate


def taken_as_given(callback: Command | None) -> frozenset[str]:
    """Return the options and arguments of a command whose values stay as they were given."""
    return frozenset(getattr(callback, AS_GIVEN, ()))


def ask_for_command(context: typer.Context) -> Callable[[], int] | None:
    """Say, for a group of commands that stands alone, which there are."""
    if context.invoked_subcommand is not None:
        return None
    group: Any = context.command
    names = ", ".join(group.list_commands(context))

    def refuse() -> int:
        raise ValidationError(
            f"`{context.info_name}` wants a command behind it: {names}; --help says more"
        )

    return refuse


def refuse_root_flags(flags: Mapping[str, object], command: str) -> None:
    """Raise ValidationError for a flag in front of a command to which it would mean nothing."""
    for name, value in flags.items():
        if value is not None:
            raise ValidationError(
                f"--{name.replace('_', '-')} means nothing to `{command}`; its own options stand "
                "behind it",
                field=name,
            )


def merged(before: dict[str, object], behind: dict[str, object]) -> dict[str, object]:
    """Return the flags before a command and those behind it, which count more."""
    return {**before, **{name: value for name, value in behind.items() if value is not None}}


def refuse_flags(flags: dict[str, object], idle: Iterable[str], why: str) -> None:
    """Raise ValidationError for a flag that would do nothing; a shared file may have its key."""
    for name in idle:
        if flags.get(name) is not None:
            raise ValidationError(f"--{name.replace('_', '-')} {why}", field=name)
