"""Operations of a first start are compiled by several processes, whatever becomes of those."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernels.cpu import compile_worker, compiled, load_ahead, machine_code
from kernels.cpu.compile_worker import Worker
from kernels.cpu.load_ahead import compile_aside, load_all
from kernels.cpu.machine_code import keep_code, keep_code_in
from kernels.cpu.operation import Operation
from planes.errors import ConfigError

NAMES = [
    "step.dismiss",
    "step.work",
    "row_inputs.plain_rows",
    "rope_write.rope_angles",
    "attention.merge_attention",
]


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where machine code is kept: nothing so far, and afterwards where it was."""
    monkeypatch.setattr(machine_code, "_directory", machine_code._directory)
    monkeypatch.setattr(machine_code, "_watch", machine_code._watch)
    keep_code_in(tmp_path)
    return tmp_path


def operations(*names: str) -> list[Operation]:
    """Return them as a process has them that has loaded none."""
    return [Operation(name) for name in names]


def refuse(*_: object) -> Iterator[None]:
    raise AssertionError("nothing is to be compiled here")


@pytest.mark.wide
def test_processes_compile_what_is_not_kept_and_a_later_start_finds_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "object_code", refuse)
    first = operations(*NAMES)
    load_all([*first, first[0]], 2)
    assert all(one.address for one in first)
    assert {path.name for path in directory.iterdir()} == {f"{name}.o" for name in NAMES}

    monkeypatch.setattr(load_ahead, "compile_aside", refuse)
    later = operations(*NAMES)
    load_all(later, 2)
    assert all(one.address for one in later)


def test_the_longest_are_begun_first(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[Operation]] = []
    monkeypatch.setattr(load_ahead, "compile_aside", lambda given, _: asked.append(given) or [])
    monkeypatch.setattr(compiled, "object_code", refuse)
    with pytest.raises(AssertionError, match="nothing is to be compiled"):
        load_all(operations(*NAMES), 2)
    assert [[one.name for one in some] for some in asked] == [[NAMES[-1], *NAMES[:-1]]]


@pytest.mark.wide
def test_what_another_plane_keeps_meanwhile_is_not_compiled_again(directory: Path) -> None:
    made = compile_aside(operations(*NAMES), 1)
    assert next(made)[0].name == NAMES[0]
    for name in NAMES[1:-1]:
        keep_code(name, compiled.object_code(name))
    assert [one.name for one, _ in made] == [NAMES[-1]]


@pytest.mark.wide
@pytest.mark.parametrize(("names", "num_processes"), [(NAMES, 1), (NAMES[:3], 8)])
def test_few_operations_and_one_process_are_this_ones_own_work(
    directory: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], num_processes: int
) -> None:
    monkeypatch.setattr(load_ahead, "compile_aside", refuse)
    load_all(operations(*names), num_processes)
    assert len(list(directory.iterdir())) == len(names)


@pytest.mark.wide
def test_what_cannot_be_compiled_is_told_and_the_rest_is_there(directory: Path) -> None:
    with pytest.raises(KeyError, match=r"step\.nothing"):
        load_all(operations("step.nothing", *NAMES), 2)
    assert {path.name for path in directory.iterdir()} == {f"{name}.o" for name in NAMES}


@pytest.mark.wide
def test_without_other_processes_all_is_compiled_here(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(subprocess, "Popen", fail)
    load_all(operations(*NAMES), 2)
    assert len(list(directory.iterdir())) == len(NAMES)


@pytest.mark.wide
def test_a_process_that_is_killed_costs_only_what_it_was_at(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[int, str]] = []
    begin = Worker.begin

    def noted(worker: Worker, name: str) -> bool:
        begun.append((worker._process.pid, name))
        if len(begun) == 2:
            os.kill(worker._process.pid, signal.SIGKILL)
        return begin(worker, name)

    monkeypatch.setattr(Worker, "begin", noted)
    made = [one.name for one, _ in compile_aside(operations(*NAMES), 2)]
    survivor, (_, lost) = begun[0][0], begun[1]
    assert sorted(made) in (sorted(NAMES), sorted(set(NAMES) - {lost}))
    assert {pid for pid, _ in begun[2:]} == {survivor}


@pytest.mark.wide
def test_an_error_here_ends_the_processes(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr(
        compile_worker.subprocess,
        "Popen",
        lambda *a, popen=subprocess.Popen, **k: started.append(popen(*a, **k)) or started[-1],
    )
    (directory / f"{NAMES[0]}.o").mkdir()  # so it can be neither read nor written
    monkeypatch.setattr(Operation, "load_kept", lambda _: False)
    with pytest.raises(ConfigError, match="directory"):
        load_all(operations(*NAMES), 2)
    assert len(started) == 2
    assert all(process.poll() is not None for process in started)


def test_a_worker_ends_with_its_input() -> None:
    command = [sys.executable, "-m", "kernels.cpu.compile_worker", "generic", "x86-64", ""]
    done = subprocess.run(command, input=b"", capture_output=True, timeout=60, check=True)
    assert done.stdout == b""
