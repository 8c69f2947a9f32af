from __future__ import annotations

import re
import subprocess
import sys

import pytest

from hetero_infer.cli import OTHERS, PROGRAM, app, main
from hetero_infer.commands.command_line import UsageError, read_arguments

HEAVY = (
    "asyncio", "grpc", "hetero_infer.bench.settings", "jinja2", "numpy", "pydantic", "rich",
    "structlog",
)  # fmt: skip


@pytest.mark.parametrize(
    "arguments",
    [
        ["--input", "x", "--no-ignore-eos", "--seed=7"],
        ["serve", "--grpc-port=1"],
        ["complete", "a", "-", "--stop=x", "--stop=y"],
    ],
)
def test_until_planes_are_started_next_to_nothing_is_imported(arguments: list[str]) -> None:
    program = (
        "import sys\n"
        "from hetero_infer import cli\n"
        "action = cli.read_arguments(cli.app, cli.OTHERS, sys.argv[1:], program='x')\n"
        "assert callable(action)\n"
        "import hetero_infer.commands.generate, hetero_infer.commands.serve\n"
        f"print([name for name in {HEAVY} if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", OTHERS)
def test_the_help_names_commands_that_are_added_when_they_are_named(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--help"]) == 0
    assert f" {name} " in capsys.readouterr().out
    assert main([name, "--help"]) == 0
    assert f"{PROGRAM} {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [[], *([name] for name in OTHERS), ["token", "create"], ["bench", "link"]]
)
def test_the_help_speaks_of_no_types_of_python(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--help" in shown
    assert "[[" not in shown
    assert re.findall(r"<(?:bool|str|int|float|list|path|text)\b.*?>", shown) == []


def test_an_error_is_told_by_a_command_line_that_knows_all_commands() -> None:
    with pytest.raises(UsageError, match="Did you mean 'bench'"):
        read_arguments(app, OTHERS, ["benhc"], program=PROGRAM)
