"""`hetero-infer token`: who may use a server that was started with `--api-tokens FILE`.

Imported with the command line, so it stays light; the file is read when a command runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetero_infer.commands.options import ask_for_command, refuse_root_flags
from hetero_infer.own_log import warn_as_commands_do

if TYPE_CHECKING:
    from control_plane.access.token_file import TokenEntry

PROGRAM = "hetero-infer"
COLUMNS = ("NAME", "REQUESTS AT ONCE", "TOKENS A MINUTE", "ADMIN", "SHARES CACHE")

Action = Callable[[], int]

token_app = typer.Typer(
    help="Make, list and revoke the tokens of a server's clients.",
    callback=ask_for_command,
    invoke_without_command=True,
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="whose token it is")]
File = Annotated[
    str, typer.Option("--file", metavar="FILE", help="the file that --api-tokens names")
]


@token_app.command(name="create")
def create_command(
    context: typer.Context,
    *,
    name: Name,
    file: File,
    max_concurrent_requests: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="requests under way at once")
    ] = None,
    max_tokens_per_minute: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="tokens of prompts and answers together"),
    ] = None,
    admin: Annotated[
        bool, typer.Option("--admin", help="it may use AdminService", metavar="")
    ] = False,
    shares_cache: Annotated[
        bool,
        typer.Option(
            "--shares-cache",
            help="its prompts and those of others that share may be found again by each other",
            metavar="",
        ),
    ] = False,
) -> Action:
    """Make a token and print it; the file, which is made if there is none, gets its hash."""

    def run() -> int:
        _begin(context)
        from control_plane.access.limits import Limits
        from control_plane.access.token_file import add_token

        limits = Limits(max_concurrent_requests, max_tokens_per_minute)
        token = add_token(Path(file), name, limits, admin=admin, shares_cache=shares_cache)
        sys.stderr.write(f"{PROGRAM}: keep it, it is shown only once; {file} has its hash\n")
        sys.stdout.write(f"{token}\n")
        return 0

    return run


@token_app.command(name="list")
def list_command(
    context: typer.Context,
    *,
    file: File,
    as_json: Annotated[bool, typer.Option("--json", help="print a JSON list", metavar="")] = False,
) -> Action:
    """Show whose tokens there are and what each may use."""

    def run() -> int:
        _begin(context)
        from control_plane.access.token_file import read_tokens

        entries = read_tokens(Path(file))
        sys.stdout.write(_as_json(entries) if as_json else _as_table(entries))
        return 0

    return run


@token_app.command(name="revoke")
def revoke_command(context: typer.Context, *, name: Name, file: File) -> Action:
    """Take a token out of the file; a running server refuses it from its next request on."""

    def run() -> int:
        _begin(context)
        from control_plane.access.token_file import remove_token

        remove_token(Path(file), name)
        sys.stderr.write(f"{PROGRAM}: {name} is revoked: a running server refuses it from now on\n")
        return 0

    return run


def _begin(context: typer.Context) -> None:
    refuse_root_flags(context.obj, "token")
    warn_as_commands_do()


def _as_json(entries: tuple[TokenEntry, ...]) -> str:
    rows = [
        {
            "name": entry.name,
            "max_concurrent_requests": entry.max_concurrent_requests,
            "max_tokens_per_minute": entry.max_tokens_per_minute,
            "admin": entry.admin,
            "shares_cache": entry.shares_cache,
        }
        for entry in entries
    ]
    return json.dumps(rows, indent=2) + "\n"


def _as_table(entries: tuple[TokenEntry, ...]) -> str:
    rows = [
        COLUMNS,
        *(
            (
                entry.name,
                str(entry.max_concurrent_requests or "any"),
                str(entry.max_tokens_per_minute or "any"),
                "yes" if entry.admin else "no",
                "yes" if entry.shares_cache else "no",
            )
            for entry in entries
        ),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    return "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        + "\n"
        for row in rows
    )
