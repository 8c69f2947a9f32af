"""What README.md shows is run, and what it lists is there."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hetero_infer.client.services import DEFAULT_TARGET
from hetero_infer.commands.server import own_server
from hetero_infer.config import EngineConfig, GenerationConfig
from planes.settings import settings_of

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, flags=re.DOTALL)
DEFAULTS = {
    item.flag: item.default
    for config in (EngineConfig, GenerationConfig)
    for item in settings_of(config)
}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def served():
    """Both planes, for the blocks that show a client."""
    with own_server(EngineConfig(), lambda _: None) as server:
        yield server.address


@pytest.mark.spread(2)
@pytest.mark.model
@pytest.mark.parametrize("code", [code for kind, code in BLOCKS if kind == "python"])
def test_each_python_block_runs(code, request):
    if DEFAULT_TARGET in code:
        code = code.replace(DEFAULT_TARGET, str(request.getfixturevalue("served")))
    assert run("-W", "error", "-c", code).stdout.strip()


@pytest.mark.spread(2)
@pytest.mark.model
@pytest.mark.spread(2)
@pytest.mark.parametrize(
    "line",
    [
        line.partition("#")[0].strip()
        for kind, code in BLOCKS
        if kind == "sh"
        for line in code.splitlines()
        if line.startswith("hetero-infer --input")
    ],
)
def test_each_one_shot_command_line_runs(line):
    _, *arguments = shlex.split(line)
    assert run("-m", "hetero_infer", *arguments, "--max-tokens", "4").stdout.strip()


def test_the_verbs_that_are_shown_are_in_the_makefile():
    verbs = re.findall(r"^make ([a-z-]+)", README, flags=re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert verbs
    for verb in verbs:
        assert re.search(rf"^{verb}:", makefile, flags=re.MULTILINE), verb


def test_the_table_of_options_has_the_real_defaults():
    rows = re.findall(r"^\| `(--[a-z-]+)` \| (\S+) \|", README, flags=re.MULTILINE)
    assert len(rows) >= 10
    for flag, default in rows:
        if flag in ("--model", "--seed"):
            continue  # their defaults stand in words
        words = {"on": True, "off": False, "none": None}
        given = words[default] if default in words else type(DEFAULTS[flag])(default)
        assert given == DEFAULTS[flag], flag


def test_every_room_of_the_map_is_there():
    rooms = re.findall(r"^\| `([a-z_/]+/)`", README, flags=re.MULTILINE)
    assert len(rooms) >= 10
    for room in rooms:
        assert (ROOT / room).is_dir(), room


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))], ids=lambda page: page.name
)
def test_every_file_that_is_linked_is_there(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_every_promise_about_faults_names_tests_that_are_there():
    promises = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    names = set(re.findall(r"`(test_[a-z_]+)`", promises))
    assert len(names) >= 15
    for path in ROOT.glob("tests/**/test_*.py"):
        names -= set(re.findall(r"def (test_\w+)", path.read_text(encoding="utf-8")))
    assert not names


def test_the_example_configuration_loads_and_holds_the_defaults():
    path = ROOT / "config.example.json"
    assert EngineConfig.from_file(path) == EngineConfig()
    assert set(json.loads(path.read_text())) <= {item.name for item in settings_of(EngineConfig)}
