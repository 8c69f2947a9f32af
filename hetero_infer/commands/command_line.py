"""Reading the command line with typer, building no more of it than it names.

Most of what typer does at a start is done once an option: there are some hundred at the root and
more than that at each command, and most command lines name no command, or one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import typer
import typer.main

from hetero_infer.commands.options import taken_as_given

# Typer shows only subclasses of this one; which module it lives in depends on typer's version.
UsageError: Any = typer.BadParameter.__mro__[2]

HELP = "--help"


def read_arguments(
    app: typer.Typer,
    others: Mapping[str, Callable[[typer.Typer], None]],
    arguments: Sequence[str],
    *,
    program: str,
) -> Any:  # noqa: ANN401 - the command's own
    """Return what the command that is named returns. Raises UsageError.

    `others`: what adds the commands that are not in `app` yet, by their names.
    """
    if HELP not in arguments:
        try:
            return _read(app, others, arguments, set(arguments), program)
        except UsageError:
            pass  # to be said by one that knows all commands
    return _read(app, others, arguments, None, program)


def _read(
    app: typer.Typer,
    others: Mapping[str, Callable[[typer.Typer], None]],
    arguments: Sequence[str],
    names: set[str] | None,
    program: str,
) -> Any:  # noqa: ANN401 - the command's own
    """Read with the commands of some names, None: with all."""
    known = copy.copy(app)
    known.registered_commands, known.registered_groups = [], []
    for name, add in others.items():
        if names is None or name in names:
            add(known)
    known.registered_commands += [
        command for command in app.registered_commands if names is None or command.name in names
    ]
    command: Any = typer.main.get_command(known)
    _leave_as_given(command, has_help=names is None)
    return command.main(
        args=list(arguments), prog_name=program, standalone_mode=False, obj=arguments
    )


def _leave_as_given(command: Any, *, has_help: bool) -> None:  # noqa: ANN401 - depends on typer
    """Keep typer from converting what is text already, in a command and those behind it.

    It would import pydantic to do so, and that takes longer than all else it does: even for the
    help that nobody asks for.
    """
    command.add_help_option = has_help
    if has_help:
        _show_no_types(command)
    names = taken_as_given(command.callback)
    for parameter in command.params:
        if parameter.name in names:
            parameter.process_value = _as_given(parameter.process_value)
    for behind in getattr(command, "commands", {}).values():
        _leave_as_given(behind, has_help=has_help)


def _show_no_types(command: Any) -> None:  # noqa: ANN401 - depends on typer
    """Keep `<bool>` and `<list[str]>` out of the help: what a value is, its metavar says."""
    plain = command.get_help_option

    def named(context: Any) -> Any:  # noqa: ANN401 - typer's option
        option = plain(context)
        option.metavar = ""
        return option

    command.get_help_option = named
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            parameter.display_type_rich = _nothing  # typer's newer versions only


def _nothing(ctx: object) -> None:
    """Return no type."""


def _as_given(convert: Callable[[Any, Any], object]) -> Callable[[Any, Any], object]:
    def process(context: Any, value: Any) -> object:  # noqa: ANN401 - whatever the parser found
        if value is None or isinstance(value, (str, bool)):
            return value
        if isinstance(value, (list, tuple)):
            return list(value)
        return convert(context, value)  # a mark of typer's own

    return process
